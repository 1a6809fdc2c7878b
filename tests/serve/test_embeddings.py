"""Embeddings: what they are, by OpenAI's own client.

The same bits alone and in company; what is refused.
"""

import base64
import concurrent.futures
from unittest.mock import ANY

import numpy as np
import pytest
from helpers_serve import COMPLETIONS, refused
from models import SERVED, served

from jllama.lab.checks import random_params
from jllama.models import oracle

EMBEDDINGS = "/v1/embeddings"
LENGTHS = [1, 2, 17, 255, 256, 257, 1024]
IDS = {
    length: [int(id) for id in np.random.default_rng(length).integers(3, 259, length)]
    for length in LENGTHS
}


def vectors(http, prompts, **fields):
    """The embeddings of an input, by their bits."""
    reply = http.post(EMBEDDINGS, json={"input": prompts, "encoding_format": "base64"} | fields)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [item["index"] for item in data] == [*range(len(data))]
    return [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data]


@pytest.mark.parametrize("length", LENGTHS)
def test_they_are_the_models_final_activations(length, http):
    """The mean of all tokens', or the last one's, of length 1; over any number of chunks."""
    params = random_params(SERVED, 0) | {"lm_head": np.eye(SERVED.embed_dim)}
    hidden = oracle.forward(params, np.array([IDS[length]]), SERVED)[0]
    for pooling, expected in (("mean", hidden.mean(axis=0)), ("last", hidden[-1])):
        (actual,) = vectors(http, IDS[length], pooling=pooling)
        np.testing.assert_allclose(actual, expected / np.linalg.norm(expected), rtol=0, atol=1e-5)
        assert np.linalg.norm(actual) == pytest.approx(1, abs=1e-6)


def test_the_clients_own_form(client, http):
    def create(prompts, **fields):
        answer = client.embeddings.create(model="small", input=prompts, **fields)
        assert [(item.index, item.object, len(item.embedding)) for item in answer.data] == [
            (index, "embedding", SERVED.embed_dim) for index in range(len(answer.data))
        ]
        return answer

    answer = create(["hello", "wörld"])
    ids = [[1, *served().tokenizer.encode(text)] for text in ("hello", "wörld")]
    assert (answer.object, answer.model) == ("list", "small")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    vectors = [item.embedding for item in answer.data]
    as_numbers = create(["hello", "wörld"], encoding_format="float")
    assert [item.embedding for item in as_numbers.data] == vectors
    assert create(ids, dimensions=64).data == answer.data
    assert create("hello", user="me").data == create(ids[0]).data == answer.data[:1]
    assert create("hello", extra_body={"pooling": "last"}).data != answer.data[:1]


def test_company_changes_no_bit(http):
    """Alone, in a list, and while others are answered and embedded.

    Prefixes that the cache has make no difference.
    """
    alone = {length: vectors(http, IDS[length])[0].tobytes() for length in LENGTHS}
    together = vectors(http, [*IDS.values()][::-1])
    assert [vector.tobytes() for vector in together] == [*alone.values()][::-1]

    def busy(number):
        prompt = IDS[1024][: 300 + number]
        return http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 9}).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(busy, number) for number in range(4)]
        again = [pool.submit(vectors, http, IDS[length]) for length in LENGTHS]
        assert [future.result()[0].tobytes() for future in again] == [*alone.values()]
        assert {future.result() for future in others} == {200}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dimensions": 32}, "dimensions is 32; the model's embeddings have 64: leave it out"),
        ({"encoding_format": "int8"}, "encoding_format: Input should be 'float' or 'base64'"),
        ({"pooling": "max"}, "pooling: Input should be 'mean' or 'last'"),
        ({"input": []}, "input is an empty list"),
        ({"input": [[]]}, "a prompt has no tokens"),
        ({"input": None}, "input: Field required"),
        ({"input": {"text": "x"}}, "input: Input should be"),
        ({"input": [300]}, "the prompt has token 300"),
        ({"input": [5] * 1025}, "1025 tokens"),
        ({"input": ["x"] * 20}, "20 texts are asked for at once, and 19 fit here: ask for fewer"),
        ({"stream": True}, "there is no field stream"),
    ],
)
def test_what_is_refused(fields, said, http):
    assert said in refused(http.post(EMBEDDINGS, json={"input": "x"} | fields), code=ANY)


def test_an_unknown_model(http):
    reply = http.post(EMBEDDINGS, json={"input": "x", "model": "none"})
    refused(reply, 404, "model_not_found")
