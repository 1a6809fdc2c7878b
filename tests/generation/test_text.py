"""Streamed pieces add up to the whole text, never show half a character, agree with the batch."""

import dataclasses
import inspect
import logging
import types
from unittest import mock

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import SMALL

from jllama.core import JllamaError, UsageError
from jllama.core import engine as core
from jllama.generation import engine as engines
from jllama.generation.conversation import chat, chat_ids
from jllama.generation.generate import completions, generate, stream
from jllama.generation.sampling_params import Prompt, SamplingFields, SamplingParams
from jllama.generation.text import Completion, TextDecoder, encode_prompt, prompt_ids
from jllama.generation.warm_up import warm_up
from jllama.lab.checks import random_params
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.templates.messages import end_of_turn_ids
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

BYTES = BytesTokenizer()
BPE = train_sentencepiece(
    [
        "the cat sat on the mat, and the other cats sat on the other mats\n",
        "def area(radius: float) -> float:\n    return 3.14159 * radius**2\n",
        "naïve café, où est le garçon? 世界 世 🙂\n",
    ],
    340,
)
both = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\ufffdathe é世界🙂👩‍👧"),
    max_size=40,
)
# What a model draws need not be text: controls, halves of characters, bytes in middles of pieces.
ids = st.lists(st.integers(0, 2) | st.integers(3, 258) | st.integers(0, 339), max_size=40)
whole_texts = texts.map(lambda text: text.replace("\ufffd", ""))

CONFIG = dataclasses.replace(SMALL, vocab_size=340, num_layers=1)
# Committed to a device, as loaded weights are.
TRAINING = jax.device_put(random_params(CONFIG, 0), jax.devices()[0])
MODEL = LanguageModel(CONFIG, jax.jit(decode_layout, static_argnums=1)(TRAINING, CONFIG), BPE)
PROMPTS = ["the cat", "", "世界 🙂"]
SAMPLING = [
    SamplingParams(0.0),
    SamplingParams(1.0, seed=1),
    SamplingParams(0.8, top_k=20, top_p=0.9, seed=2),
]
NEW = 40
WANTED = [Prompt(*pair, NEW) for pair in zip(PROMPTS, SAMPLING, strict=True)]


class Ending(BytesTokenizer):
    """As if ``eos_id`` were the end: a random model will not draw a certain token in time, so it is
    chosen after."""

    vocab_size = CONFIG.vocab_size

    def __init__(self, eos_id):
        self.eos_id = eos_id

    def decode(self, ids):
        return super().decode([token for token in ids if token < BYTES.vocab_size])


def after(tokenizer, start, new):
    """What ``new`` adds to the text of ``start``."""
    return tokenizer.decode([*start, *new])[len(tokenizer.decode(start)) :]


def text_pieces(tokenizer, start, new, stop=()):
    """What a stream shows, piece by piece."""
    decoder = TextDecoder(tokenizer, Prompt(start, stop=stop))
    for token in new:
        if piece := decoder.push(token):
            yield piece
    if rest := decoder.end():
        yield rest


# Pieces


@both
@settings(max_examples=50)
@given(prompt=texts, new=texts | ids)
@example(prompt="", new=" two  spaces, 世界 and 👩‍👩‍👧")
@example(prompt="the", new=" ")
@example(prompt="\ufffd", new="\ufffd\ufffd")
@example(prompt="🙂🙂🙂", new="\ufffd世")
def test_pieces_add_up_to_the_text(tokenizer, prompt, new):
    start = prompt_ids(tokenizer, prompt)
    if isinstance(new, str):
        tokens = tokenizer.encode(new)
    else:
        tokens = [token % tokenizer.vocab_size for token in new]
    pieces = list(text_pieces(tokenizer, start, tokens))
    assert "".join(pieces) == after(tokenizer, start, tokens)
    assert all(pieces)
    if isinstance(new, str) and "\ufffd" not in new:
        assert not any("\ufffd" in piece for piece in pieces)


@given(text=whole_texts)
def test_a_character_is_shown_as_soon_as_it_is_whole(text):
    shown = []

    def ids():
        for index, char in enumerate(text):
            for token in BYTES.encode(char):
                assert len(shown) == index
                yield token

    for piece in text_pieces(BYTES, [BYTES.bos_id], ids()):
        shown.append(piece)  # noqa: PERF402 (the generator looks at it)
    assert shown == list(text)


@both
@given(prompt=whole_texts, text=whole_texts, char=st.sampled_from("é世🙂"), data=st.data())
def test_a_text_that_ends_inside_a_character_shows_it_last(tokenizer, prompt, text, char, data):
    half = [3 + byte for byte in char.encode()][: data.draw(st.integers(1, len(char.encode()) - 1))]
    start, new = prompt_ids(tokenizer, prompt), [*tokenizer.encode(text), *half]
    *pieces, last = text_pieces(tokenizer, start, new)
    assert not any("\ufffd" in piece for piece in pieces)
    assert last == last[0] * len(last) == "\ufffd" * len(last)
    assert "".join([*pieces, last]) == after(tokenizer, start, new)


def test_leading_spaces_are_kept():
    the = BPE.encode("the")[0]
    assert BPE.decode([the]) == "the"
    assert list(text_pieces(BPE, prompt_ids(BPE, "on"), [the])) == [" the"]
    assert list(text_pieces(BPE, prompt_ids(BPE, "on"), [the, the, the])) == [" the"] * 3
    long = prompt_ids(BPE, "the cat sat on the mat, and the other cats sat")
    assert list(text_pieces(BPE, long, [the] * 12)) == [" the"] * 12


# Prompts


@both
@given(text=texts)
@example(text="<s> <s></s>")
def test_a_prompt_has_exactly_one_bos(tokenizer, text):
    ids = prompt_ids(tokenizer, text, parse_special=False)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


@both
def test_a_prompt_that_spells_out_special_tokens(tokenizer):
    bos, end = tokenizer.bos_id, tokenizer.eos_id
    names = {id: name for name, id in tokenizer.special_tokens.items()}
    the = tokenizer.encode("the")
    text = f"the{names[end]}the"
    assert prompt_ids(tokenizer, text) == [bos, *the, end, *the]
    assert prompt_ids(tokenizer, names[bos] + text) == [bos, *the, end, *the]
    assert prompt_ids(tokenizer, text, begin=False) == [*the, end, *the]
    assert (prompt_ids(tokenizer, ""), prompt_ids(tokenizer, "", begin=False)) == ([bos], [])


# Stop strings


@both
@settings(max_examples=30)
@given(
    text=whole_texts, stop=st.lists(st.text("the cats 世é🙂\n", min_size=1, max_size=5), max_size=3)
)
@example(text="the cat sat", stop=["cat s", "at sat"])
@example(text="aaab", stop=["aab"])
@example(text="the cat", stop=["cats"])
def test_a_text_ends_where_its_first_stop_string_begins(tokenizer, text, stop):
    start, new = prompt_ids(tokenizer, "the cat"), tokenizer.encode(text)
    whole = after(tokenizer, start, new)
    decoder = TextDecoder(tokenizer, Prompt(start, stop=stop))
    shown = ""
    for token in new:
        shown += decoder.push(token)
        assert whole.startswith(shown)
        if decoder.finish_reason:
            break
    shown += decoder.end()
    found = [place for each in stop if (place := whole.find(each)) >= 0]
    assert decoder.finish_reason == ("stop_string" if found else "")
    completion = decoder.completion(0, 0)
    assert (completion.text, completion.finish_reason) == (
        shown,
        "stop_string" if found else "context",
    )
    # Of overlapping stop strings the one that is whole first ends the text.
    ends = [whole.find(each) + len(each) for each in stop if each in whole]
    assert shown == (whole if not found else whole[: len(shown)])
    assert not any(each in shown for each in stop)
    if found:
        assert min(found) <= len(shown) < min(ends)


def test_nothing_of_a_stop_string_is_shown_before_it_is_certain():
    pieces = list(text_pieces(BYTES, [BYTES.bos_id], BYTES.encode("a<|b<|end|>c"), ["<|end|>"]))
    assert pieces == ["a", "<|b"]


# Whole texts


@pytest.fixture(scope="module")
def free():
    """What comes out of ``WANTED``."""
    return generate(MODEL, WANTED)


def streamed(prompt, model=MODEL, **fields):
    return "".join(stream(model, prompt, **fields))


def test_generate_and_stream_agree_and_end_at_the_length(free):
    for prompt, result in zip(WANTED, free, strict=True):
        assert streamed(prompt) == result.text
        assert result.text == after(BPE, prompt_ids(BPE, prompt.content), result.ids)
        assert result.finish_reason == "length"
        assert len(result.ids) == len(result.log_probs) == result.new_tokens == NEW
        assert result.prompt_tokens == len(prompt_ids(BPE, prompt.content))
        assert min(result.ids) >= 0
        assert max(result.log_probs) <= 0
    assert len({result.text for result in free}) == len(PROMPTS)


def test_one_prompt_and_one_stop_need_no_list():
    """A string is not a list of its characters, and no stop is empty because it is a string."""
    fields = {"sampling": SAMPLING[1], "max_new_tokens": NEW}
    ids = prompt_ids(BPE, "the cat")
    alone = generate(MODEL, ["the cat"], **fields)
    for one in ("the cat", ids, [ids]):
        assert generate(MODEL, one, **fields) == alone
    assert generate(MODEL, Prompt("the cat", SAMPLING[1], NEW)) == alone
    stop = alone[0].text[2:5]
    cut = generate(MODEL, "the cat", stop=[stop], **fields)
    assert cut[0].finish_reason == "stop_string"
    assert generate(MODEL, "the cat", stop=stop, **fields) == cut
    assert generate(MODEL, Prompt("the cat", SAMPLING[1], NEW, stop)) == cut
    assert streamed("the cat", stop=stop, **fields) == cut[0].text


def test_settings_by_their_names():
    """Those of ``SamplingParams``, each of which is taken, and no others."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SamplingFields.__annotations__) == fields
    assert all(f"``{name}``" in generate.__doc__ for name in fields)
    together = generate(MODEL, "the cat", SAMPLING[2], max_new_tokens=NEW)
    named = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2}
    assert generate(MODEL, "the cat", max_new_tokens=NEW, **named) == together
    changed = dataclasses.replace(SAMPLING[2], seed=5)
    assert generate(MODEL, "the cat", changed, seed=2, max_new_tokens=NEW) == together
    assert streamed("the cat", sampling=changed, seed=2, max_new_tokens=NEW) == together[0].text


def test_after_warming_up_nothing_compiles(monkeypatch, caplog):
    """Neither for texts of any length, nor for drafts and prompts of chunks that begin alike."""
    config = dataclasses.replace(CONFIG, max_seq_len=256)  # a cache of 128 and one of 256
    model = dataclasses.replace(MODEL, config=config)

    def compilations():
        return [
            record.message for record in caplog.records if record.message.startswith("Compiling")
        ]

    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        warm_up(model, [16], max_new_tokens=180)
        monkeypatch.setitem(engines.CHUNK_TOKENS, "cpu", 16)
        warm_up(model, [16, 40], [2], max_new_tokens=60, speculate=1)
        assert compilations()
        caplog.clear()
        generate(model, [[5] * 16], max_new_tokens=3)
        generate(model, [[6] * 12], max_new_tokens=180)
        fields = {"max_new_tokens": 60, "temperature": 0.5, "stop": "x", "stop_ids": [1, 2]}
        streamed("the cat", model, **fields)
        # The third finds a chunk of the first.
        prompts = [[7] * 40, [8] * 38, [*[7] * 20, *[5] * 16], [3] * 12]
        generate(model, prompts, SAMPLING[2], max_new_tokens=60, batch_size=2, speculate=1)
        assert compilations() == []
    with pytest.raises(UsageError, match="250 tokens and 20 new ones exceed the context of 256"):
        warm_up(model, [16, 250], max_new_tokens=20)


def test_batches_give_what_each_prompt_gives():
    prompts = ["the", "cat sat on", "", "a mat", "où est le garçon?"]
    together = generate(MODEL, prompts, SAMPLING[1], max_new_tokens=9, batch_size=3)
    one_by_one = generate(MODEL, prompts, SAMPLING[1], max_new_tokens=9, batch_size=1)
    assert [found.text for found in one_by_one] == [found.text for found in together]
    encoded = [encode_prompt(MODEL, Prompt(content, SAMPLING[1], 9)) for content in prompts]
    done = list(completions(MODEL, encoded, batch_size=1))
    assert dict(done) == dict(enumerate(one_by_one))
    lengths = [len(encoded[index].ids) for index, _ in done]
    assert lengths == sorted(lengths, reverse=True)
    assert list(completions(MODEL, [])) == []
    assert generate(MODEL, []) == []


@pytest.mark.parametrize("index", [0, 15, 16, NEW - 1])
def test_a_stop_id_ends_the_text_and_is_not_in_it(index, free):
    eos = free[1].ids[index]
    tokenizer = Ending(eos)
    model = dataclasses.replace(MODEL, tokenizer=tokenizer)
    prompts = [
        dataclasses.replace(prompt, content=prompt_ids(BPE, prompt.content)) for prompt in WANTED
    ]
    results = generate(model, prompts)
    for prompt, whole, result in zip(prompts, free, results, strict=True):
        stops = eos in whole.ids
        ids = whole.ids[: whole.ids.index(eos)] if stops else whole.ids
        assert result.ids == ids
        assert result.log_probs == whole.log_probs[: len(ids)]
        assert result.finish_reason == ("stop_id" if stops else "length")
        assert result.text == after(tokenizer, prompt.content, ids)
        assert streamed(prompt, model) == result.text
    assert results[1].finish_reason == "stop_id"


@pytest.mark.parametrize("where", [0, 3, 30])
def test_a_stop_string_ends_its_row_alone(where, free):
    """In the row that has it, wherever it lies on the tokens' borders.

    What ``ids`` hold is what the text came from.
    """
    text = free[1].text
    stop = text[where : where + 3]
    stopped = dataclasses.replace(WANTED[1], stop=[stop, "never"])
    results = generate(MODEL, [WANTED[0], stopped, WANTED[2]])
    assert [results[0], results[2]] == [free[0], free[2]]
    result = results[1]
    assert (result.text, result.finish_reason) == (text[: text.find(stop)], "stop_string")
    assert streamed(stopped) == result.text
    assert result.ids == free[1].ids[: len(result.ids)]
    assert len(result.log_probs) == len(result.ids)
    start = prompt_ids(BPE, PROMPTS[1])
    assert after(BPE, start, result.ids).startswith(result.text)
    if "\ufffd" not in result.text:  # such text is certain only some tokens later
        assert not result.ids or not after(BPE, start, result.ids[:-1]).startswith(result.text)


def test_no_new_tokens_are_no_text():
    for result in generate(MODEL, PROMPTS, max_new_tokens=0):
        assert result == Completion("", [], "length", [], prompt_tokens=result.prompt_tokens)
    assert streamed(PROMPTS[0], max_new_tokens=0) == ""


def test_either_layout_of_the_weights_is_taken():
    training, fields = LanguageModel(CONFIG, TRAINING, BPE), {"max_new_tokens": 3}
    assert generate(training, "the cat", **fields) == generate(MODEL, "the cat", **fields)


def test_a_chat_is_the_answer_to_what_was_said():
    fields = {"temperature": 0.9, "seed": 4, "max_new_tokens": 3}
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    model = dataclasses.replace(MODEL, chat_template=template)
    stop_ids = end_of_turn_ids(BPE, model.stop_ids)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "mat"},
        {"role": "user", "content": "on"},
    ]
    (completion,) = generate(model, chat_ids(model, messages), stop_ids=stop_ids, **fields)
    assert chat(model, messages, **fields) == completion
    stopped = chat(model, messages, stop=completion.text[0], **fields)
    assert stopped.finish_reason == "stop_string"
    # Where the context ends is soon enough.
    fields["max_new_tokens"] = 99
    assert chat(model, messages, **fields).finish_reason == "context"
    with pytest.raises(JllamaError, match=r"context is 64: begin a new one, or say less$"):
        chat(model, [{"role": "user", "content": "x" * 99}])
    fields["max_new_tokens"] = 3
    other = chat(model, messages, template="{{ bos_token }}a", **fields)
    assert other.text == generate(model, "a", **fields)[0].text


def test_there_are_no_more_rows_than_texts():
    """Each row takes time, also one that nobody has."""
    with mock.patch.object(core, "zeros", wraps=core.zeros) as zeros:
        generate(MODEL, PROMPTS, max_new_tokens=1, batch_size=8)
    assert max(call.args[1] for call in zeros.call_args_list) == len(PROMPTS)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("a", {"stop": ""}, "^a stop string is empty: it would end every text at once$"),
        ("a", {"stop": ["x", ""]}, "^a stop string is empty"),
        ("a", {"temprature": 1}, r"^there is no setting temprature; did you mean temperature\?$"),
        ("a", {"new_tokens": 1}, "did you mean max_new_tokens"),
        ("a", {"x": 1}, "there is no setting x; there are temperature, .*, stop_ids$"),
        ("a", {"temperature": -1}, "temperature is -1"),
        ([1] * 64, {}, "exceed the context of 64: shorten the prompt$"),
        (Prompt("a"), {"seed": 1}, "a Prompt brings its own settings, and others are given beside"),
    ],
)
def test_what_cannot_be_done_is_refused(prompt, fields, message):
    with pytest.raises(UsageError, match=message):
        generate(MODEL, [prompt], **fields)
    with pytest.raises(UsageError, match=message):
        streamed(prompt, **fields)


@pytest.mark.parametrize("content", [["a", "b"], [1.5], [[1], [2]], None])
def test_what_is_no_prompt_is_refused(content):
    prompt = types.SimpleNamespace(content=content, stop=())
    with pytest.raises(UsageError, match=r"it must be text, token ids or a Prompt$"):
        inspect.unwrap(encode_prompt)(MODEL, prompt)  # past the types, which tests check


def test_a_model_without_a_tokenizer_generates_no_text():
    with pytest.raises(JllamaError, match=r"^the model has no tokenizer: put the one"):
        generate(dataclasses.replace(MODEL, tokenizer=None), ["a"])
