"""Log-probabilities and sliding windows, against the float64 oracle."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jllama
from jllama import oracle
from jllama.config import LlamaConfig
from jllama.errors import JllamaError, UsageError
from jllama.evaluation import scoring
from jllama.evaluation.scoring import score_texts, sliding_windows, token_log_probs
from jllama.language_model import LanguageModel
from jllama.model import initial_params
from jllama.tokenizers import BytesTokenizer, train_sentencepiece
from jllama.verify.checks import random_params

BYTES = BytesTokenizer()
CONFIG = LlamaConfig(
    vocab_size=280,
    num_layers=2,
    embed_dim=64,
    num_heads=2,
    num_kv_heads=1,
    mlp_dim=96,
    max_seq_len=48,
)  # more ids than the tokenizer has, and a context that is no power of two
PARAMS = random_params(CONFIG, 0)
MODEL = LanguageModel(CONFIG, jax.tree.map(jnp.asarray, PARAMS), BYTES)
BATCH = 2
TOLERANCE = 1e-5

some_ids = st.integers(0, CONFIG.vocab_size - 1)
some_rows = st.lists(st.lists(some_ids, min_size=1, max_size=49), max_size=6)
texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" the\n世🙂"), max_size=60
)


def expected(row):
    """Log-probability of each token of a row but the first, and the likeliest in its place."""
    logits = oracle.forward(PARAMS, np.array([row[:-1]], int), CONFIG)[0]
    log_probs = np.log(oracle.softmax(logits))
    return log_probs[np.arange(len(row) - 1), row[1:]], logits.argmax(axis=-1)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_perplexity_of_a_text():
    """What the windows that ``jllama eval`` takes by default come to."""
    text = "The quick brown fox jumps over the lazy dog. " * 4
    whole = score_texts(MODEL, [text], window=48, stride=24)
    assert jllama.perplexity(MODEL, text) == whole.perplexity
    narrow = score_texts(MODEL, [text], window=16, stride=8, batch_size=3)
    assert jllama.perplexity(MODEL, text, window=16, batch_size=3) == narrow.perplexity
    log_probs = expected([BYTES.bos_id, *BYTES.encode("The dog")])[0]
    assert jllama.perplexity(MODEL, "The dog") == pytest.approx(
        math.exp(-log_probs.mean()), rel=1e-5
    )
    with pytest.raises(
        UsageError, match="window is 49; it must be between 1 and the model's context of 48"
    ):
        jllama.perplexity(MODEL, text, window=49)


# Rows


@given(some_rows, st.data())
def test_rows_against_the_oracle(rows, data):
    counts = [data.draw(st.integers(0, len(row) - 1)) for row in rows]
    for row, count, scores in zip(
        rows, counts, token_log_probs(MODEL, rows, counts, batch_size=BATCH), strict=True
    ):
        assert len(scores.log_probs) == len(scores.is_likeliest) == count
        if count:
            log_probs, likeliest = expected(row)
            assert_close(scores.log_probs, log_probs[-count:])
            assert scores.is_likeliest.tolist() == (likeliest == row[1:])[-count:].tolist()


def test_greedy_rows_are_recognized():
    row = [1, 5]
    for _ in range(20):
        row.append(int(expected([*row, 0])[1][-1]))
    scores = token_log_probs(MODEL, [row], batch_size=BATCH)[0]
    assert scores.is_likeliest[1:].all()
    assert scores.is_likeliest.dtype == bool


@settings(max_examples=15)
@given(some_rows.filter(len))
def test_batch_mates_and_padding_change_nothing(rows):
    together = token_log_probs(MODEL, rows, batch_size=BATCH)
    for row, scores in zip(rows, together, strict=True):
        alone = token_log_probs(MODEL, [row], batch_size=BATCH)[0]
        assert_close(scores.log_probs, alone.log_probs)
        assert scores.is_likeliest.tolist() == alone.is_likeliest.tolist()


def test_rows_of_all_lengths_take_two_compilations():
    sizes = []
    for lengths in ((), range(1, 50), range(49, 0, -1), range(1, 49, 3)):
        token_log_probs(MODEL, [[1] * length for length in lengths], batch_size=BATCH)
        sizes.append(scoring._score._cache_size())
    # Up to 32 tokens, and the context of 48; other tests may have run before.
    assert sizes[1] <= sizes[0] + 2
    assert sizes[1] == sizes[2] == sizes[3]


def test_logits_of_a_large_vocabulary_take_256_mib_at_a_time():
    config = dataclasses.replace(CONFIG, vocab_size=128_256, max_seq_len=2048)
    params = jax.eval_shape(lambda: initial_params(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((2, 2049), np.int32)
    computation = jax.make_jaxpr(scoring._score, static_argnums=1)(params, config, tokens)
    shapes = [
        [int(size) for size in shape.split(",")]
        for shape in re.findall(r"f32\[([\d,]+)\]", str(computation))
    ]
    limit = max(math.prod(shape) for shape in shapes if shape[-1] == 128_256)
    assert 2**26 < 4 * limit <= 2**28


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        (
            [[1] * 50],
            None,
            "a row has 50 tokens to be predicted from 49, over the model's context of 48",
        ),
        ([[1, 2]], [2], "2 tokens of a row of 2 are to be scored; there are 1"),
        ([[1, 280]], None, "tokens holds the id 280; this model's are 0 to 279"),
        ([[-1, 2]], None, "tokens holds the id -1; this model's are 0 to 279"),
    ],
)
def test_bad_rows(rows, counts, message):
    with pytest.raises(UsageError, match=message):
        token_log_probs(MODEL, rows, counts)


@settings(max_examples=5)
@given(some_rows.filter(len))
def test_either_layout_of_the_weights_gives_the_same(rows):
    for one, other in zip(
        token_log_probs(MODEL, rows), token_log_probs(MODEL.for_decoding(), rows), strict=True
    ):
        assert_close(one.log_probs, other.log_probs)


# Windows


@given(length=st.integers(0, 200), window=st.integers(1, 70), data=st.data())
def test_windows_score_every_token_once_with_all_the_context_that_fits(length, window, data):
    stride = data.draw(st.integers(1, window))
    scored = []
    for start, end, count in sliding_windows(length, window, stride):
        assert 1 <= count <= (stride if scored else window)
        assert end - start == min(end, window + 1)
        scored.extend(range(end - count, end))
    assert scored == list(range(1, length))


@settings(max_examples=15)
@given(text=texts.filter(len), window=st.integers(1, 48), data=st.data())
def test_texts_against_the_oracle(text, window, data):
    stride = data.draw(st.integers(1, window))
    score = score_texts(MODEL, [text], window=window, stride=stride, batch_size=BATCH)
    ids = [BYTES.bos_id, *BYTES.encode(text)]
    nats, tokens = 0.0, 0
    while tokens < len(ids) - 1:  # as said: a whole window first, then a stride at a time
        new = min(window if not tokens else stride, len(ids) - 1 - tokens)
        tokens += new
        nats -= expected(ids[max(tokens - window, 0) : tokens + 1])[0][-new:].sum()
    assert (score.tokens, score.text_bytes) == (len(ids) - 1, len(text.encode()))
    assert score.nats == pytest.approx(nats, rel=TOLERANCE)
    assert score.loss == pytest.approx(nats / tokens, rel=TOLERANCE)
    assert score.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(
        nats / math.log(2) / len(text.encode()), rel=TOLERANCE
    )


def test_a_window_as_long_as_the_text_is_one_forward_pass():
    text = "The quick brown fox jumps over the lazy dog. Yes"
    ids = [BYTES.bos_id, *BYTES.encode(text)]
    assert len(ids) == 49
    for window, stride in ((48, 48), (48, 1)):
        score = score_texts(MODEL, [text], window=window, stride=stride, batch_size=BATCH)
        assert score.nats == pytest.approx(-expected(ids)[0].sum(), rel=TOLERANCE)


def test_texts_are_scored_each_by_itself_behind_one_bos():
    several = ["one two", "", "three", "<s>1"]
    alone = [
        score_texts(MODEL, [text], window=48, stride=24, batch_size=BATCH)
        for text in several
        if text
    ]
    together = score_texts(MODEL, several, window=48, stride=24, batch_size=BATCH)
    assert together.nats == pytest.approx(sum(score.nats for score in alone), rel=TOLERANCE)
    assert (together.tokens, together.text_bytes) == (7 + 5 + 4, 7 + 5 + 4)


def test_max_tokens_are_the_first_ones():
    several = ["one two", "three世", "four"]
    for count, cut in ((9, ["one two", "th"]), (7, ["one two"]), (99, several), (3, ["one"])):
        limited = score_texts(
            MODEL, several, window=4, stride=2, batch_size=BATCH, max_tokens=count
        )
        assert limited == score_texts(MODEL, cut, window=4, stride=2, batch_size=BATCH)
    endless = (several[0] if number < 2 else pytest.fail("read on") for number in itertools.count())
    assert (
        score_texts(MODEL, endless, window=4, stride=2, batch_size=BATCH, max_tokens=14).tokens
        == 14
    )


def test_bytes_are_those_of_the_text_whatever_the_tokenizer():
    """SentencePiece puts a space in front of a text, which is not the text's; a model that adds no
    BOS gets one.
    """
    tokenizer = train_sentencepiece(
        ["the cat sat on the mat, and the other cats sat on the other mats\n"] * 3, 280
    )
    model = LanguageModel(CONFIG, MODEL.params, tokenizer)
    text = "the cat sat on 世"
    score = score_texts(model, [text], window=48, stride=24, batch_size=BATCH)
    ids = tokenizer.encode(text)
    assert (score.tokens, score.text_bytes) == (len(ids), len(text.encode()))
    first = score_texts(model, [text], window=48, stride=24, batch_size=BATCH, max_tokens=2)
    assert (first.tokens, first.text_bytes) == (2, len(tokenizer.decode(ids[:2])))


@pytest.mark.parametrize(
    ("text", "changes", "error", "message"),
    [
        ("", {}, JllamaError, "the texts have no tokens to score"),
        (
            "a",
            {"window": 49},
            UsageError,
            "window is 49; it must be between 1 and the model's context of 48",
        ),
        ("a", {"window": 0}, UsageError, "window is 0"),
        ("a", {"stride": 9}, UsageError, "stride is 9; it must be between 1 and the window of 8"),
        ("a", {"stride": 0}, UsageError, "stride is 0"),
        ("a", {"batch_size": 0}, UsageError, "batch_size is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_scored(text, changes, error, message):
    with pytest.raises(error, match=message):
        score_texts(MODEL, [text], **({"window": 8, "stride": 4, "batch_size": BATCH} | changes))


def test_damaged_weights_and_no_tokenizer_are_said():
    broken = LanguageModel(
        CONFIG, MODEL.params | {"final_norm": MODEL.params["final_norm"] * jnp.nan}, BYTES
    )
    with pytest.raises(JllamaError, match="the loss is nan: the weights hold damaged numbers"):
        score_texts(broken, ["abc"], window=48, stride=24, batch_size=BATCH)
    with pytest.raises(JllamaError, match="no tokenizer"):
        score_texts(LanguageModel(CONFIG, MODEL.params), ["abc"], window=48, stride=24)
