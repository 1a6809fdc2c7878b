"""Training batches resume exactly, and any rows can be read; validation has each target once."""

import itertools

import grain
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.data.batches import text_batch, training_batches, validation_batches

TOKENS = np.arange(1003, dtype=np.uint16)  # a token is its position
BOS = 2000  # none of them
ONE_EPOCH = (len(TOKENS) - 1) // 10 // 4  # batches of 4 x 10, and half a batch


def batches(count, **changes):
    iterator = training_batches(
        TOKENS, **{"bos_id": BOS, "batch_size": 4, "seq_len": 10, "seed": 1} | changes
    )
    return np.stack([batch.tokens for batch in itertools.islice(iterator, count)])


@settings(max_examples=12)
@given(
    length=st.integers(11, 120),
    seq_len=st.integers(1, 10),
    batch_size=st.integers(3, 9),
    seed=st.integers(0, 2**31),
)
@example(length=11, seq_len=10, batch_size=1, seed=0)
def test_each_epoch_covers_the_text_with_other_boundaries(length, seq_len, batch_size, seed):
    """Also where one begins within a batch."""
    windows = (length - 1) // seq_len
    iterator = training_batches(
        TOKENS[:length], bos_id=BOS, batch_size=min(batch_size, windows), seq_len=seq_len, seed=seed
    )
    rows = (row for batch in iterator for row in batch.tokens)
    for _ in range(3):
        epoch = np.stack([*itertools.islice(rows, windows)])
        assert (epoch.shape, epoch.dtype) == ((windows, seq_len + 1), np.int32)
        assert (np.diff(epoch) == 1).all()  # a run of the text
        offset = epoch.min()
        assert offset < seq_len or windows == 1
        assert set(range(offset + 1, length)) >= set(epoch[:, 1:].flat)
        starts = np.sort(epoch[:, 0])
        expected = np.minimum(offset + seq_len * np.arange(windows), length - seq_len - 1)
        np.testing.assert_array_equal(starts, expected)


def test_epochs_differ_in_order_and_boundaries():
    actual = batches(100).reshape(-1, 11)[:300, 0].reshape(3, 100)
    assert len({tuple(np.argsort(epoch)) for epoch in actual}) == 3
    assert len({epoch.min() for epoch in actual}) > 1
    assert not np.array_equal(batches(5), batches(5, seed=2))
    np.testing.assert_array_equal(batches(5), batches(5))


@pytest.mark.parametrize("before", [0, 1, ONE_EPOCH - 1, 2 * ONE_EPOCH + 2])
def test_a_restored_iterator_goes_on_exactly(before):
    first, second = (
        training_batches(TOKENS, bos_id=BOS, batch_size=4, seq_len=10, seed=1) for _ in range(2)
    )
    for _ in range(before):
        next(first)
    state = first.get_state()
    assert state == {"next_index": before}
    next(second)
    second.set_state(state)
    for _ in range(3):
        np.testing.assert_array_equal(next(second).tokens, next(first).tokens)


@pytest.mark.parametrize("rows", [slice(2, 4), [0, 3]])
def test_the_rows_of_a_process_are_those_of_the_whole_batch(rows):
    """Any can be asked for; the others, which are not read, are zeros."""
    actual, whole = batches(30, rows=rows), batches(30)
    np.testing.assert_array_equal(actual[:, rows], whole[:, rows])
    whole[:, rows] = 0
    actual[:, rows] = 0
    assert not actual.any()
    assert whole.any()


@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(2, 12))
def test_a_document_is_a_segment_and_its_first_token_no_target(data, rows, width):
    count = rows * width
    ids = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    windows = np.reshape(ids, (rows, width))
    batch = text_batch(windows, bos_id=1)
    np.testing.assert_array_equal(batch.tokens, windows)
    for row, segments in zip(windows.tolist(), batch.segments.tolist(), strict=True):
        assert segments == [1 + row[: place + 1].count(1) for place in range(width)]
    assert batch.counted.all()
    some = np.arange(windows.size).reshape(windows.shape) % 2 == 0
    np.testing.assert_array_equal(text_batch(windows, 1, some).counted, some)


def test_too_little_text():
    with pytest.raises(JllamaError, match="has 40 tokens, and one batch of 4 x 10 needs 41"):
        training_batches(TOKENS[:40], bos_id=BOS, batch_size=4, seq_len=10, seed=0)
    iterator = training_batches(TOKENS[:41], bos_id=BOS, batch_size=4, seq_len=10, seed=0)
    assert next(iterator).tokens.shape == (4, 11)
    for length in (0, 1):
        with pytest.raises(JllamaError, match=f"validation split has {length} tokens"):
            validation_batches(TOKENS[:length], bos_id=BOS, batch_size=4, seq_len=10)


@given(length=st.integers(2, 200), batch_size=st.integers(1, 5), seq_len=st.integers(1, 12))
def test_validation_predicts_each_token_once(length, batch_size, seq_len):
    inputs, targets = [], []
    for tokens, _, counted, *_ in validation_batches(
        TOKENS[:length], bos_id=BOS, batch_size=batch_size, seq_len=seq_len
    ):
        assert tokens.shape == (batch_size, seq_len + 1)
        mask = counted[:, 1:]
        assert tokens.dtype == np.int32
        assert not tokens[:, 1:][~mask].any()
        inputs += tokens[:, :-1][mask].tolist()
        targets += tokens[:, 1:][mask].tolist()
    assert targets == list(range(1, length))
    assert inputs == list(range(length - 1))


@given(length=st.integers(2, 500), seq_len=st.integers(1, 12), max_tokens=st.integers(1, 600))
def test_validation_of_a_part_is_spread_evenly(length, seq_len, max_tokens):
    def targets(max_tokens):
        actual = validation_batches(
            TOKENS[:length], bos_id=BOS, batch_size=3, seq_len=seq_len, max_tokens=max_tokens
        )
        return np.concatenate([tokens[:, 1:][counted[:, 1:]] for tokens, _, counted, *_ in actual])

    part = targets(max_tokens)
    assert len(set(part.tolist())) == len(part) <= max(max_tokens, seq_len)
    starts = part[(part - 1) % seq_len == 0]
    assert np.ptp(np.diff(starts)) <= seq_len if len(starts) > 2 else True
    assert max_tokens < length - 1 + seq_len or np.array_equal(part, targets(0))
    assert len(part) == len(targets(0)) or len(part) > min(max_tokens, length) - 2 * seq_len


def test_a_file_past_2_to_the_31_tokens_is_read_at_its_far_end(tmp_path):
    seq_len, windows = 2**20, 2**13
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(2 * (seq_len * windows + 1))  # sparse: it takes no room
    tokens = np.memmap(tmp_path / "train.bin", np.uint16, mode="r+")
    tokens[-1], tokens[seq_len * windows // 2] = 65_535, 1234

    _, middle = validation_batches(
        tokens, bos_id=BOS, batch_size=1, seq_len=seq_len, max_tokens=2 * seq_len
    )
    assert middle.tokens[0, 0] == 1234

    order = grain.MapDataset.range(windows).seed(0).shuffle()
    training = training_batches(tokens, bos_id=BOS, batch_size=1, seq_len=seq_len, seed=0)
    index = next(index for index in range(windows) if order[index] == windows - 1)
    training.set_state({"next_index": index})
    assert next(training).tokens[0, -1] == 65_535
