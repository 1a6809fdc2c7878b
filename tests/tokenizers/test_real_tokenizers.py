"""The tokenizers of Llama 3, Mistral (of Llama 2's kind, and Tekken), Qwen and SmolLM2 in every
possible format.

Marked ``real_weights``; ``python tests/fetch_real_weights.py`` fetches them.
"""

import base64
import functools
import inspect
import json
import unicodedata
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
from jllama.tokenizers.base import BYTE_CHARS, TokenType, Vocabulary, merges_of_ranks
from jllama.tokenizers.gguf import from_gguf, to_gguf
from jllama.tokenizers.huggingface import PRE_TOKENIZERS
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


def from_ranks(tokens, special, bos, eos, pre):
    """The tokenizer of tokens in the order of their ranks, with special tokens before or after."""
    texts = ["".join(BYTE_CHARS[byte] for byte in token) for token in tokens]
    merges = merges_of_ranks(texts, {text: rank for rank, text in enumerate(texts)})
    first = special if pre == "tekken" else []
    last = [] if pre == "tekken" else special
    kinds = [
        *[TokenType.CONTROL] * len(first),
        *[TokenType.NORMAL] * len(texts),
        *[TokenType.CONTROL] * len(last),
    ]
    names = [*first, *texts, *last]
    vocabulary = Vocabulary(
        names, kinds, names.index(bos), names.index(eos), pre == "tekken", merges=merges, pre=pre
    )
    return HuggingFaceTokenizer.from_vocabulary(vocabulary)


@functools.cache
def qwen_ranks():
    lines = real_file("qwen.tiktoken").read_text().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


@functools.cache
def tekken_file():
    return json.loads(real_file("tekken.json").read_text())


@pytest.fixture(scope="module")
def qwen():
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return from_ranks(qwen_ranks(), special, "<|endoftext|>", "<|im_end|>", "qwen2")


@pytest.fixture(scope="module")
def tekken():
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
    special += [f"<SPECIAL_{number}>" for number in range(len(special), 1000)]
    words = [base64.b64decode(word["token_bytes"]) for word in tekken_file()["vocab"]]
    return from_ranks(words[: 131_072 - 1000], special, "<s>", "</s>", "tekken")


def assert_same_ids(actual, expected):
    for text in HARD:
        assert actual.encode(text) == expected.encode(text), text
        if not normalizes(actual):
            assert actual.decode(actual.encode(text)) == text
    assert (actual.bos_id, actual.eos_id, actual.add_bos) == (
        expected.bos_id,
        expected.eos_id,
        expected.add_bos,
    )


def normalizes(tokenizer):
    """Whether it composes characters first, as Qwen's does."""
    return tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


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


def test_qwen(qwen, tmp_path):
    assert qwen.vocab_size == 151_646
    (split, _) = PRE_TOKENIZERS["qwen2"]["pretokenizers"]
    original = tiktoken.Encoding(
        "it",
        pat_str=split["pattern"]["Regex"],
        mergeable_ranks={token: rank for rank, token in enumerate(qwen_ranks())},
        special_tokens={},
    )
    for text in HARD:
        expected = original.encode_ordinary(unicodedata.normalize("NFC", text))
        assert qwen.encode(text) == expected
    assert qwen.encode("2026") == [17, 15, 17, 21]
    assert not qwen.add_bos
    assert_transformers_agrees(qwen, tmp_path / "hf")
    fields = to_gguf(qwen, 151_936)
    assert fields["tokenizer.ggml.pre"] == "qwen2"
    assert_same_ids(from_gguf(fields, "it"), qwen)


def test_tekken(tekken, tmp_path):
    config = tekken_file()["config"]
    words = tekken_file()["vocab"][: 131_072 - 1000]
    original = tiktoken.Encoding(
        "it",
        pat_str=config["pattern"],
        mergeable_ranks={base64.b64decode(word["token_bytes"]): word["rank"] for word in words},
        special_tokens={},
    )
    for text in HARD:
        assert tekken.encode(text) == [1000 + id for id in original.encode_ordinary(text)]
    assert tekken.add_bos
    assert_transformers_agrees(tekken, tmp_path / "hf")
    fields = to_gguf(tekken, 131_072)
    assert fields["tokenizer.ggml.pre"] == "tekken"
    assert_same_ids(from_gguf(fields, "it"), tekken)


def test_mistral_v3(tmp_path):
    """Its control tokens are special ones, whatever a user's text has."""
    tokenizer = load_tokenizer(real_file("mistral_v3_tokenizer.model"))
    assert tokenizer.vocab_size == 32_768
    original = sentencepiece.SentencePieceProcessor(
        model_file=str(real_file("mistral_v3_tokenizer.model"))
    )
    for text in HARD:
        assert tokenizer.encode(text) == original.encode(text)
    names = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    for name in names:
        id = original.piece_to_id(name)
        assert tokenizer.special_tokens[name] == id
        assert tokenizer.encode_with_special_tokens(f"{name}a")[0] == id
        assert id not in tokenizer.encode(name)
    assert_transformers_agrees(tokenizer, tmp_path / "hf")
    assert_same_ids(from_gguf(to_gguf(tokenizer, 32_768), "it"), tokenizer)


@pytest.mark.parametrize("name", ["llama3", "mistral", "smollm2", "qwen", "tekken"])
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
