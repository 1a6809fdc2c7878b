"""The tokenizers of Llama 3, Mistral (of Llama 2's kind) and SmolLM2 in every possible format.

Marked ``real_weights``; ``python tests/fetch_real_weights.py`` fetches them.
"""

import inspect
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import transformers
from hard_text import HARD
from helpers_real import real_file

from jllama.checkpoints.gguf_file import read_gguf_file
from jllama.data import corpus, tokens
from jllama.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    load_tokenizer,
    save_huggingface,
    save_meta,
)
from jllama.tokenizers.gguf import from_gguf, to_gguf
from jllama.tokenizers.llama2c import save_llama2c_tokenizer
from jllama.tokenizers.tiktoken import PATTERN

pytestmark = pytest.mark.real_weights


@pytest.fixture(scope="module")
def llama3():
    return load_tokenizer(real_file("llama3_tokenizer.model"))


@pytest.fixture(scope="module")
def mistral():
    return load_tokenizer(real_file("mistral_tokenizer.model"))


@pytest.fixture(scope="module")
def smollm2():
    metadata, _ = read_gguf_file(real_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return from_gguf(metadata, "SmolLM2")


def assert_same_ids(actual, expected):
    for text in HARD:
        assert actual.encode(text) == expected.encode(text), text
        assert actual.decode(actual.encode(text)) == text
    assert (actual.bos_id, actual.eos_id, actual.add_bos) == (
        expected.bos_id,
        expected.eos_id,
        expected.add_bos,
    )


def assert_transformers_agrees(tokenizer, folder):
    save_huggingface(tokenizer, folder)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in HARD:
        assert peer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ] == tokenizer.encode(text)
    assert_same_ids(load_tokenizer(folder), tokenizer)


def test_llama3(llama3, tmp_path):
    assert isinstance(llama3, TiktokenTokenizer)
    assert (llama3.vocab_size, llama3.bos_id, llama3.eos_id) == (128_256, 128_000, 128_001)
    assert llama3.encode("Hello world!") == [9906, 1917, 0]
    ranks = {token: rank for rank, token in enumerate(llama3.tokens)}
    original = tiktoken.Encoding("it", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in HARD:
        assert llama3.encode(text) == original.encode_ordinary(text)
    assert_transformers_agrees(llama3, tmp_path / "hf")
    whole = load_tokenizer(tmp_path / "hf")
    assert isinstance(whole, HuggingFaceTokenizer)
    assert len(whole.json["model"]["merges"]) == 280_147  # as in the json that Meta published
    save_meta(whole, tmp_path / "meta")
    original_file = real_file("llama3_tokenizer.model").read_bytes()
    assert (tmp_path / "meta" / "tokenizer.model").read_bytes() == original_file
    assert_same_ids(from_gguf(to_gguf(llama3, 128_256), "it"), llama3)


def test_mistral(mistral, tmp_path):
    assert isinstance(mistral, SentencePieceTokenizer)
    assert mistral.vocab_size == 32_000
    original = sentencepiece.SentencePieceProcessor(
        model_file=str(real_file("mistral_tokenizer.model"))
    )
    for text in HARD:
        assert mistral.encode(text) == original.encode(text)
    assert_transformers_agrees(mistral, tmp_path / "hf")
    assert_same_ids(from_gguf(to_gguf(mistral, 32_064), "it"), mistral)
    save_llama2c_tokenizer(mistral, tmp_path / "tokenizer.bin")
    assert_same_ids(load_tokenizer(tmp_path / "tokenizer.bin"), mistral)
    (tmp_path / "hf" / "tokenizer.model").unlink()
    whole = load_tokenizer(tmp_path / "hf")
    assert isinstance(whole, HuggingFaceTokenizer)
    save_meta(whole, tmp_path / "meta")
    assert_same_ids(load_tokenizer(tmp_path / "meta"), mistral)


def test_smollm2(smollm2, tmp_path):
    assert isinstance(smollm2, HuggingFaceTokenizer)
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (
        49_152,
        1,
        2,
        False,
    )
    assert_transformers_agrees(smollm2, tmp_path / "hf")
    assert_same_ids(from_gguf(to_gguf(smollm2, 49_152), "it"), smollm2)
    save_meta(smollm2, tmp_path / "meta")
    assert_same_ids(load_tokenizer(tmp_path / "meta"), smollm2)
    plane = [chr(code) for code in range(0x40000) if not 0xD800 <= code < 0xE000]
    lost = [ord(char) for char in plane if smollm2.decode(smollm2.encode(char)) != char]
    assert lost == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]


@pytest.mark.parametrize("name", ["llama3", "mistral", "smollm2"])
@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n", " "])
def test_a_corpus_in_chunks_has_the_ids_of_the_whole_text(name, end, request, monkeypatch):
    tokenizer = request.getfixturevalue(name)
    monkeypatch.setattr(corpus, "CHUNK", 500)
    text = Path(inspect.__file__).read_text("utf-8").replace("\n", end) + end.join(HARD)
    first, *rest = corpus.cut_chunks(
        text[start : start + 500] for start in range(0, len(text), 500)
    )
    assert len(rest) > 100
    assert tokenizer.encode(first) + [
        id for chunk in rest for id in tokens.encode_rest(tokenizer, chunk)
    ] == tokenizer.encode(text)
