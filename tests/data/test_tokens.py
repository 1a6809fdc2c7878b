"""Tokens on disk: the split, the types, the cache; after a crash nothing looks finished."""

import gzip
import json
import os
import shutil
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from helpers import trained_llama3, trained_smollm
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.core import JllamaError, UsageError
from jllama.data import corpus as corpora
from jllama.data import tokens
from jllama.data.config import DataConfig
from jllama.data.corpus import cut_chunks
from jllama.data.tokens import SPLITS, prepare_data
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.loading import as_huggingface
from jllama.tokenizers.sentencepiece import train_sentencepiece

TEXTS = [f"Document {number} says: {'ho ' * (number % 7)}é世\n" for number in range(100)]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def config(corpus, **changes):
    cache_dir = str(corpus.parent / "cache")
    return DataConfig(
        **{"path": str(corpus), "tokenizer": "bytes", "cache_dir": cache_dir} | changes
    )


def split_documents(texts, fraction):
    """Splits and texts, as ``tokens.split_documents`` gives them in chunks."""
    actual = []
    parts = [lambda text=text: (text[i : i + 3] for i in range(0, len(text), 3)) for text in texts]
    for chunk in tokens.split_documents(parts, fraction):
        assert chunk.text
        assert chunk.starts == (not actual or actual[-1][-1].ends)
        actual = [*actual, [chunk]] if chunk.starts else [*actual[:-1], [*actual[-1], chunk]]
    assert all(len({chunk.split for chunk in part}) == 1 and part[-1].ends for part in actual)
    return [(part[0].split, "".join(chunk.text for chunk in part)) for part in actual]


def documents(dataset, split):
    ids = getattr(dataset, split).astype(np.int64)
    starts = np.flatnonzero(ids == dataset.tokenizer.bos_id)
    assert starts[0] == 0
    assert (ids[np.append(starts[1:], len(ids)) - 1] == dataset.tokenizer.eos_id).all()
    assert (ids == dataset.tokenizer.eos_id).sum() == len(starts)
    return [dataset.tokenizer.decode(part.tolist()) for part in np.split(ids, starts[1:])]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_in_one_split_between_bos_and_eos(corpus, tokenizer):
    dataset = prepare_data(config(corpus, tokenizer=tokenizer, vocab_size=300))
    expected = split_documents(TEXTS, 0.1)
    assert sorted(text for _, text in expected) == sorted(TEXTS)
    for split in SPLITS:
        texts, ids = documents(dataset, split), getattr(dataset, split)
        assert texts == [text for name, text in expected if name == split]
        num_bytes = len("".join(texts).encode())
        counts = {"tokens": len(ids), "documents": len(texts), "bytes": num_bytes}
        assert dataset.counts[split] == counts
        # SentencePiece puts a space in front of each text.
        extra = len(texts) if tokenizer == "bpe" else 0
        assert dataset.tokenizer.token_bytes()[ids].sum() == num_bytes + extra


@pytest.mark.parametrize("limit", [50, 10**6])
def test_gzip_is_measured_on_the_first_part_only(corpus, monkeypatch, limit):
    monkeypatch.setattr(tokens, "GZIP_LIMIT", limit)
    dataset = prepare_data(config(corpus))
    text = "".join(documents(dataset, "validation")).encode()[:limit]
    assert dataset.counts["gzip_of_bytes"] == len(text)
    assert abs(dataset.counts["gzip_bytes"] - len(gzip.compress(text, 9))) <= 1


@settings(max_examples=10)
@given(texts=st.lists(st.text(min_size=1), min_size=33, max_size=60), order=st.randoms())
def test_the_split_of_many_documents_depends_on_nothing_but_their_text(texts, order):
    split = split_documents(texts, 0.3)
    shuffled = [*texts, "one more"]
    order.shuffle(shuffled)
    assert [text for _, text in split] == texts
    assert set(split) <= set(split_documents(shuffled, 0.3))
    assert len(set(split)) == len(set(texts))  # none is in both


@given(texts=st.lists(st.text(min_size=1), max_size=32), fraction=st.floats(0.01, 0.99))
def test_few_documents_are_cut_each(texts, fraction):
    split = split_documents(texts, fraction)
    assert "".join(text for _, text in split) == "".join(texts)
    held_out = sum(len(text) for name, text in split if name == "validation")
    assert abs(held_out - fraction * len("".join(texts))) <= len(texts) / 2 + 1e-6
    assert all(text for _, text in split)


# Chunks

PIECES = ["the", " the", "user", " 12", "345", "é", "世界", "!", "don't", "▁"]
PIECES += ["?\n", "\n", "\r\n", "\n\n", " ", "   ", "\t"]
TRAINING = ["the user the  user's 12 345 é 世界!\n\n\tthe user\r\n   don't?\n the!\n" * 30]


SENTENCEPIECE = train_sentencepiece(TRAINING, 300)
LLAMA_3 = trained_llama3(TRAINING, 330)
TOKENIZERS = {
    "bytes": BytesTokenizer(),
    "sentencepiece": SENTENCEPIECE,
    "sentencepiece as json": as_huggingface(SENTENCEPIECE),
    "llama 3": LLAMA_3,
    "llama 3 as json": as_huggingface(LLAMA_3),
    "smollm": trained_smollm(TRAINING, 330),
    "gpt-2": trained_smollm(TRAINING, 330, "gpt-2"),
}


def chunks_of(text, step):
    return list(cut_chunks(text[start : start + step] for start in range(0, len(text), step)))


def ids_in_chunks(tokenizer, texts):
    first, *rest = texts or [""]
    others = [id for text in rest for id in corpora.encode_rest(tokenizer, text)]
    return tokenizer.encode(first) + others


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=80).map("".join),
    st.integers(1, 40),
)
def test_chunks_have_the_ids_of_the_whole_text(name, text, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "CHUNK", chunk)
        texts = chunks_of(text, 7)
        assert "".join(texts) == text
        assert ids_in_chunks(TOKENIZERS[name], texts) == TOKENIZERS[name].encode(text)


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n", " "])
def test_most_texts_are_cut_into_chunks(end, monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK", 100)
    texts = chunks_of(f"the user{end}" * 200, 50)
    assert len(texts) > 10
    assert max(map(len, texts)) < 200


@pytest.mark.parametrize("text", ["a" * 1000, "\n" * 1000, "世界" * 500, " " * 1000])
def test_a_text_without_a_place_to_cut_is_cut_somewhere_and_comes_back(text, monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK", 50)
    monkeypatch.setattr(corpora, "LONGEST_CHUNK", 200)
    texts = chunks_of(text, 50)
    assert [len(part) for part in texts] == [200] * 5
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode(ids_in_chunks(tokenizer, texts)) == text


@pytest.mark.parametrize(("files", "tokenizer"), [(1, "bytes"), (40, "bpe")])
def test_a_large_file_is_prepared_as_if_it_were_whole(tmp_path, monkeypatch, files, tokenizer):
    lines = [
        f"{number} the quick brown fox {number}é\n\n  and the dog\n" for number in range(files)
    ]
    texts = [line * 10 for line in lines]
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(text)
    options = {"tokenizer": tokenizer, "vocab_size": 290}
    whole = prepare_data(config(tmp_path / "corpus", **options))
    monkeypatch.setattr(corpora, "CHUNK", 100)
    monkeypatch.setattr(tokens, "GROUP_CHARS", 1)
    chunks = prepare_data(config(tmp_path / "corpus", cache_dir=str(tmp_path / "other"), **options))
    assert chunks.counts == whole.counts  # also the fingerprint of the vocabulary
    for split in SPLITS:
        np.testing.assert_array_equal(getattr(chunks, split), getattr(whole, split))
    expected = split_documents(texts, 0.1)
    for split in SPLITS:
        assert documents(chunks, split) == [text for name, text in expected if name == split]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_memory_does_not_grow_with_the_text(tmp_path, name, monkeypatch):
    """Pitfall 48: a text that was tokenized as one string took 40 times its size."""
    size = 4_000_000
    text = b"the quick brown fox\n" * (size // 20)
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    monkeypatch.setattr(corpora, "CHUNK", 2**14)
    monkeypatch.setattr(tokens, "GROUP_CHARS", 2**14)
    tracemalloc.start()
    dataset = prepare_data(config(tmp_path / name, validation_fraction=0.01))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dataset.counts["train"]["bytes"] + dataset.counts["validation"]["bytes"] == size
    assert peak_bytes < size


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_smallest_integer_that_holds_the_vocabulary(corpus, monkeypatch, vocab_size, dtype):
    monkeypatch.setattr(BytesTokenizer, "vocab_size", vocab_size)
    dataset = prepare_data(config(corpus))
    assert dataset.train.dtype == dataset.validation.dtype == dtype


def test_the_cache_is_used_until_the_corpus_or_the_tokenizer_changes(corpus, monkeypatch):
    first = prepare_data(config(corpus))
    options = {"tokenizer": "bpe", "vocab_size": 299}
    bpe = prepare_data(config(corpus, **options))
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "train_sentencepiece", None)
        patch.setattr(tokens, "write_tokens", None)
        assert prepare_data(config(corpus)).fingerprint == first.fingerprint
        assert prepare_data(config(corpus, **options)).fingerprint == bpe.fingerprint
        patch.setenv("JLLAMA_CACHE", str(corpus.parent / "cache"))
        assert prepare_data(config(corpus, cache_dir="")).fingerprint == first.fingerprint
    seen = {first.fingerprint, bpe.fingerprint}
    write = mock.Mock(side_effect=tokens.write_tokens)
    monkeypatch.setattr(tokens, "write_tokens", write)

    def is_new(**changes):
        fingerprint = prepare_data(config(corpus, **changes)).fingerprint
        assert fingerprint not in seen
        seen.add(fingerprint)

    def is_written_again(**changes):
        """But the tokens, which the fingerprint is of, are the same."""
        before = write.call_count
        assert prepare_data(config(corpus, **changes)).fingerprint == first.fingerprint
        assert write.call_count == before + 1

    is_new(tokenizer="bpe", vocab_size=300)
    is_new(validation_fraction=0.2)
    is_written_again(text_field="body")
    os.utime(corpus / "003.txt", ns=(1, 1))
    is_written_again()
    (corpus / "003.txt").rename(corpus / "003a.txt")
    is_written_again()
    (corpus / "003a.txt").rename(corpus / "003.txt")
    (corpus / "003.txt").write_text("longer" * 100)
    is_new()
    (corpus / "004.txt").rename(corpus / "x.txt")
    is_new()


def test_a_tokenizer_from_a_path(corpus, tmp_path):
    bpe = train_sentencepiece(TEXTS, 290)
    bpe.save(tmp_path / "bpe")
    dataset = prepare_data(config(corpus, tokenizer=str(tmp_path / "bpe")))
    assert dataset.tokenizer.fingerprint() == bpe.fingerprint()
    assert dataset.train[0] == bpe.bos_id
    assert not list((tmp_path / "cache").glob("bpe-*"))


def test_the_trained_tokenizer_never_saw_the_validation_split(corpus):
    dataset = prepare_data(config(corpus, tokenizer="bpe", vocab_size=300))
    train = [text for split, text in split_documents(TEXTS, 0.1) if split == "train"]
    assert dataset.tokenizer.fingerprint() == train_sentencepiece(train, 300).fingerprint()


def test_an_error_leaves_nothing_behind(corpus):
    (corpus / "999.txt").write_bytes(b"\xff")
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(JllamaError, match=r"999.txt .*: byte 0xFF"):
            prepare_data(config(corpus, tokenizer=tokenizer))
        assert not list((corpus.parent / "cache").iterdir())


def test_a_kill_leaves_nothing_that_looks_finished(corpus, monkeypatch):
    """What stands on disk before the last file is written is what a kill would leave."""
    killed, dumps = corpus.parent / "killed", json.dumps

    def copy_and_dump(*args, **options):
        if options:
            shutil.copytree(corpus.parent / "cache", killed)
        return dumps(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", copy_and_dump)
        expected = prepare_data(config(corpus))
    (partial,) = killed.iterdir()
    assert partial.name.endswith(".partial")
    assert (partial / "train.bin").stat().st_size
    actual = prepare_data(config(corpus, cache_dir=str(killed)))
    assert actual.fingerprint == expected.fingerprint
    assert partial.exists()  # it may be another process at work


def test_a_rename_that_fails_is_told(corpus, monkeypatch):
    rename = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("pathlib.Path.replace", rename)
    message = "cannot write .*tokens-.*: No space left on device; make room"
    with pytest.raises(JllamaError, match=message):
        prepare_data(config(corpus))
    assert not list((corpus.parent / "cache").iterdir())


def test_two_processes_may_prepare_the_same(corpus, monkeypatch):
    write = tokens.write_tokens

    def write_while_another_finishes(*args):
        monkeypatch.setattr(tokens, "write_tokens", write)
        prepare_data(config(corpus))
        write(*args)

    monkeypatch.setattr(tokens, "write_tokens", write_while_another_finishes)
    dataset = prepare_data(config(corpus))
    assert len(dataset.train) == dataset.counts["train"]["tokens"]
    assert len(list((corpus.parent / "cache").iterdir())) == 1


def test_a_damaged_or_unwritable_cache_is_told(corpus):
    prepare_data(config(corpus))
    (folder,) = (corpus.parent / "cache").iterdir()
    report = json.loads((folder / "counts.json").read_text())
    assert report["dtype"] == "uint16"
    for name, content in (("train.bin", "ab"), ("counts.json", "{")):
        (folder / name).write_text(content)
        message = "tokens-.* must be deleted, since it does not hold what was written there"
        with pytest.raises(JllamaError, match=message):
            prepare_data(config(corpus))
    with pytest.raises(JllamaError, match=r"cannot write .*: .*make room or set data.cache_dir"):
        prepare_data(config(corpus, cache_dir=os.devnull))


def test_an_empty_split_is_told(corpus, monkeypatch):
    monkeypatch.setattr(tokens, "FEW_DOCUMENTS", 1)
    for split, fraction in (("validation", 1e-9), ("train", 1 - 1e-9)):
        message = f"the {split} split is empty: the corpus has 100 documents"
        with pytest.raises(JllamaError, match=message):
            prepare_data(config(corpus, validation_fraction=fraction))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "data.path is empty"),
        ({"tokenizer": ""}, "data.tokenizer is empty"),
        ({"text_field": ""}, "data.text_field is empty"),
        ({"vocab_size": 259}, "data.vocab_size is 259; it must be at least 260"),
        ({"validation_fraction": 0.0}, "data.validation_fraction is 0.0; it must be between 0 an"),
        ({"validation_fraction": 1.0}, "data.validation_fraction is 1.0; it must be between 0 an"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(UsageError, match=message):
        DataConfig(**changes)
