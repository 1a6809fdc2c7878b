"""A tokenizer of every kind, as every format holds it, gives the ids that the original library gives."""

import base64
import json
import struct

import pytest
import tokenizers
import transformers
from hard_text import HARD
from hypothesis import given
from hypothesis import strategies as st

from jllama.errors import JllamaError
from jllama.tokenizers import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    has_tokenizer,
    load_tokenizer,
    train_sentencepiece,
)
from jllama.tokenizers.byte_level import BYTE_CHARS, LLAMA3_PATTERN, PRE_TOKENIZERS, byte_level_json
from jllama.tokenizers.convert import as_huggingface, save_huggingface, save_llama2c_tokenizer, save_meta, to_gguf
from jllama.tokenizers.gguf import from_gguf
from jllama.tokenizers.llama2c import load_llama2c_tokenizer
from jllama.tokenizers.pieces import read_pieces
from jllama.tokenizers.tiktoken import SPECIAL_TOKENS

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't they? 12 345 6789\n\n  def f(x):\n    return x\n" * 20,
    "héllo wörld 你好 世界 " * 20,
]
TEXTS = [text for text in HARD if "\u2581" not in text]


def trained_byte_level(pre):
    """A small byte-level BPE, trained by the ``tokenizers`` library with one of the known ways to split text."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    known = PRE_TOKENIZERS[pre]
    trained.pre_tokenizer = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": known,
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    ).pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=BYTE_CHARS, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    return json.loads(trained.to_str())["model"]


def byte_level(pre):
    model = trained_byte_level(pre)
    vocab = {token: id + 3 for token, id in model["vocab"].items()}  # special tokens first, as SmolLM2 has them
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = [tuple(merge) for merge in model["merges"]]
    added = [(id, token, True) for id, token in enumerate(specials)]
    whole = {token: id for id, token in enumerate(specials)} | vocab
    return HuggingFaceTokenizer(byte_level_json(whole, merges, added, pre, None), 1, 2)


def tiktoken_file():
    """Ranks by the trainer's order: the 256 bytes, then what each merge makes."""
    model = trained_byte_level("llama-bpe")
    back = {char: byte for byte, char in enumerate(BYTE_CHARS)}
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(back[char] for char in "".join(merge)) for merge in model["merges"]]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


MADE = {
    "sentencepiece": train_sentencepiece(CORPUS, 400),
    "tiktoken": TiktokenTokenizer(tiktoken_file()),
    "smollm": byte_level("smollm"),
    "gpt-2": byte_level("gpt-2"),
    "bytes": BytesTokenizer(),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", MADE.values(), ids=MADE)


def assert_same_ids(found, expected):
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text), text
    assert (found.bos_id, found.eos_id, found.add_bos) == (expected.bos_id, expected.eos_id, expected.add_bos)


@every_tokenizer
@given(st.text())
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    spare = tokenizer.token_bytes()[ids].sum() - len(text.encode())
    assert spare == (1 if text and isinstance(tokenizer, SentencePieceTokenizer) else 0)


@every_tokenizer
def test_hard_text_comes_back(tokenizer):
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@every_tokenizer
def test_saved_it_is_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert has_tokenizer(tmp_path)
    found = load_tokenizer(tmp_path)
    assert type(found) is type(tokenizer)
    assert_same_ids(found, tokenizer)
    assert (found.fingerprint(), found.vocab_size) == (tokenizer.fingerprint(), tokenizer.vocab_size)


@every_tokenizer
def test_transformers_gives_the_same_ids(tokenizer, tmp_path):
    save_huggingface(tokenizer, tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = peer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text), text
        with_bos = peer(text, split_special_tokens=True)["input_ids"]
        assert with_bos == ([tokenizer.bos_id, *ids] if tokenizer.add_bos else ids)
    assert (peer.bos_token_id, peer.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert_same_ids(load_tokenizer(tmp_path), tokenizer)
    assert_same_ids(as_huggingface(tokenizer), tokenizer)


@every_tokenizer
@pytest.mark.parametrize("padding", [0, 7])
def test_through_gguf(tokenizer, padding):
    metadata = to_gguf(tokenizer, tokenizer.vocab_size + padding)
    assert len(metadata["tokenizer.ggml.tokens"]) == tokenizer.vocab_size + padding
    assert len(metadata["tokenizer.ggml.token_type"]) == tokenizer.vocab_size + padding
    found = from_gguf(metadata, "it")
    assert_same_ids(found, tokenizer)
    assert found.vocab_size == tokenizer.vocab_size


@every_tokenizer
def test_through_metas_format(tokenizer, tmp_path):
    save_meta(tokenizer, tmp_path)
    assert_same_ids(load_tokenizer(tmp_path), tokenizer)
    again = tmp_path / "again"
    save_meta(as_huggingface(tokenizer), again)
    assert_same_ids(load_tokenizer(again), tokenizer)
    if isinstance(tokenizer, TiktokenTokenizer):
        assert (again / "tokenizer.model").read_bytes() == tiktoken_file()
    if isinstance(tokenizer, SentencePieceTokenizer):
        assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.model


def test_through_llama2c(tmp_path):
    path = tmp_path / "tokenizer.bin"
    for tokenizer in (MADE["sentencepiece"], as_huggingface(MADE["sentencepiece"])):
        save_llama2c_tokenizer(tokenizer, path)
        assert_same_ids(load_tokenizer(path), MADE["sentencepiece"])
    longest, score, length = struct.unpack_from("<ifi", path.read_bytes())
    assert (score, length) == (0.0, 5)
    assert longest == max(
        len(text.replace("\u2581", " ").encode()) for text in read_pieces(MADE["sentencepiece"].model).texts
    )
    assert b"\n<s>\n" in path.read_bytes()


@pytest.mark.parametrize("name", ["tiktoken", "smollm", "bytes"])
def test_llama2c_refuses_other_kinds(name, tmp_path):
    with pytest.raises(JllamaError, match="SentencePiece"):
        save_llama2c_tokenizer(MADE[name], tmp_path / "tokenizer.bin")
    assert list(tmp_path.iterdir()) == []


@given(st.data())
def test_a_tokenizer_bin_cut_short(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "tokenizer.bin"
    save_llama2c_tokenizer(MADE["sentencepiece"], path)
    whole, ends = path.read_bytes(), [4]
    while ends[-1] < len(whole):
        ends.append(ends[-1] + 8 + struct.unpack_from("<i", whole, ends[-1] + 4)[0])
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1).filter(lambda cut: cut not in ends[259:]))])
    with pytest.raises(JllamaError, match=str(path)):
        load_llama2c_tokenizer(path)


def test_a_tokenizer_bin_that_lies(tmp_path):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(struct.pack("<ifi", 5, 0.0, 2**31 - 1))
    with pytest.raises(JllamaError, match=r"says at byte 8 that token 0 has 2147483647 bytes, but 0 are left"):
        load_tokenizer(path)


def test_the_way_to_split_text_matters():
    """Each known one gives other ids than the others: none is taken for another."""
    text = "it's 12345 and 3.14\n\n  x"
    found = set()
    for pre in PRE_TOKENIZERS:
        model = trained_byte_level("gpt-2")
        whole = byte_level_json(model["vocab"], [tuple(merge) for merge in model["merges"]], [], pre, None)
        found.add(tuple(tokenizers.Tokenizer.from_str(whole).encode(text).tokens))
        assert to_gguf(HuggingFaceTokenizer(whole, 0, 0), 400)["tokenizer.ggml.pre"] == pre
    assert len(found) >= 2
    digits = tokenizers.Tokenizer.from_str(as_huggingface(MADE["smollm"])._text).pre_tokenizer.pre_tokenize_str("a 123")
    assert [part for part, _ in digits] == ["a", "Ġ", "1", "2", "3"]
    triples = tokenizers.Tokenizer.from_str(MADE["tiktoken"].to_json()).pre_tokenizer.pre_tokenize_str("a 12345")
    assert [part for part, _ in triples] == ["a", "Ġ", "123", "45"]


def test_llama3_takes_whole_words_first():
    """A part of the text that is a token is that token, though no merges lead there."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"hello"]
    ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    tokenizer = TiktokenTokenizer(ranks)
    assert tokenizer.encode("hello") == [256]
    assert as_huggingface(tokenizer).encode("hello") == [256]
    assert from_gguf(to_gguf(tokenizer, tokenizer.vocab_size), "it").encode("hello") == [256]


def test_llama3s_special_tokens():
    tokenizer = MADE["tiktoken"]
    base = len(tokenizer.tokens)
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (base, base + 1)
    assert SPECIAL_TOKENS[9] == "<|eot_id|>"
    assert SPECIAL_TOKENS[-1] == "<|reserved_special_token_245|>" or SPECIAL_TOKENS[-1].startswith("<|reserved")
    assert tokenizer.decode([base, *tokenizer.encode("a"), base + 9]) == "a"
    assert LLAMA3_PATTERN.count("|") > 6


@pytest.mark.parametrize("run", [" " * 60_000, "a" * 60_000, "ab" * 20_000 + " " * 30_000 + "c" * 450_000])
def test_tiktoken_and_very_long_runs(run):
    tokenizer = MADE["tiktoken"]
    assert tokenizer.decode(tokenizer.encode(run)) == run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(b" 5\n", b" 6\n"), "in line 6; expected a token in base64 and 5"),
        (lambda text: b"!!!! 0\n" + text, "in line 1; expected a token in base64 and 0"),
        (lambda text: text + text.splitlines()[7].split()[0] + b" %d\n" % len(text.splitlines()), "has a token twice"),
        (lambda text: b"".join(text.splitlines(keepends=True)[:200]), "has no token for the byte"),
    ],
)
def test_ranks_that_are_none(tmp_path, change, said):
    with pytest.raises(JllamaError, match=said):
        TiktokenTokenizer(change(tiktoken_file()), "it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, "'qwen2'"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": 3}, "an odd tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "types of tokens"),
        ({"tokenizer.ggml.bos_token_id": 10_000}, "BOS and EOS are 10000"),
        ({"tokenizer.ggml.merges": ["a"]}, "which are no tokens"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "which are no tokens"),
    ],
)
def test_metadata_that_describe_no_tokenizer(change, said):
    metadata = to_gguf(MADE["smollm"], 410) | change
    with pytest.raises(JllamaError, match=said):
        from_gguf({key: value for key, value in metadata.items() if value is not None}, "it")


def test_gguf_refuses_what_it_has_no_name_for():
    whole = json.loads(as_huggingface(MADE["smollm"])._text)
    whole["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    with pytest.raises(JllamaError, match="no name for how this tokenizer splits text"):
        to_gguf(HuggingFaceTokenizer(json.dumps(whole), 1, 2), 410)
    whole = json.loads(as_huggingface(MADE["smollm"])._text) | {"normalizer": {"type": "NFC"}}
    with pytest.raises(JllamaError, match="NFC"):
        to_gguf(HuggingFaceTokenizer(json.dumps(whole), 1, 2), 410)


def test_a_json_with_more_tokens_than_the_model_beside_it_wins(tmp_path):
    tokenizer = MADE["sentencepiece"]
    save_huggingface(tokenizer, tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    token = {"id": 400, "content": "<pad>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    whole["added_tokens"].append(token | {"normalized": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    found = load_tokenizer(tmp_path)
    assert isinstance(found, HuggingFaceTokenizer)
    assert found.vocab_size == 401


def test_bos_and_eos_from_the_files_beside(tmp_path):
    MADE["smollm"].save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
    with pytest.raises(JllamaError, match="say which token is EOS"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert (load_tokenizer(tmp_path).bos_id, load_tokenizer(tmp_path).eos_id) == (1, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_tokenizer(tmp_path).eos_id == 2
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(JllamaError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"added_tokens": [], "model": {"vocab": 3}}'])
def test_a_json_that_is_no_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(JllamaError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
