"""Log-probabilities and sliding windows, against the float64 oracle."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import SMALL

import jllama
from jllama.core import JllamaError, UsageError
from jllama.core.model import initial_params
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.score import scoring
from jllama.score.scoring import score_texts, token_log_probs
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

BYTES = BytesTokenizer()
# More ids than the tokenizer has, and a context that is no power of two.
CONFIG = dataclasses.replace(SMALL, vocab_size=280, max_seq_len=48)
PARAMS = random_params(CONFIG, 0)
MODEL = LanguageModel(CONFIG, jax.tree.map(jnp.asarray, PARAMS), BYTES)
BATCH = 2
TOLERANCE = 1e-5

some_ids = st.integers(0, CONFIG.vocab_size - 1)
some_rows = st.lists(st.lists(some_ids, min_size=1, max_size=49), max_size=6)
windows = st.integers(1, 48).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))
texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" the\n世🙂"), max_size=60
)


def expected(row):
    """Log-probability of each token of a row but the first, and the likeliest in its place."""
    logits = oracle.forward(PARAMS, np.array([row[:-1]], int), CONFIG)[0]
    log_probs = np.log(oracle.softmax(logits))
    return log_probs[np.arange(len(row) - 1), row[1:]], logits.argmax(axis=-1)


def scored(texts, model=MODEL, window=48, stride=24, **options):
    return score_texts(model, texts, window=window, stride=stride, batch_size=BATCH, **options)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_perplexity_of_a_text():
    """What the windows that ``jllama eval`` takes by default come to."""
    text = "The quick brown fox jumps over the lazy dog. " * 4
    assert jllama.perplexity(MODEL, text, batch_size=BATCH) == scored([text]).perplexity
    narrow = jllama.perplexity(MODEL, text, window=16, batch_size=BATCH)
    assert narrow == scored([text], window=16, stride=8).perplexity
    log_probs = expected([BYTES.bos_id, *BYTES.encode("The dog")])[0]
    assert jllama.perplexity(MODEL, "The dog") == pytest.approx(
        math.exp(-log_probs.mean()), rel=1e-5
    )


# Rows


@settings(max_examples=15)
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
        ([[1] * 50], None, "a row has 50 tokens to be predicted from 49, over .* context of 48"),
        ([[1, 2]], [2], "2 tokens of a row of 2 are to be scored; there are 1"),
        ([[1, 280]], None, "tokens holds the id 280; this model's are 0 to 279"),
        ([[-1, 2]], None, "tokens holds the id -1; this model's are 0 to 279"),
    ],
)
def test_bad_rows(rows, counts, message):
    with pytest.raises(UsageError, match=message):
        token_log_probs(MODEL, rows, counts)


def test_either_layout_of_the_weights_gives_the_same():
    rows = [[1, 5, 279], [*range(30)]]
    decoding = jax.jit(decode_layout, static_argnums=1)(PARAMS, CONFIG)
    for one, other in zip(
        token_log_probs(MODEL, rows, batch_size=BATCH),
        token_log_probs(LanguageModel(CONFIG, decoding), rows, batch_size=BATCH),
        strict=True,
    ):
        assert_close(one.log_probs, other.log_probs)


# Windows


@settings(max_examples=15)
@given(text=texts.filter(len), sizes=windows)
@example(text="The quick brown fox jumps over the lazy dog. Yes", sizes=(48, 48))
@example(text="The quick brown fox jumps over the lazy dog. Yes", sizes=(48, 1))
def test_texts_against_the_oracle(text, sizes):
    window, stride = sizes
    score = scored([text], window=window, stride=stride)
    ids = [BYTES.bos_id, *BYTES.encode(text)]
    nats, tokens = 0.0, 0
    while tokens < len(ids) - 1:  # as said: a whole window first, then a stride at a time
        new = min(window if not tokens else stride, len(ids) - 1 - tokens)
        tokens += new
        nats -= expected(ids[max(tokens - window, 0) : tokens + 1])[0][-new:].sum()
    num_bytes = len(text.encode())
    assert (score.tokens, score.text_bytes) == (len(ids) - 1, num_bytes)
    assert score.nats == pytest.approx(nats, rel=TOLERANCE)
    assert score.loss == score.nats / tokens
    assert score.perplexity == math.exp(score.loss)
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / num_bytes)


def test_texts_are_scored_each_by_itself_behind_one_bos():
    several = ["one two", "", "three", "<s>1"]
    alone = [scored([text]) for text in several if text]
    together = scored(several)
    assert together.nats == pytest.approx(sum(score.nats for score in alone), rel=TOLERANCE)
    assert (together.tokens, together.text_bytes) == (7 + 5 + 4, 7 + 5 + 4)


def test_max_tokens_are_the_first_ones():
    sizes = {"window": 4, "stride": 2}
    several = ["one two", "three世", "four"]
    for count, cut in ((9, ["one two", "th"]), (7, ["one two"]), (99, several), (3, ["one"])):
        assert scored(several, max_tokens=count, **sizes) == scored(cut, **sizes)
    endless = (several[0] if number < 2 else pytest.fail("read on") for number in itertools.count())
    assert scored(endless, max_tokens=14, **sizes).tokens == 14


def test_bytes_are_those_of_the_text_whatever_the_tokenizer():
    """SentencePiece puts a space in front of a text, which is not the text's; a model that adds no
    BOS gets one.
    """
    tokenizer = train_sentencepiece(
        ["the cat sat on the mat, and the other cats sat on the other mats\n"] * 3, 280
    )
    model = LanguageModel(CONFIG, MODEL.params, tokenizer)
    text = "the cat sat on 世"
    score = scored([text], model)
    ids = tokenizer.encode(text)
    assert (score.tokens, score.text_bytes) == (len(ids), len(text.encode()))
    first = scored([text], model, max_tokens=2)
    assert (first.tokens, first.text_bytes) == (2, len(tokenizer.decode(ids[:2])))


@pytest.mark.parametrize(
    ("text", "changes", "error", "message"),
    [
        ("", {}, JllamaError, "the texts have no tokens to score"),
        ("a", {"window": 49}, UsageError, "window is 49; it must be .* model's context of 48"),
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
    damaged = {"final_norm": np.full(CONFIG.embed_dim, np.nan, np.float32)}
    broken = LanguageModel(CONFIG, MODEL.params | damaged, BYTES)
    with pytest.raises(JllamaError, match="the loss is nan: the weights hold damaged numbers"):
        scored(["abc"], broken)
    with pytest.raises(JllamaError, match="no tokenizer"):
        scored(["abc"], LanguageModel(CONFIG, MODEL.params))
