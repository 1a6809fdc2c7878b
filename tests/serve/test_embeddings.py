"""Embeddings: what they are, by OpenAI's own client.

The same bits alone and in company; what is refused.
"""

import base64
import concurrent.futures

import numpy as np
import openai
import pytest
from models import SERVED, params, served
from starlette.testclient import TestClient

from jllama.model import build_model
from jllama.serve.app import make_app
from jllama.serve.config import HttpConfig

EMBEDDINGS = "/v1/embeddings"
LENGTHS = [1, 2, 17, 255, 256, 257, 600, 1024]
IDS = {
    length: [int(id) for id in np.random.default_rng(length).integers(3, 259, length)]
    for length in LENGTHS
}


@pytest.fixture(scope="module")
def http(engine):
    with TestClient(make_app(engine, HttpConfig()), raise_server_exceptions=False) as http:
        yield http


@pytest.fixture(scope="module")
def client(http):
    with openai.OpenAI(base_url="http://x/v1", api_key="none", http_client=http) as client:
        yield client


def vectors(http, given, **fields):
    """The embeddings of an input, by their bits."""
    reply = http.post(EMBEDDINGS, json={"input": given, "encoding_format": "base64"} | fields)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [each["index"] for each in data] == [*range(len(data))]
    return [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_they_are_the_models_final_activations(pooling, http):
    """The mean of all tokens', or the last one's, of length 1; over any number of chunks."""
    model = build_model(SERVED, params(SERVED))
    for length in LENGTHS:
        (found,) = vectors(http, IDS[length], pooling=pooling)
        hidden = np.asarray(model.hidden(np.array([IDS[length]])), np.float64)[0]
        expected = hidden.mean(axis=0) if pooling == "mean" else hidden[-1]
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected), rtol=0, atol=1e-5)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_the_clients_own_form(client, http):
    answer = client.embeddings.create(model="small", input=["hello", "wörld"])
    as_numbers = client.embeddings.create(
        model="small", input=["hello", "wörld"], encoding_format="float"
    )
    assert [each.embedding for each in answer.data] == [each.embedding for each in as_numbers.data]
    assert [(each.index, each.object, len(each.embedding)) for each in answer.data] == [
        (0, "embedding", 64),
        (1, "embedding", 64),
    ]
    ids = [served().tokenizer.encode(text) for text in ("hello", "wörld")]
    assert (answer.object, answer.model) == ("list", "small")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids)) + 2
    by_ids = client.embeddings.create(
        model="small", input=[[1, *each] for each in ids], dimensions=64
    )
    assert by_ids.data == answer.data
    alone = client.embeddings.create(model="small", input="hello", user="me")
    assert alone.data == answer.data[:1]
    assert client.embeddings.create(model="small", input=[1, *ids[0]]).data == alone.data
    by_last = client.embeddings.create(model="small", input="hello", extra_body={"pooling": "last"})
    assert by_last.data != alone.data


def test_company_changes_no_bit(http):
    """Alone, in a list, and while others are answered and embedded.

    Prefixes that the cache has make no difference.
    """
    alone = {length: vectors(http, IDS[length])[0].tobytes() for length in LENGTHS}
    together = vectors(http, list(IDS.values()))
    assert [each.tobytes() for each in together] == list(alone.values())
    backwards = vectors(http, list(IDS.values())[::-1])
    assert [each.tobytes() for each in backwards] == list(alone.values())[::-1]

    def busy(number):
        given = {"prompt": IDS[600][: 300 + number], "max_tokens": 9, "seed": number}
        return http.post("/v1/completions", json=given).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(busy, number) for number in range(8)]
        again = [pool.submit(vectors, http, IDS[length]) for length in LENGTHS]
        assert [each.result()[0].tobytes() for each in again] == list(alone.values())
        assert {each.result() for each in others} == {200}


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
    reply = http.post(EMBEDDINGS, json={"input": "x"} | fields)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert http.post(EMBEDDINGS, json={"input": "x", "model": "none"}).status_code == 404
