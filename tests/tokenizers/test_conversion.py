"""Tokenizers of every kind, in every format, give the ids that the original library gives."""

import contextlib
import hashlib
import json
import operator
import os
import struct
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers
from hard_text import CHARACTERS, HARD, trained_model
from helpers import byte_level_bpe, trained_llama3, trained_smollm
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter

from jllama.core import JllamaError
from jllama.tokenizers.base import BYTE_CHARS, BytesTokenizer, TokenType, Vocabulary
from jllama.tokenizers.gguf import from_gguf, to_gguf
from jllama.tokenizers.huggingface import PRE_TOKENIZERS, HuggingFaceTokenizer
from jllama.tokenizers.llama2c import load_llama2c_tokenizer, save_llama2c_tokenizer
from jllama.tokenizers.loading import (
    as_huggingface,
    has_tokenizer,
    load_tokenizer,
    save_huggingface,
    save_meta,
)
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from jllama.tokenizers.tiktoken import (
    PATTERN,
    SPECIAL_TOKENS,
    TiktokenTokenizer,
    _parts,
    write_ranks,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't they? 12 345 6789\n\n  def f(x):\n    "
    "return x\n" * 20,
    "héllo wörld 你好 世界 " * 20,
]
MADE = {
    "sentencepiece": train_sentencepiece(CORPUS, 400),
    "tiktoken": trained_llama3(CORPUS, 400),
    "smollm": trained_smollm(CORPUS, 400),
    "gpt-2": trained_smollm(CORPUS, 400, "gpt-2"),
    "bytes": BytesTokenizer(),
}
METAS_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS = {
    "sentencepiece": sentencepiece.SentencePieceProcessor(
        model_proto=MADE["sentencepiece"].content
    ).encode,
    "tiktoken": tiktoken.Encoding(
        "it",
        pat_str=METAS_PATTERN,
        mergeable_ranks={t: r for r, t in enumerate(MADE["tiktoken"].tokens)},
        special_tokens={},
    ).encode_ordinary,
    "bytes": lambda text: [3 + byte for byte in text.encode()],
}
"""What the library of each kind gives itself; ``transformers`` is asked below for the others."""

METASPACE = {"type": "Metaspace", "replacement": "\u2581", "split": False}
PARTS = ["a", "the ", " ", "  ", "\n", "12", "=", "世", "é", "'s", "\t", "\r", "🙂"]
repetitive = st.lists(st.builds(operator.mul, st.sampled_from(PARTS), st.integers(1, 9))).map(
    "".join
)
every_tokenizer = pytest.mark.parametrize("tokenizer", MADE.values(), ids=MADE)


def assert_same_ids(actual, expected):
    for text in HARD:
        ids = expected.encode(text)
        assert actual.encode(text) == ids, text
        assert actual.decode(ids) == expected.decode(ids), text
    for name in ("bos_id", "eos_id", "add_bos"):
        assert getattr(actual, name) == getattr(expected, name)


def huggingface(tokenizer, add_bos=None, **changes):
    """The tokenizer's json with other values at its top."""
    whole = json.loads(as_huggingface(tokenizer).content) | changes
    return HuggingFaceTokenizer(json.dumps(whole), tokenizer.bos_id, tokenizer.eos_id, add_bos)


@contextlib.contextmanager
def edited(folder, name="tokenizer.json"):
    """The content of a JSON file, to change it."""
    content = json.loads((folder / name).read_text())
    yield content
    (folder / name).write_text(json.dumps(content))


@every_tokenizer
@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\0\u2581\ufdefa7世🙂"))
)
@example(" two  spaces \r\n\n <s> </s> <unk> ⁇ ▅▅ \u2581\u2581\ufdef\ufdee \0 \ufffd 👩‍👩‍👧 ")
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    spare = tokenizer.token_bytes()[ids].sum() - len(text.encode())
    assert spare == (1 if text and isinstance(tokenizer, SentencePieceTokenizer) else 0)


def every_form(tokenizer):
    """The tokenizer as each format that can hold it gives it back."""
    yield as_huggingface(tokenizer)
    yield from_gguf(to_gguf(tokenizer, tokenizer.vocab_size + 3), "it")
    if isinstance(tokenizer, SentencePieceTokenizer):
        yield from_gguf(to_gguf(as_huggingface(tokenizer), tokenizer.vocab_size), "it")


FORMS = {name: list(every_form(tokenizer)) for name, tokenizer in MADE.items()}


@pytest.mark.parametrize("name", MADE)
@given(text=repetitive | st.text(CHARACTERS))
def test_ids_are_the_same_in_every_form(name, text):
    ids = MADE[name].encode(text)
    assert ids == ORIGINALS.get(name, MADE[name].encode)(text)
    for form in FORMS[name]:
        assert form.encode(text) == ids
        assert form.decode(ids) == text
        assert form.token_bytes()[ids].tolist() == MADE[name].token_bytes()[ids].tolist()


@every_tokenizer
def test_saved_it_is_loaded(tokenizer, tmp_path):
    assert [tokenizer.decode(tokenizer.encode(text)) for text in HARD] == HARD
    tokenizer.save(tmp_path / "new")
    assert has_tokenizer(tmp_path / "new")
    file = tmp_path / "new" / tokenizer.file_name
    for path in (tmp_path / "new", str(file)):
        actual = load_tokenizer(path)
        assert type(actual) is type(tokenizer)
        assert_same_ids(actual, tokenizer)
        assert actual.fingerprint() == tokenizer.fingerprint()
        assert actual.vocab_size == tokenizer.vocab_size
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        assert actual.fingerprint() == hashlib.sha256(file.read_bytes()).hexdigest()


@every_tokenizer
def test_transformers_gives_the_same_ids(tokenizer, tmp_path):
    save_huggingface(tokenizer, tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD:
        ids = peer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text), text
        with_bos = peer(text, split_special_tokens=True)["input_ids"]
        assert with_bos == ([tokenizer.bos_id, *ids] if tokenizer.add_bos else ids)
    assert (peer.bos_token_id, peer.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert_same_ids(load_tokenizer(tmp_path), tokenizer)


@every_tokenizer
def test_through_gguf(tokenizer):
    size = tokenizer.vocab_size + 7
    metadata = to_gguf(tokenizer, size)
    assert len(metadata["tokenizer.ggml.tokens"]) == size
    assert len(metadata["tokenizer.ggml.token_type"]) == size
    actual = from_gguf(metadata, "it")
    assert_same_ids(actual, tokenizer)
    assert actual.vocab_size == tokenizer.vocab_size


@every_tokenizer
def test_through_metas_format(tokenizer, tmp_path):
    save_meta(tokenizer, tmp_path)
    assert_same_ids(load_tokenizer(tmp_path), tokenizer)
    again = tmp_path / "again"
    save_meta(as_huggingface(tokenizer), again)
    assert_same_ids(load_tokenizer(again), tokenizer)
    if isinstance(tokenizer, TiktokenTokenizer):
        assert (again / "tokenizer.model").read_bytes() == MADE["tiktoken"].content
    if isinstance(tokenizer, SentencePieceTokenizer):
        assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.content


def test_through_llama2c(tmp_path):
    path = tmp_path / "tokenizer.bin"
    for tokenizer in (MADE["sentencepiece"], as_huggingface(MADE["sentencepiece"])):
        save_llama2c_tokenizer(tokenizer, path)
        assert_same_ids(load_tokenizer(path), MADE["sentencepiece"])
    _, score, length = struct.unpack_from("<ifi", path.read_bytes())
    assert (score, length) == (0.0, 5)
    assert b"\n<s>\n" in path.read_bytes()


def test_llama2c_refuses_other_kinds(tmp_path):
    for name in ("tiktoken", "smollm", "bytes"):
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
    cuts = st.integers(0, len(whole) - 1).filter(lambda cut: cut not in ends[259:])
    path.write_bytes(whole[: data.draw(cuts)])
    with pytest.raises(JllamaError, match=str(path)):
        load_llama2c_tokenizer(path)


def test_a_tokenizer_bin_that_lies(tmp_path):
    path = tmp_path / "tokenizer.bin"
    for longest, count, problem in (
        (2, 3, "at byte 0 that none has more"),
        (5, 2**31 - 1, "3 are left"),
    ):
        path.write_bytes(struct.pack("<ifi", longest, 0.0, count) + b"abc")
        message = f"says at byte 8 that token 0 has {count} bytes, but {problem}"
        with pytest.raises(JllamaError, match=message):
            load_tokenizer(path)


def test_the_way_to_split_text_matters():
    """Each known one gives other ids than the others: none is taken for another."""
    text = "it's 12345 and 3.14\n\n  x catCat's e\u0301 unmerged"
    actual = set()
    tokens, merges = byte_level_bpe(["catCat's " * 99, *CORPUS], 400, "gpt-2")
    tokens.append("\u0120unmerged")
    kinds = [TokenType.NORMAL] * len(tokens)
    vocabulary = Vocabulary(tokens, kinds, 0, 0, False, merges=merges)
    for pre in PRE_TOKENIZERS:
        tokenizer = HuggingFaceTokenizer.from_vocabulary(vocabulary._replace(pre=pre))
        actual.add(tuple(tokenizer.encode(text)))
        assert to_gguf(tokenizer, 400)["tokenizer.ggml.pre"] == pre
    assert len(actual) == len(PRE_TOKENIZERS)
    for name, parts in {"smollm": "a Ġ 1 2 3 4 5", "tiktoken": "a Ġ 123 45"}.items():
        library = tokenizers.Tokenizer.from_str(as_huggingface(MADE[name]).content.decode())
        split = library.pre_tokenizer.pre_tokenize_str("a 12345")
        assert " ".join(part for part, _ in split) == parts


def test_llama3_takes_whole_words_first():
    """A part of the text that is a token is that token, though no merges lead there."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"hello"]
    tokenizer = TiktokenTokenizer(write_ranks(tokens))
    assert tokenizer.encode("hello") == [256]
    assert as_huggingface(tokenizer).encode("hello") == [256]
    assert from_gguf(to_gguf(tokenizer, tokenizer.vocab_size), "it").encode("hello") == [256]


def test_llama3s_special_tokens():
    tokenizer = MADE["tiktoken"]
    base = len(tokenizer.tokens)
    assert PATTERN == METAS_PATTERN
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (base, base + 1)
    assert SPECIAL_TOKENS[9] == "<|eot_id|>"
    assert SPECIAL_TOKENS[-1] == "<|reserved_special_token_245|>"
    assert tokenizer.decode([base, *tokenizer.encode("a"), base + 9]) == "a"


def as_meta_cuts(text, longest):
    """Before the character that would make a run, of spaces or of others, too long."""
    parts, run = [""], 0
    for before, char in zip(" " + text, text, strict=False):
        run = run + 1 if parts[-1] and char.isspace() == before.isspace() else 1
        if run > longest:
            parts.append("")
            run = 1
        parts[-1] += char
    return parts


@given(st.text("a \n", max_size=40))
def test_long_runs_are_cut_where_meta_cuts_them(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jllama.tokenizers.tiktoken._LONGEST_RUN", 3)
        assert list(_parts(text)) == (as_meta_cuts(text, 3) if text else [])
        patch.setattr("jllama.tokenizers.tiktoken._LONGEST_TEXT", 10)
        tens = [text[start : start + 10] for start in range(0, len(text), 10)]
        assert list(_parts(text)) == [part for ten in tens for part in as_meta_cuts(ten, 3)]


def test_each_part_of_a_long_run_is_encoded_alone(monkeypatch):
    tokenizer = MADE["tiktoken"]
    assert len(tokenizer.encode("the")) == 1
    monkeypatch.setattr("jllama.tokenizers.tiktoken._LONGEST_RUN", 2)
    assert tokenizer.encode("the") == tokenizer.encode("th") + tokenizer.encode("e")


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken", "smollm"])
def test_other_threads_run_while_a_long_text_is_encoded(name):
    """The server answers others meanwhile.

    A library that holds the interpreter's lock allows one round or two.
    """
    text, rounds = "the cat sat " * 30_000, 0
    thread = threading.Thread(target=MADE[name].encode_with_special_tokens, args=[text])
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        rounds += 1
    assert rounds > 5


def test_tiktoken_and_very_long_runs():
    tokenizer, run = MADE["tiktoken"], "ab" * 20_000 + " " * 30_000 + "c" * 450_000
    assert tokenizer.decode(tokenizer.encode(run)) == run


RANKS = MADE["tiktoken"].content.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([*RANKS[:5], *RANKS[6:]], "in line 6; expected a token in base64 and 5"),
        ([b"!!!! 0\n", *RANKS], "in line 1; expected a token in base64 and 0"),
        ([*RANKS, RANKS[7].split()[0] + b" %d\n" % len(RANKS)], "has a token twice"),
        (RANKS[:200], "has no token for the byte"),
    ],
)
def test_ranks_that_are_none(ranks, message):
    with pytest.raises(JllamaError, match=message):
        TiktokenTokenizer(b"".join(ranks), "it")


BAD_METADATA = {
    "sentencepiece": [
        ({"scores": [0.0]}, "400 tokens but 1 scores"),
        ({"scores": ["a"] * 400}, "scores"),
        ({"unknown_token_id": 400}, "lacks an unknown token"),
        ({"unknown_token_id": 5}, "lacks an unknown token"),
        ({"token_type": [2, 3, 3] + [TokenType.NORMAL] * 397}, "256 byte tokens"),
        ({"add_space_prefix": 1}, "a wrong type of tokenizer.ggml.add_space_prefix"),
    ],
    "smollm": [
        ({"pre": "falcon"}, "'falcon'"),
        ({"pre": None}, "tokenizer.ggml.pre '', which says how text is split"),
        ({"model": "bert"}, "'bert'"),
        ({"model": 3}, "a wrong type of tokenizer.ggml.model"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "types of tokens"),
        ({"token_type": [9] * 410}, "types of tokens other than 1 to 6"),
        ({"tokens": ["a"] * 410, "token_type": [1] * 410}, "the token 'a' twice"),
        ({"tokens": ["\udc80"] * 410}, "not text in UTF-8"),
        ({"tokens": [7] * 410}, "not text in UTF-8"),
        ({"eos_token_id": 405}, r"has \d+ tokens, but BOS and EOS are 1 and 405"),
        ({"bos_token_id": 10_000}, "BOS and EOS are 10000"),
        ({"bos_token_id": True}, "a wrong type of tokenizer.ggml.bos_token_id"),
        ({"merges": [None]}, "which are not tokens"),
        ({"merges": ["a"]}, "which are not tokens"),
        ({"merges": ["zz zz"]}, "which are not tokens"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [(name, *case) for name, cases in BAD_METADATA.items() for case in cases],
)
def test_metadata_that_describe_no_tokenizer(name, change, message):
    metadata = to_gguf(MADE[name], {"sentencepiece": 400, "smollm": 410}[name])
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(JllamaError, match=message):
        from_gguf({key: value for key, value in metadata.items() if value is not None}, "it")


def test_gguf_refuses_what_it_has_no_name_for():
    whole = json.loads(as_huggingface(MADE["smollm"]).content)
    whole["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    for change, message in (
        ({"pre_tokenizer": whole["pre_tokenizer"]}, "no name for how this tokenizer splits text"),
        ({"model": whole["model"] | {"ignore_merges": True}}, "ignore_merges"),
        ({"normalizer": {"type": "NFC"}}, "NFC"),
    ):
        with pytest.raises(JllamaError, match=message):
            to_gguf(huggingface(MADE["smollm"], **change), 410)


def test_bos_and_eos_from_the_files_beside(tmp_path):
    MADE["smollm"].save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"bos_token": {"content": "<|im_start|>"}}')
    with pytest.raises(JllamaError, match="say which token is EOS"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    first = load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    second = load_tokenizer(tmp_path)
    assert (first.bos_id, first.eos_id, second.eos_id) == (1, 0, 2)
    assert first.fingerprint() != second.fingerprint()
    for content, message in (
        ('{"add_bos_token": "no"}', "has add_bos_token 'no'"),
        ("{", "is not JSON"),
        ('{"bos_token": {"content": []}}', "has bos_token .*; it must be a text"),
    ):
        path.write_text(content)
        with pytest.raises(JllamaError, match=rf"tokenizer_config\.json {message}"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 300_000, "", "{", "[]", "{}", '{"added_tokens": [], "model": {"vocab": 3}}']
)
def test_a_json_that_is_no_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(JllamaError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_json_with_an_absurd_id(tmp_path):
    """Its table of 2**32 tokens is never made."""
    model = json.loads(as_huggingface(MADE["smollm"]).content)["model"]
    model["vocab"][next(iter(model["vocab"]))] = 2**32 - 2
    message = "has the token id 4294967294, which no Llama has: it is damaged"
    with pytest.raises(JllamaError, match=message):
        huggingface(MADE["smollm"], model=model)


def test_a_json_whose_pattern_never_ends():
    """The library panics, which is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = huggingface(MADE["smollm"], pre_tokenizer=split | {"invert": False})
    with pytest.raises(JllamaError, match="cannot split a text of 41 characters"):
        tokenizer.encode("a" * 40 + "b")


def test_a_json_that_makes_the_library_panic(tmp_path, capfd):
    """Which is no Exception, and which Rust prints before it is raised."""
    HuggingFaceTokenizer.from_vocabulary(BytesTokenizer().vocabulary()).save(tmp_path)
    with edited(tmp_path) as whole:
        whole["post_processor"]["special_tokens"] = {}
    message = r"tokenizer\.json is not a tokenizer\.json: no entry found for key"
    with pytest.raises(JllamaError, match=message):
        load_tokenizer(tmp_path)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_a_json_that_makes_the_library_panic_when_it_decodes():
    """None is known; the rule is that of encoding."""

    class PanicException(BaseException):
        pass

    tokenizer = HuggingFaceTokenizer.from_vocabulary(BytesTokenizer().vocabulary())
    panic = PanicException("range end index 9 out of range")
    tokenizer._library = mock.Mock(**{"decode.side_effect": panic})
    message = "cannot turn 2 tokens into text: range end index 9 out of range"
    with pytest.raises(JllamaError, match=message):
        tokenizer.decode([7, 8])


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_boolean_is_no_token(name, tmp_path):
    MADE["smollm"].save(tmp_path)
    with edited(tmp_path, "tokenizer_config.json") as fields:
        del fields[f"{name}_token"]
    message = f"has {name}_token_id True; it must be the id of a token"
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text(json.dumps({f"{name}_token_id": True}))
        with pytest.raises(JllamaError, match=message):
            load_tokenizer(tmp_path)


def test_characters_that_a_vocabulary_lacks_are_dropped():
    """As SmolLM2's lacks six control characters; every other character comes back."""
    made = as_huggingface(MADE["smollm"])
    whole = json.loads(made.content)
    lost = "\x04\x06\x13\x14\x16\x1d"
    lost_tokens = {BYTE_CHARS[ord(char)] for char in lost}
    vocab = [token for token in whole["model"]["vocab"] if token not in lost_tokens]
    whole["model"]["vocab"] = {token: id for id, token in enumerate(vocab)}
    for token in whole["added_tokens"]:
        token["id"] = vocab.index(token["content"])
    ids = [vocab.index(made.texts[id]) for id in (made.bos_id, made.eos_id)]
    tokenizer = HuggingFaceTokenizer(json.dumps(whole), *ids)
    text = "".join(map(chr, range(0x2000)))
    expected = "".join(char for char in text if char not in lost)
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert made.decode(made.encode(text)) == text


def test_a_jsons_truncation_and_padding_are_not_for_us():
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    actual = huggingface(MADE["smollm"], truncation=truncation, padding=padding)
    assert_same_ids(actual, MADE["smollm"])


@pytest.mark.parametrize("name", ["sentencepiece", "smollm"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_whether_bos_is_added_goes_with_the_tokenizer(name, add_bos, tmp_path):
    tokenizer = huggingface(MADE[name], add_bos)
    tokenizer.save(tmp_path / "hf")
    save_meta(tokenizer, tmp_path / "meta")
    actual = [load_tokenizer(tmp_path / folder) for folder in ("hf", "meta")]
    actual.append(from_gguf(to_gguf(tokenizer, tokenizer.vocab_size), "it"))
    assert {(other.add_bos, other.bos_id, other.eos_id) for other in actual} == {(add_bos, 1, 2)}
    assert actual[0].fingerprint() == tokenizer.fingerprint()
    assert actual[0].fingerprint() != huggingface(MADE[name], not add_bos).fingerprint()
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert peer("a")["input_ids"] == [1] * add_bos + tokenizer.encode("a")
    if name == "sentencepiece" and not add_bos:
        with pytest.raises(JllamaError, match=r"run\.c begins every prompt with BOS"):
            save_llama2c_tokenizer(tokenizer, tmp_path / "tokenizer.bin")


def test_a_post_processor_that_ends_texts_too_begins_them_with_bos():
    template = json.loads(as_huggingface(MADE["sentencepiece"]).content)["post_processor"]
    template["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    template["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    assert huggingface(MADE["sentencepiece"], post_processor=template).add_bos


@pytest.mark.parametrize(
    "change", [{"add_bos_token": False}, {"eos_token": "e"}, {"bos_token": "</s>"}, "more tokens"]
)
def test_a_json_that_differs_from_the_model_beside_it_wins(change, tmp_path):
    save_huggingface(MADE["sentencepiece"], tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    if change == "more tokens":
        with edited(tmp_path) as whole:
            whole["added_tokens"].append(whole["added_tokens"][2] | {"id": 400, "content": "<pad>"})
    else:
        with edited(tmp_path, "tokenizer_config.json") as fields:
            fields |= change
    actual = load_tokenizer(tmp_path)
    assert isinstance(actual, HuggingFaceTokenizer)
    assert actual.vocab_size == (401 if change == "more tokens" else 400)


LINES = " ".join(CORPUS).splitlines()
KIND = {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False}
IDENTITY = KIND | {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
NO_PREFIX = SentencePieceTokenizer(trained_model(LINES, 320, add_dummy_prefix=False, **IDENTITY))
NO_PREFIX_ORIGINAL = sentencepiece.SentencePieceProcessor(model_proto=NO_PREFIX.content)
NO_PREFIX_FORMS = [NO_PREFIX, *every_form(NO_PREFIX)]


def test_a_model_that_changes_text_is_read_but_not_converted(tmp_path):
    """OpenLLaMA's first is of this kind."""
    model = trained_model(LINES, 320, remove_extra_whitespaces=True, **KIND)
    tokenizer = SentencePieceTokenizer(model)
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode(" a  b\n") == original.encode(" a  b\n")
    assert tokenizer.encode("\n") == []
    save_huggingface(MADE["sentencepiece"], tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)
    for convert in (as_huggingface, lambda tokenizer: to_gguf(tokenizer, 400)):
        with pytest.raises(JllamaError, match="normalizes text"):
            convert(tokenizer)
    model = trained_model(LINES, 320, **KIND | {"model_type": "unigram"})
    with pytest.raises(JllamaError, match="BPE with byte fallback"):
        as_huggingface(SentencePieceTokenizer(model))


@given(text=repetitive)
def test_a_model_that_puts_no_space_in_front(text):
    for form in NO_PREFIX_FORMS:
        ids = form.encode(text)
        assert ids == NO_PREFIX_ORIGINAL.encode(text)
        assert form.decode(ids) == text
        assert form.token_bytes()[ids].sum() == len(text.encode())
    with pytest.raises(JllamaError, match="a space before every text"):
        save_llama2c_tokenizer(NO_PREFIX, Path("never written"))


def handmade(*normal):
    """A SentencePiece tokenizer with these pieces, the first one joined first."""
    made = MADE["sentencepiece"].vocabulary()
    vocabulary = made._replace(
        tokens=[*made.tokens[:259], *normal],
        scores=[0.0] * 259 + [-float(number) for number in range(len(normal))],
        token_type=[*made.token_type[:259], *[TokenType.NORMAL] * len(normal)],
    )
    return SentencePieceTokenizer.from_vocabulary(vocabulary)


def test_no_merge_makes_a_control_token():
    tokenizer = handmade("<", "s", ">", "<s", "s>", "/", "</")
    for text in ("<s>", "</s>", "<unk>", "<0x0A>"):
        assert not {0, 1, 2, 13} & set(tokenizer.encode(text))
        assert as_huggingface(tokenizer).encode(text) == tokenizer.encode(text)
    assert_same_ids(from_gguf(to_gguf(as_huggingface(tokenizer), 266), "it"), tokenizer)


def test_llama2c_counts_the_longest_tokens_bytes(tmp_path):
    path = tmp_path / "tokenizer.bin"
    save_llama2c_tokenizer(handmade("世", "世世", "世世世"), path)
    assert struct.unpack_from("<i", path.read_bytes()) == (9,)
    assert load_tokenizer(path).encode("世世世")[-1] == 261


def test_gguf_whose_eos_is_not_marked_as_a_control_token():
    metadata = to_gguf(MADE["sentencepiece"], 410)
    for key, type_ in (("eos", TokenType.USER_DEFINED), ("bos", TokenType.NORMAL)):
        types = list(metadata["tokenizer.ggml.token_type"])
        types[metadata[f"tokenizer.ggml.{key}_token_id"]] = type_
        assert_same_ids(
            from_gguf(metadata | {"tokenizer.ggml.token_type": types}, "it"), MADE["sentencepiece"]
        )
    types = [TokenType.NORMAL] * 403
    actual = from_gguf(to_gguf(MADE["smollm"], 403) | {"tokenizer.ggml.token_type": types}, "it")
    assert actual.decode([1, *actual.encode("a"), 2]) == "a"


def test_gguf_as_llama_cpp_writes_it():
    def fields(name, vocab_size):
        metadata = to_gguf(MADE[name], vocab_size)
        return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}

    actual = fields("sentencepiece", 402)
    types = actual["token_type"]
    assert (actual["model"], actual["bos_token_id"], actual["eos_token_id"]) == ("llama", 1, 2)
    assert types[:259] == [2, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    assert actual["tokens"][400:] == ["[PAD400]", "[PAD401]"]
    assert types[400:] == [5, 5]
    assert actual["scores"][259:400] == [-float(rank) for rank in range(141)]
    actual = fields("tiktoken", MADE["tiktoken"].vocab_size)
    assert (actual["model"], actual["pre"]) == ("gpt2", "llama-bpe")
    expected = [TokenType.NORMAL] * len(MADE["tiktoken"].tokens) + [TokenType.CONTROL] * 256
    assert actual["token_type"] == expected
    assert all(merge.count(" ") == 1 for merge in actual["merges"])
    for alias, name in {
        **dict.fromkeys(("llama3", "llama-v3", "smaug-bpe"), "tiktoken"),
        **dict.fromkeys(("refact", "starcoder"), "smollm"),
        "default": "gpt-2",
    }.items():
        metadata = to_gguf(MADE[name], 700) | {"tokenizer.ggml.pre": alias}
        assert_same_ids(from_gguf(metadata, "it"), MADE[name])


def test_what_llama_cpps_files_leave_out():
    """Prompts of Llama 2 and 3 and of Mistral's Tekken begin with BOS, SmolLM3's do not."""
    for name in ("sentencepiece", "tiktoken", "smollm", "gpt-2"):
        metadata = to_gguf(MADE[name], 700)
        del metadata["tokenizer.ggml.add_bos_token"]
        assert_same_ids(from_gguf(metadata, "it"), MADE[name])
    for pre, add_bos in {"tekken": True, "smaug-bpe": False, "dbrx": False}.items():
        assert from_gguf(metadata | {"tokenizer.ggml.pre": pre}, "it").add_bos is add_bos
    del metadata["tokenizer.ggml.bos_token_id"]
    assert from_gguf(metadata, "it").bos_id == 2


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_phi_3s_file(architecture):
    """Its unknown token is a control token, its padding unknown; special tokens strip spaces."""
    vocabulary = MADE["sentencepiece"].vocabulary()
    kinds = [TokenType.CONTROL, *vocabulary.token_type[1:], TokenType.CONTROL]
    vocabulary = vocabulary._replace(
        tokens=[*vocabulary.tokens, "<|user|>"],
        token_type=[TokenType.UNKNOWN, *kinds[1:]],
        scores=[*vocabulary.scores, 0.0],
        strips_spaces=architecture == "phi3",
    )
    tokenizer = HuggingFaceTokenizer.from_vocabulary(vocabulary)
    metadata = to_gguf(tokenizer, 405) | {"general.architecture": architecture}
    assert "tokenizer.ggml.strips_spaces" not in metadata
    kinds += [TokenType.UNKNOWN] * 4
    actual = from_gguf(metadata | {"tokenizer.ggml.token_type": kinds}, "it")
    assert_same_ids(actual, tokenizer)
    assert actual.vocab_size == 401
    text = "<|user|>\nthe fox<|user|> a"
    ids = actual.encode_with_special_tokens(text)
    assert ids == tokenizer.encode_with_special_tokens(text)
    stripped = [400, *actual.encode("the fox"), 400, *actual.encode("a")]
    assert (ids == stripped) is (architecture == "phi3")
    assert actual.vocabulary().strips_spaces is (architecture == "phi3")


def test_a_json_that_puts_no_space_behind_special_tokens_wins(tmp_path):
    """As Mistral's does. The model beside it has the same tokens, and would put one."""
    save_huggingface(MADE["sentencepiece"], tmp_path)
    for scheme, kind in {"first": HuggingFaceTokenizer, "always": SentencePieceTokenizer}.items():
        with edited(tmp_path) as whole:
            whole["normalizer"] = None
            whole["pre_tokenizer"] = METASPACE | {"prepend_scheme": scheme}
        tokenizer = load_tokenizer(tmp_path)
        assert isinstance(tokenizer, kind)
        ids = tokenizer.encode_with_special_tokens("<s> the</s> a")
        expected = [1, *tokenizer.encode("the"), 2, *tokenizer.encode("a")]
        assert (ids == expected) is (scheme == "first")


@pytest.mark.parametrize("kind", [HuggingFaceTokenizer, SentencePieceTokenizer])
def test_marks_of_calls_are_text(kind):
    """Also where they are special tokens; other ones are left out."""
    vocabulary = MADE["sentencepiece"].vocabulary()
    vocabulary = vocabulary._replace(
        tokens=[*vocabulary.tokens, "[INST]", "[TOOL_CALLS]", "[INST"],
        token_type=[*vocabulary.token_type, *[TokenType.CONTROL] * 3],
        scores=[*vocabulary.scores, 0.0, 0.0, 0.0],
    )
    tokenizer = kind.from_vocabulary(vocabulary)
    ids = [1, 400, *tokenizer.encode("a"), 401, *tokenizer.encode("[{}]"), 401, 2]
    assert tokenizer.decode(ids).replace(" ", "") == "a[TOOL_CALLS][{}][TOOL_CALLS]"
    assert tokenizer.token_bytes()[[1, 400, 401]].tolist() == [0, 0, 12]
    assert not {400, 401, 402} & set(tokenizer.encode("[INST][TOOL_CALLS]"))
    assert 400 in tokenizer.encode_with_special_tokens("[INST]")  # the longest that matches
    for count in range(len(ids)):
        assert tokenizer.decode(ids).startswith(tokenizer.decode(ids[:count]))


def test_a_json_may_leave_out_what_is_default():
    """GPT-2's own does, also that it splits."""
    whole = json.loads(as_huggingface(MADE["gpt-2"]).content)
    del whole["pre_tokenizer"]["use_regex"]
    for name in ("normalizer", "truncation", "padding", "post_processor"):
        del whole[name]
    for name in ("type", "dropout", "byte_fallback", "ignore_merges"):
        del whole["model"][name]
    tokenizer = HuggingFaceTokenizer(json.dumps(whole), 1, 2)
    assert_same_ids(tokenizer, MADE["gpt-2"])
    assert_same_ids(from_gguf(to_gguf(tokenizer, tokenizer.vocab_size), "it"), MADE["gpt-2"])


def test_a_json_of_another_kind():
    model = json.loads(as_huggingface(MADE["gpt-2"]).content)["model"]
    for other, message in (
        (model | {"dropout": 0.1}, "dropout 0.1"),
        (model | {"end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>'"),
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "is a WordLevel tokenizer"),
    ):
        with pytest.raises(JllamaError, match=message):
            huggingface(MADE["gpt-2"], model=other)


def test_merges_are_those_that_transformers_finds(tmp_path):
    """In the same order, so that a json that it made is known as Llama 3's."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"cd", b"abc", b"ab", b"abcd"]
    tokenizer = TiktokenTokenizer(write_ranks(tokens))
    tokenizer.save(tmp_path)
    converter = TikTokenConverter(str(tmp_path / "tokenizer.model"), METAS_PATTERN)
    vocab, merges = converter.extract_vocab_merges_from_model(str(tmp_path / "tokenizer.model"))
    model = json.loads(as_huggingface(tokenizer).content)["model"]
    assert vocab == model["vocab"]
    assert [list(merge) for merge in merges] == model["merges"]


def llama3_json(rename, eos="<|eot_id|>"):
    tokenizer = MADE["tiktoken"]
    whole = json.loads(as_huggingface(tokenizer).content)
    for token in whole["added_tokens"]:
        token["content"] = rename.get(token["content"], token["content"])
    (eos_id,) = (token["id"] for token in whole["added_tokens"] if token["content"] == eos)
    return HuggingFaceTokenizer(json.dumps(whole), tokenizer.bos_id, eos_id)


def test_a_llama3_json_with_other_reserved_tokens_becomes_metas_file(tmp_path):
    """Llama 3.1's has other names than Meta's code for two tokens that are not used in text."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(248)]
    rename = dict(zip(["<|step_id|>", "<|image|>", *reserved[2:]], reserved[2:], strict=False))
    model = json.loads(as_huggingface(MADE["tiktoken"]).content)["model"]
    save_meta(llama3_json(rename), tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == MADE["tiktoken"].content
    others = (
        llama3_json({"<|eom_id|>": "<|im_start|>"}),
        llama3_json({}, "<|python_tag|>"),
        huggingface(MADE["tiktoken"], normalizer={"type": "NFC"}),
        huggingface(MADE["tiktoken"], add_bos=False),
        huggingface(MADE["tiktoken"], model=model | {"merges": model["merges"][:-1]}),
    )
    for number, tokenizer in enumerate(others):
        save_meta(tokenizer, tmp_path / str(number))
        assert not (tmp_path / str(number) / "tokenizer.model").exists()
        assert load_tokenizer(tmp_path / str(number)).eos_id == tokenizer.eos_id


def test_a_json_of_llama2s_kind_that_sentencepiece_would_read_otherwise(tmp_path):
    model = json.loads(as_huggingface(MADE["sentencepiece"]).content)["model"]
    tokenizer = huggingface(MADE["sentencepiece"], model=model | {"merges": model["merges"][1:]})
    with pytest.raises(JllamaError, match="does not join"):
        save_llama2c_tokenizer(tokenizer, tmp_path / "tokenizer.bin")
    model["vocab"]["<newline>"] = model["vocab"].pop("<0x0A>")
    with pytest.raises(JllamaError, match="lacks 1 of the 256 byte tokens"):
        to_gguf(huggingface(MADE["sentencepiece"], model=model), 400)


def test_a_json_of_llama2s_kind_as_transformers_5_writes_it():
    """Metaspace: all ids as SentencePiece's but for text that begins with a space."""
    metaspace = METASPACE | {"prepend_scheme": "first"}
    tokenizer = huggingface(MADE["sentencepiece"], normalizer=None, pre_tokenizer=metaspace)
    converted = from_gguf(to_gguf(tokenizer, 400), "it")
    assert_same_ids(converted, MADE["sentencepiece"])
    for text in HARD:
        if not text.startswith(" "):
            assert tokenizer.encode(text) == converted.encode(text)


def test_an_added_eos_that_the_json_does_not_call_special(tmp_path):
    """As some chat models have it; the id is what counts."""
    whole = json.loads(as_huggingface(MADE["sentencepiece"]).content)
    whole["added_tokens"].append(
        whole["added_tokens"][2] | {"id": 400, "content": "<|im_end|>", "special": False}
    )
    tokenizer = HuggingFaceTokenizer(json.dumps(whole), 1, 400)
    save_meta(tokenizer, tmp_path)
    for actual in (load_tokenizer(tmp_path), from_gguf(to_gguf(tokenizer, 410), "it")):
        assert isinstance(actual, SentencePieceTokenizer)
        assert (actual.eos_id, actual.vocab_size) == (400, 401)
        assert actual.encode("a b") == tokenizer.encode("a b")


@every_tokenizer
def test_special_tokens_in_text_stay_text(tokenizer):
    specials = [tokenizer.bos_id, tokenizer.eos_id]
    assert tokenizer.token_bytes()[specials].tolist() == [0, 0]
    ids = tokenizer.encode("".join(tokenizer.special_tokens))
    assert not {*tokenizer.special_tokens.values()} & {*ids}
    assert tokenizer.token_bytes()[ids].all()


def test_an_added_token_that_is_not_special_is_text_that_stays_whole():
    added = json.loads(MADE["smollm"].content)["added_tokens"]
    token = added[0] | {"id": MADE["smollm"].vocab_size, "content": "<tool>", "special": False}
    tokenizer = huggingface(MADE["smollm"], added_tokens=[*added, token])
    for form in (tokenizer, from_gguf(to_gguf(tokenizer, 410), "it")):
        ids = form.encode("a <tool>\n")
        assert ids == [*form.encode("a "), token["id"], *form.encode("\n")]
        assert form.decode(ids) == "a <tool>\n"
        assert form.token_bytes()[token["id"]] == len("<tool>")
