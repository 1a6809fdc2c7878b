"""Streamed pieces add up to the whole text, never show half a character, and agree with the batch."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jllama.config import LlamaConfig
from jllama.generation.engine import SamplingConfig
from jllama.generation.text import complete, prompt_ids, stream, text_pieces
from jllama.model import unstack_layers
from jllama.tokenizers import BytesTokenizer, train_sentencepiece
from jllama.verify.compare import random_params

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
texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\ufffdathe é世界🙂👩‍👧"), max_size=40)
whole_texts = texts.map(lambda text: text.replace("\ufffd", ""))

CONFIG = LlamaConfig(
    vocab_size=340, num_layers=1, embed_dim=64, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=96, max_seq_len=64
)
PARAMS = unstack_layers(jax.tree.map(jnp.asarray, random_params(CONFIG, 0)))
PROMPTS = ["the cat", "", "世界 🙂"]
SAMPLING = [SamplingConfig(0.0), SamplingConfig(1.0, seed=1), SamplingConfig(0.8, top_k=20, top_p=0.9, seed=2)]
NEW = 40


class Ending(BytesTokenizer):
    """As if ``eos_id`` were the end: a random model will not draw a certain token in time, so it is chosen after."""

    vocab_size = CONFIG.vocab_size

    def __init__(self, eos_id):
        self.eos_id = eos_id

    def decode(self, ids):
        return super().decode([token for token in ids if token < BYTES.vocab_size])


def after(tokenizer, start, new):
    """What ``new`` adds to the text of ``start``."""
    return tokenizer.decode([*start, *new])[len(tokenizer.decode(start)) :]


# Pieces


@both
@settings(max_examples=60)
@given(prompt=texts, text=texts)
@example(prompt="", text=" two  spaces, 世界 and 👩‍👩‍👧")
@example(prompt="the", text=" ")
@example(prompt="\ufffd", text="\ufffd\ufffd")
@example(prompt="🙂🙂🙂", text="\ufffd世")
def test_pieces_add_up_to_the_text(tokenizer, prompt, text):
    start, new = prompt_ids(tokenizer, prompt), tokenizer.encode(text)
    pieces = list(text_pieces(tokenizer, start, new))
    assert "".join(pieces) == after(tokenizer, start, new)
    assert all(pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@both
@settings(max_examples=60)
@given(prompt=texts, data=st.data())
def test_pieces_of_any_ids_add_up_to_their_text(tokenizer, prompt, data):
    # What a model draws need not be text: controls, halves of characters, bytes in the middle of pieces.
    byte, control = st.integers(3, 258), st.integers(0, 2)
    new = data.draw(st.lists(byte | control | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    start = prompt_ids(tokenizer, prompt)
    assert "".join(text_pieces(tokenizer, start, new)) == after(tokenizer, start, new)


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
    ids = prompt_ids(tokenizer, text)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


# Whole texts


def test_complete_and_stream_agree_and_end_at_the_length():
    results = complete(PARAMS, CONFIG, BPE, PROMPTS, SAMPLING, NEW)
    for prompt, sampling, result in zip(PROMPTS, SAMPLING, results, strict=True):
        assert "".join(stream(PARAMS, CONFIG, BPE, prompt, sampling, NEW)) == result.text
        assert result.text == after(BPE, prompt_ids(BPE, prompt), result.ids)
        assert result.finish_reason == "length"
        assert len(result.ids) == NEW
        assert min(result.ids) >= 0
    assert len({result.text for result in results}) == len(PROMPTS)


@pytest.mark.parametrize("index", [0, 1, 15, 16, 17, NEW - 1])
def test_a_stop_ends_the_text_and_is_not_in_it(index):
    without = complete(PARAMS, CONFIG, Ending(CONFIG.vocab_size), PROMPTS, SAMPLING, NEW)
    eos = without[1].ids[index]
    tokenizer = Ending(eos)
    results = complete(PARAMS, CONFIG, tokenizer, PROMPTS, SAMPLING, NEW)
    for prompt, sampling, free, result in zip(PROMPTS, SAMPLING, without, results, strict=True):
        stops = eos in free.ids
        ids = free.ids[: free.ids.index(eos)] if stops else free.ids
        assert result.ids == ids
        assert result.finish_reason == ("stop" if stops else "length")
        assert result.text == after(tokenizer, prompt_ids(tokenizer, prompt), ids)
        assert "".join(stream(PARAMS, CONFIG, tokenizer, prompt, sampling, NEW)) == result.text
    assert results[1].finish_reason == "stop"


def test_no_new_tokens_are_no_text():
    for result in complete(PARAMS, CONFIG, BPE, PROMPTS, SAMPLING, 0):
        assert result == ("", [], "length")
    assert list(stream(PARAMS, CONFIG, BPE, PROMPTS[0], SAMPLING[0], 0)) == []
