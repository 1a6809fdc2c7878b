"""Any text comes back, ids are where Llama 2 has them, bad files and texts are one sentence."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import transformers
from hard_text import trained_model
from hypothesis import given
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.formats.chat_files import read_text_files
from jllama.tokenizers import sentencepiece as module
from jllama.tokenizers.base import BytesTokenizer, Tokenizer
from jllama.tokenizers.loading import as_huggingface, load_tokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

CORPUS = [
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # the circle's\n",
    "It was the best of times, it was the worst of times, in 1859.\n\tnaïve café 世界 🙂\n",
    "the cat sat on the mat, and the other cats sat on the other mats\n",
]
BPE = train_sentencepiece(CORPUS, 360)
BYTES = BytesTokenizer()
both = pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])


@given(
    st.lists(
        st.sampled_from(["\n", " ", "a", "the cat", "\n\n", " \n", "\u2581", "世", "12"]),
        max_size=40,
    )
)
def test_long_texts_cut_at_newlines_have_the_same_ids(parts: list[str]):
    text = "".join(parts)
    whole = BPE.encode(text)
    assert BPE._cut_at_newlines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 3)
        assert BPE.encode(text) == whole


def test_llama_2_has_its_special_and_byte_tokens_where_we_do():
    assert BPE.texts[:3] == ["<unk>", "<s>", "</s>"]
    assert BPE.texts[3:259] == [f"<0x{byte:02X}>" for byte in range(256)]
    for tokenizer in (BPE, BYTES):
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
        assert tokenizer.decode([0, 1, *tokenizer.encode("a"), 2]) == "a"
        assert tokenizer.decode([3 + byte for byte in "é".encode()]) == "é"
        assert tokenizer.token_bytes()[:4].tolist() == [0, 0, 0, 1]
    assert BPE.encode("\n")[-1] == 13
    assert BYTES.encode("\na") == [13, 100]
    assert (BPE.vocab_size, BYTES.vocab_size) == (360, 259)


def test_digits_stand_alone():
    pieces = BPE.texts[259:]
    assert "1" in pieces
    assert not [piece for piece in pieces if len(piece) > 1 and re.search(r"\d", piece)]


@both
def test_half_a_character_gives_the_replacement_character(tokenizer: Tokenizer):
    half = [3 + byte for byte in "世".encode()[:2]]
    assert set(tokenizer.decode(half)) == {"\ufffd"}


def test_training_is_the_same_in_another_process(monkeypatch):
    # Each process has its own seed for the library's sampling; ours must not.
    monkeypatch.setattr(module, "MAX_LINES", 400)
    corpus = [f"{CORPUS[i % 3]} {i} {chr(97 + i % 26) * 3}\n" for i in range(1000)]
    here = train_sentencepiece(corpus, 330).fingerprint()
    code = (
        "import sys; from jllama.tokenizers import sentencepiece as m; m.MAX_LINES = 400; "
        "print(m.train_sentencepiece(eval(sys.stdin.read()), 330).fingerprint())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], input=repr(corpus), capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here
    assert train_sentencepiece(corpus[:500], 330).fingerprint() != here


def test_lines_are_sampled_evenly(monkeypatch):
    documents = ["\n".join(map(str, range(start, start + 100))) for start in range(0, 10_000, 100)]
    everything = [str(number) for number in range(10_000)]
    assert module._sample_lines(documents) == everything
    monkeypatch.setattr(module, "MAX_LINES", 1000)
    sample = [int(line) for line in module._sample_lines(documents)]
    assert 250 <= len(sample) <= 1000
    assert sorted(set(sample)) == sample
    assert abs(np.mean(sample) - 5000) < 5000 / 3**0.5 / len(sample) ** 0.5 * 4


CHATML = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
START, END = BPE.vocab_size, BPE.vocab_size + 1
ADDED = {"<s>": BPE.bos_id, "<|im_end|>": END, "<|im_start|>": START}
DECODER = {str(id): {"content": text, "special": True} for text, id in ADDED.items()}
PLACES = {
    "added_tokens.json": {"added_tokens.json": {"<|im_start|>": START, "<|im_end|>": END}},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": DECODER}},
}


def folder_of(tokenizer, folder, files):
    tokenizer.save(folder)
    for name, content in files.items():
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(before | content))
    return folder


@pytest.mark.parametrize("kind", ["SentencePiece", "tokenizer.json"])
@pytest.mark.parametrize("place", PLACES)
def test_tokens_that_other_files_add_are_tokens(tmp_path, place, kind):
    """In transformers, too; and the tokenizer that is saved has them in its own file."""
    plain = BPE if kind == "SentencePiece" else as_huggingface(BPE)
    folder = folder_of(plain, tmp_path / "in", PLACES[place])
    config = json.loads((folder / "tokenizer_config.json").read_text()) if kind[0] == "t" else {}
    config |= PLACES[place].get("tokenizer_config.json", {})
    config |= {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == END + 1
    assert tokenizer.eos_id == END
    ids = tokenizer.encode_with_special_tokens(CHATML)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = peer.encode(CHATML, add_special_tokens=False)
    space = BPE.texts.index("\u2581")  # SentencePiece begins each part with one
    assert [id for id in ids if id != space] == [id for id in expected if id != space]
    assert {START, END} < {*ids}
    assert tokenizer.encode("<|im_end|>") != [END]  # a text has no special tokens
    tokenizer.save(tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").encode_with_special_tokens(CHATML) == ids


def test_added_tokens_that_do_not_fit_are_named(tmp_path):
    """Another token at an id, ids of no model, a stop id beyond the tokenizer."""
    messages = {5: "ha(s|ve) the token", -1: "which no model has", 2**40: "which no model has"}
    for id, message in messages.items():
        files = {"added_tokens.json": {"<|im_end|>": id}}
        with pytest.raises(JllamaError, match=message):
            load_tokenizer(folder_of(BPE, tmp_path / str(id), files))
    stops = {"generation_config.json": {"eos_token_id": [2, END]}}
    with pytest.raises(JllamaError, match=f"stops at the token {END}, but the tokenizer"):
        read_text_files(folder_of(BPE, tmp_path / "stops", stops))


def test_long_lines_are_not_dropped():
    long_line = " ".join(CORPUS).replace("\n", " ") * 200
    assert max(len(line.encode()) for line in module._sample_lines([long_line])) <= 4000
    assert train_sentencepiece([long_line], 340).vocab_size == 340


def test_models_that_cut_or_know_newlines_otherwise_still_come_back():
    # A model with a newline inside a piece, which long texts must not be cut at.
    options = {"byte_fallback": True, "normalization_rule_name": "identity"}
    model = trained_model(["x:\n", "y:\n", "z:\n\n"] * 20, 267, model_type="bpe", **options)
    tokenizer = module.SentencePieceTokenizer(model)
    assert not tokenizer._cut_at_newlines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 3)
        assert tokenizer.decode(tokenizer.encode("x:\ny:\nz:\n\n")) == "x:\ny:\nz:\n\n"


@pytest.mark.parametrize(
    ("documents", "vocab_size", "message"),
    [
        (["", "\n\n"], 300, "there is no text to train a tokenizer on"),
        (["a▅b"], 300, "SentencePiece could not train on this text"),
        (CORPUS, 4096, "supports a vocabulary of SIZE tokens, not 4096: lower vocab_size or give"),
        (CORPUS, 262, "needs at least SIZE tokens for its characters .*, not 262: raise vocab_s"),
    ],
)
def test_training_errors(documents, vocab_size, message):
    """A size that a message gives works."""
    with pytest.raises(JllamaError, match=message.replace("SIZE", r"\d+")) as caught:
        train_sentencepiece(documents, vocab_size)
    if "SIZE" in message:
        size = int(re.search(r"(\d+) tokens", str(caught.value))[1])
        assert train_sentencepiece(CORPUS, size).vocab_size == size


@both
def test_what_is_not_text_or_not_a_token(tokenizer: Tokenizer):
    with pytest.raises(JllamaError, match=r"lone surrogate U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")
    for token in (-1, tokenizer.vocab_size):
        message = f"token {token} is outside the tokenizer's vocabulary"
        with pytest.raises(JllamaError, match=message):
            tokenizer.decode([5, token])
    assert tokenizer.decode([]) == ""


FLIP_AT = BPE.content.index("\u2581".encode(), BPE.content.index(b"<0xFF>"))
FLIPPED = BPE.content[:FLIP_AT] + bytes([BPE.content[FLIP_AT] ^ 0x40]) + BPE.content[FLIP_AT + 1 :]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.model", b"", r"a\.model is not a SentencePiece model"),
        ("flipped.model", FLIPPED, r"flipped\.model is not a SentencePiece model"),
        ("a.json", b'{"type": "bpe"}', r"a\.json is not a tokenizer\.json"),
        ("broken.json", b"{", r"broken\.json is not a tokenizer\.json"),
        ("tokenizer.bytes.json", b"{}", r"tokenizer\.bytes\.json is not a bytes tokenizer"),
        ("missing.model", None, "there is no tokenizer at .*missing.model"),
        ("", None, r"holds no tokenizer: give a folder with one of tokenizer\.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loading_errors(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JllamaError, match=message):
        load_tokenizer(tmp_path / name)


def test_a_pipe_is_no_tokenizer(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.bin")
    message = r"tokenizer\.bin is a pipe, a socket or a device: put a file there"
    for path in (tmp_path, tmp_path / "tokenizer.bin"):
        with pytest.raises(JllamaError, match=message):
            load_tokenizer(path)


def test_a_model_without_bos_is_refused():
    model = trained_model(CORPUS, 50, bos_id=-1, hard_vocab_limit=False)
    with pytest.raises(JllamaError, match="mine has no BOS or no EOS"):
        module.SentencePieceTokenizer(model, "mine")
