"""Tokenizers of every kind, in every format, give the ids that the original library gives."""

import base64
import io
import json
import os
import struct
import threading
import time
import types
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers
from hard_text import HARD
from helpers import byte_level_bpe, trained_llama3, trained_smollm
from hypothesis import given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter

from jllama.errors import JllamaError
from jllama.tokenizers import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    as_huggingface,
    has_tokenizer,
    load_tokenizer,
    save_huggingface,
    save_meta,
    train_sentencepiece,
)
from jllama.tokenizers.base import BYTE_CHARS, TokenType, Vocabulary
from jllama.tokenizers.gguf import from_gguf, to_gguf
from jllama.tokenizers.huggingface import PRE_TOKENIZERS
from jllama.tokenizers.llama2c import load_llama2c_tokenizer, save_llama2c_tokenizer
from jllama.tokenizers.tiktoken import PATTERN, SPECIAL_TOKENS, _parts, write_ranks

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't they? 12 345 6789\n\n  def f(x):\n    "
    "return x\n" * 20,
    "héllo wörld 你好 世界 " * 20,
]
TEXTS = [text for text in HARD if "\u2581" not in text]


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

repetitive = st.lists(
    st.tuples(
        st.sampled_from(
            ["a", "the ", " ", "  ", "\n", "12", "=", "世", "é", "'s", "\t", "\r", "🙂"]
        ),
        st.integers(1, 9),
    )
).map(lambda runs: "".join(part * times for part, times in runs))
every_tokenizer = pytest.mark.parametrize("tokenizer", MADE.values(), ids=MADE)


def assert_same_ids(actual, expected):
    for text in TEXTS:
        assert actual.encode(text) == expected.encode(text), text
    assert (actual.bos_id, actual.eos_id, actual.add_bos) == (
        expected.bos_id,
        expected.eos_id,
        expected.add_bos,
    )


@every_tokenizer
@given(st.text())
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
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
@given(
    text=repetitive | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))
)
def test_ids_are_the_same_in_every_form(name, text):
    ids = MADE[name].encode(text)
    assert ids == ORIGINALS.get(name, MADE[name].encode)(text)
    for form in FORMS[name]:
        assert form.encode(text) == ids
        assert form.decode(ids) == text
        assert form.token_bytes()[ids].tolist() == MADE[name].token_bytes()[ids].tolist()


@every_tokenizer
def test_hard_text_comes_back(tokenizer):
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@every_tokenizer
def test_saved_it_is_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert has_tokenizer(tmp_path)
    actual = load_tokenizer(tmp_path)
    assert type(actual) is type(tokenizer)
    assert_same_ids(actual, tokenizer)
    assert (actual.fingerprint(), actual.vocab_size) == (
        tokenizer.fingerprint(),
        tokenizer.vocab_size,
    )


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
    longest, score, length = struct.unpack_from("<ifi", path.read_bytes())
    assert (score, length) == (0.0, 5)
    assert longest == max(
        len(text.replace("\u2581", " ").encode()) for text in MADE["sentencepiece"].texts
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
    path.write_bytes(
        whole[: data.draw(st.integers(0, len(whole) - 1).filter(lambda cut: cut not in ends[259:]))]
    )
    with pytest.raises(JllamaError, match=str(path)):
        load_llama2c_tokenizer(path)


def test_a_tokenizer_bin_that_lies(tmp_path):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(struct.pack("<ifi", 2, 0.0, 3) + b"abc")
    with pytest.raises(
        JllamaError,
        match=r"says at byte 8 that token 0 has 3 bytes, but at byte 0 that none has more",
    ):
        load_tokenizer(path)
    path.write_bytes(struct.pack("<ifi", 5, 0.0, 2**31 - 1))
    with pytest.raises(
        JllamaError, match=r"says at byte 8 that token 0 has 2147483647 bytes, but 0 are left"
    ):
        load_tokenizer(path)


def test_the_way_to_split_text_matters():
    """Each known one gives other ids than the others: none is taken for another."""
    text = "it's 12345 and 3.14\n\n  x catCat's e\u0301 unmerged"
    actual = set()
    for pre in PRE_TOKENIZERS:
        tokens, merges = byte_level_bpe(["catCat's " * 99, *CORPUS], 400, "gpt-2")
        tokens.append("\u0120unmerged")
        vocabulary = Vocabulary(
            tokens, [TokenType.NORMAL] * len(tokens), 0, 0, False, merges=merges, pre=pre
        )
        tokenizer = HuggingFaceTokenizer.from_vocabulary(vocabulary)
        actual.add(tuple(tokenizer.encode(text)))
        assert to_gguf(tokenizer, 400)["tokenizer.ggml.pre"] == pre
    assert len(actual) == len(PRE_TOKENIZERS)
    digits = tokenizers.Tokenizer.from_str(
        as_huggingface(MADE["smollm"]).content.decode()
    ).pre_tokenizer.pre_tokenize_str("a 123")
    assert [part for part, _ in digits] == ["a", "Ġ", "1", "2", "3"]
    triples = tokenizers.Tokenizer.from_str(
        as_huggingface(MADE["tiktoken"]).content.decode()
    ).pre_tokenizer.pre_tokenize_str("a 12345")
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
    text, rounds = "the cat sat " * 50_000, 0
    thread = threading.Thread(target=MADE[name].encode_with_special_tokens, args=[text])
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        rounds += 1
    assert rounds > 5


@pytest.mark.parametrize(
    "run", [" " * 60_000, "a" * 60_000, "ab" * 20_000 + " " * 30_000 + "c" * 450_000]
)
def test_tiktoken_and_very_long_runs(run):
    tokenizer = MADE["tiktoken"]
    assert tokenizer.decode(tokenizer.encode(run)) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace(b" 5\n", b" 6\n"),
            "in line 6; expected a token in base64 and 5",
        ),
        (lambda text: b"!!!! 0\n" + text, "in line 1; expected a token in base64 and 0"),
        (
            lambda text: text + text.splitlines()[7].split()[0] + b" %d\n" % len(text.splitlines()),
            "has a token twice",
        ),
        (lambda text: b"".join(text.splitlines(keepends=True)[:200]), "has no token for the byte"),
    ],
)
def test_ranks_that_are_none(tmp_path, change, message):
    with pytest.raises(JllamaError, match=message):
        TiktokenTokenizer(change(MADE["tiktoken"].content), "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "falcon"}, "'falcon'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre '', which says how text is split"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": 3}, "a wrong type of tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "types of tokens"),
        ({"tokenizer.ggml.token_type": [9] * 410}, "types of tokens other than 1 to 6"),
        (
            {"tokenizer.ggml.tokens": ["a"] * 410, "tokenizer.ggml.token_type": [1] * 410},
            "the token 'a' twice",
        ),
        ({"tokenizer.ggml.tokens": ["\udc80"] * 410}, "not text in UTF-8"),
        ({"tokenizer.ggml.tokens": [7] * 410}, "not text in UTF-8"),
        ({"tokenizer.ggml.eos_token_id": 405}, r"has \d+ tokens, but BOS and EOS are 1 and 405"),
        ({"tokenizer.ggml.merges": [None]}, "which are not tokens"),
        ({"tokenizer.ggml.bos_token_id": 10_000}, "BOS and EOS are 10000"),
        ({"tokenizer.ggml.bos_token_id": True}, "a wrong type of tokenizer.ggml.bos_token_id"),
        ({"tokenizer.ggml.eos_token_id": False}, "a wrong type of tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.merges": ["a"]}, "which are not tokens"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "which are not tokens"),
    ],
)
def test_metadata_that_describe_no_tokenizer(change, message):
    metadata = to_gguf(MADE["smollm"], 410) | change
    with pytest.raises(JllamaError, match=message):
        from_gguf({key: value for key, value in metadata.items() if value is not None}, "it")


def test_gguf_refuses_what_it_has_no_name_for():
    whole = json.loads(as_huggingface(MADE["smollm"]).content)
    whole["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    with pytest.raises(JllamaError, match="no name for how this tokenizer splits text"):
        to_gguf(HuggingFaceTokenizer(json.dumps(whole), 1, 2), 410)
    model = json.loads(as_huggingface(MADE["smollm"]).content)["model"] | {"ignore_merges": True}
    with pytest.raises(JllamaError, match="ignore_merges"):
        to_gguf(huggingface(MADE["smollm"], model=model), 700)
    whole = json.loads(as_huggingface(MADE["smollm"]).content) | {"normalizer": {"type": "NFC"}}
    with pytest.raises(JllamaError, match="NFC"):
        to_gguf(HuggingFaceTokenizer(json.dumps(whole), 1, 2), 410)


def test_a_json_with_more_tokens_than_the_model_beside_it_wins(tmp_path):
    tokenizer = MADE["sentencepiece"]
    save_huggingface(tokenizer, tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    token = {
        "id": 400,
        "content": "<pad>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    whole["added_tokens"].append(token | {"normalized": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    actual = load_tokenizer(tmp_path)
    assert isinstance(actual, HuggingFaceTokenizer)
    assert actual.vocab_size == 401


def test_bos_and_eos_from_the_files_beside(tmp_path):
    MADE["smollm"].save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
    with pytest.raises(JllamaError, match="say which token is EOS"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert (load_tokenizer(tmp_path).bos_id, load_tokenizer(tmp_path).eos_id) == (1, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_tokenizer(tmp_path).eos_id == 2
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "no"}')
    with pytest.raises(JllamaError, match=r"tokenizer_config\.json has add_bos_token 'no'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(JllamaError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
    for content in ("[]", "3", "{}"):
        (tmp_path / "tokenizer_config.json").write_text(
            f'{{"bos_token": {{"content": {content}}}}}'
        )
        with pytest.raises(
            JllamaError, match=r"tokenizer_config\.json has bos_token .*; it must be a text"
        ):
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
    MADE["smollm"].save(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["model"]["vocab"][next(iter(whole["model"]["vocab"]))] = 2**32 - 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(
        JllamaError, match="has the token id 4294967294, which no Llama has: it is damaged"
    ):
        load_tokenizer(tmp_path)


def test_a_json_whose_pattern_never_ends(tmp_path):
    """The library panics, which is no Exception."""
    MADE["smollm"].save(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(JllamaError, match="cannot split a text of 41 characters"):
        load_tokenizer(tmp_path).encode("a" * 40 + "b")


def test_a_json_that_makes_the_library_panic(tmp_path, capfd):
    """Which is no Exception, and which Rust prints before it is raised."""
    HuggingFaceTokenizer.from_vocabulary(BytesTokenizer().vocabulary()).save(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(
        JllamaError, match=r"tokenizer\.json is not a tokenizer\.json: no entry found for key"
    ):
        load_tokenizer(tmp_path)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_a_json_that_makes_the_library_panic_when_it_decodes():
    """None is known; the rule is that of encoding."""

    class PanicException(BaseException):
        pass

    def panic(ids, skip_special_tokens):
        raise PanicException("range end index 9 out of range")

    tokenizer = HuggingFaceTokenizer.from_vocabulary(BytesTokenizer().vocabulary())
    tokenizer._library = types.SimpleNamespace(decode=panic)
    with pytest.raises(
        JllamaError, match="cannot turn 2 tokens into text: range end index 9 out of range"
    ):
        tokenizer.decode([7, 8])


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_boolean_is_no_token(name, tmp_path):
    MADE["smollm"].save(tmp_path)
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del fields[f"{name}_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text(json.dumps({f"{name}_token_id": True}))
        with pytest.raises(
            JllamaError, match=f"has {name}_token_id True; it must be the id of a token"
        ):
            load_tokenizer(tmp_path)


def test_characters_that_a_vocabulary_lacks_are_dropped():
    """As SmolLM2's lacks six control characters; every other character comes back."""
    made = as_huggingface(MADE["smollm"])
    whole = json.loads(made.content)
    lost = [chr(byte) for byte in (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)]
    vocab = [
        token
        for token in whole["model"]["vocab"]
        if token not in [BYTE_CHARS[ord(char)] for char in lost]
    ]
    whole["model"]["vocab"] = {token: id for id, token in enumerate(vocab)}
    whole["added_tokens"] = [
        token | {"id": vocab.index(token["content"])} for token in whole["added_tokens"]
    ]
    ids = [vocab.index(made.texts[id]) for id in (made.bos_id, made.eos_id)]
    tokenizer = HuggingFaceTokenizer(json.dumps(whole), *ids)
    text = "".join(map(chr, range(0x2000)))
    expected = "".join(char for char in text if char not in lost)
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert made.decode(made.encode(text)) == text


def huggingface(tokenizer, add_bos=None, **changes):
    """The tokenizer's json with other values at its top."""
    whole = json.loads(as_huggingface(tokenizer).content) | changes
    return HuggingFaceTokenizer(json.dumps(whole), tokenizer.bos_id, tokenizer.eos_id, add_bos)


def test_a_jsons_truncation_and_padding_are_not_for_us():
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    assert_same_ids(
        huggingface(MADE["smollm"], truncation=truncation, padding=padding), MADE["smollm"]
    )


@pytest.mark.parametrize("name", ["sentencepiece", "smollm"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_whether_bos_is_added_goes_with_the_tokenizer(name, add_bos, tmp_path):
    tokenizer = huggingface(MADE[name], add_bos)
    tokenizer.save(tmp_path / "hf")
    save_meta(tokenizer, tmp_path / "meta")
    metadata = to_gguf(tokenizer, tokenizer.vocab_size)
    actual = [
        load_tokenizer(tmp_path / "hf"),
        load_tokenizer(tmp_path / "meta"),
        from_gguf(metadata, "it"),
    ]
    assert [(other.add_bos, other.bos_id, other.eos_id) for other in actual] == [
        (add_bos, 1, 2)
    ] * 3
    assert actual[0].fingerprint() == tokenizer.fingerprint()
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
    "change", [{"add_bos_token": False}, {"eos_token": "e"}, {"bos_token": "</s>"}]
)
def test_a_json_that_begins_or_ends_text_otherwise_than_the_model_beside_it_wins(change, tmp_path):
    save_huggingface(MADE["sentencepiece"], tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)


def trained_model(**options):
    model, lines = io.BytesIO(), iter(" ".join(CORPUS).splitlines())
    options = {
        "model_type": "bpe",
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    } | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=320, **options
    )
    return model.getvalue()


NO_PREFIX = SentencePieceTokenizer(
    trained_model(
        add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity"
    )
)
NO_PREFIX_ORIGINAL = sentencepiece.SentencePieceProcessor(model_proto=NO_PREFIX.content)
NO_PREFIX_FORMS = [NO_PREFIX, *every_form(NO_PREFIX)]


def test_a_model_that_changes_text_is_read_but_not_converted(tmp_path):
    """OpenLLaMA's first is of this kind."""
    model = trained_model(remove_extra_whitespaces=True)
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.encode(" a  b\n") == sentencepiece.SentencePieceProcessor(
        model_proto=model
    ).encode(" a  b\n")
    assert tokenizer.encode("\n") == []
    save_huggingface(MADE["sentencepiece"], tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)
    for convert in (as_huggingface, lambda tokenizer: to_gguf(tokenizer, 400)):
        with pytest.raises(JllamaError, match="normalizes text"):
            convert(tokenizer)
    with pytest.raises(JllamaError, match="BPE with byte fallback"):
        as_huggingface(SentencePieceTokenizer(trained_model(model_type="unigram")))


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
    made = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal],
        "scores": [0.0] * 259 + [-float(number) for number in range(len(normal))],
        "token_type": [
            2,
            TokenType.CONTROL,
            TokenType.CONTROL,
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * len(normal),
        ],
    }
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in made.items()}, "it")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.0]}, "400 tokens but 1 scores"),
        ({"scores": ["a"] * 400}, "scores"),
        ({"unknown_token_id": 400}, "lacks an unknown token"),
        ({"unknown_token_id": 5}, "lacks an unknown token"),
        ({"token_type": [2, 3, 3] + [TokenType.NORMAL] * 397}, "256 byte tokens"),
        ({"add_space_prefix": 1}, "a wrong type of tokenizer.ggml.add_space_prefix"),
    ],
)
def test_metadata_that_describe_no_sentencepiece_model(change, message):
    metadata = to_gguf(MADE["sentencepiece"], 400)
    with pytest.raises(JllamaError, match=message):
        from_gguf(
            metadata | {f"tokenizer.ggml.{key}": value for key, value in change.items()}, "it"
        )


def test_gguf_as_llama_cpp_writes_it():
    metadata = to_gguf(MADE["sentencepiece"], 402)
    types = metadata["tokenizer.ggml.token_type"]
    assert (metadata["tokenizer.ggml.model"], types[:3], types[3:259]) == (
        "llama",
        [2, TokenType.CONTROL, TokenType.CONTROL],
        [TokenType.BYTE] * 256,
    )
    assert metadata["tokenizer.ggml.tokens"][400:] == ["[PAD400]", "[PAD401]"]
    assert types[400:] == [5, 5]
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]) == (
        1,
        2,
    )
    assert metadata["tokenizer.ggml.scores"][259:400] == [-float(rank) for rank in range(141)]
    metadata = to_gguf(MADE["tiktoken"], MADE["tiktoken"].vocab_size)
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == (
        "gpt2",
        "llama-bpe",
    )
    assert (
        metadata["tokenizer.ggml.token_type"]
        == [TokenType.NORMAL] * len(MADE["tiktoken"].tokens) + [TokenType.CONTROL] * 256
    )
    assert all(merge.count(" ") == 1 for merge in metadata["tokenizer.ggml.merges"])
    for alias, name in {
        **dict.fromkeys(("llama3", "llama-v3", "smaug-bpe"), "tiktoken"),
        **dict.fromkeys(("refact", "starcoder"), "smollm"),
        "default": "gpt-2",
    }.items():
        metadata = to_gguf(MADE[name], 700) | {"tokenizer.ggml.pre": alias}
        assert_same_ids(from_gguf(metadata, "it"), MADE[name])


def test_what_llama_cpps_files_leave_out():
    """Prompts of Llama 3 and of Mistral's Tekken begin with BOS, SmolLM3's do not."""
    metadata = to_gguf(MADE["tiktoken"], 700)
    del metadata["tokenizer.ggml.add_bos_token"]
    for pre, add_bos in {
        "llama-bpe": True,
        "tekken": True,
        "smaug-bpe": False,
        "dbrx": False,
    }.items():
        assert from_gguf(metadata | {"tokenizer.ggml.pre": pre}, "it").add_bos is add_bos
    metadata = to_gguf(MADE["smollm"], 410)
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
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Metaspace", "replacement": "\u2581", "split": False}
    for scheme, kind in {"first": HuggingFaceTokenizer, "always": SentencePieceTokenizer}.items():
        whole |= {"normalizer": None, "pre_tokenizer": split | {"prepend_scheme": scheme}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
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
        tokens=[*vocabulary.tokens, "[INST]", "[TOOL_CALLS]"],
        token_type=[*vocabulary.token_type, TokenType.CONTROL, TokenType.CONTROL],
        scores=[*vocabulary.scores, 0.0, 0.0],
    )
    tokenizer = kind.from_vocabulary(vocabulary)
    ids = [1, 400, *tokenizer.encode("a"), 401, *tokenizer.encode("[{}]"), 401, 2]
    assert tokenizer.decode(ids).replace(" ", "") == "a[TOOL_CALLS][{}][TOOL_CALLS]"
    assert tokenizer.token_bytes()[[1, 400, 401]].tolist() == [0, 0, 12]
    assert not {400, 401} & set(tokenizer.encode("[INST][TOOL_CALLS]"))
    for count in range(len(ids)):
        assert tokenizer.decode(ids).startswith(tokenizer.decode(ids[:count]))


def test_gpt2s_own_json_does_not_say_that_it_splits():
    pre = dict(PRE_TOKENIZERS["gpt-2"])
    del pre["use_regex"]
    assert (
        to_gguf(huggingface(MADE["gpt-2"], pre_tokenizer=pre), 403)["tokenizer.ggml.pre"] == "gpt-2"
    )


def test_a_json_may_leave_out_what_is_default():
    """GPT-2's own does."""
    whole = json.loads(as_huggingface(MADE["gpt-2"]).content)
    for name in ("normalizer", "truncation", "padding", "post_processor"):
        del whole[name]
    for name in ("type", "dropout", "byte_fallback", "ignore_merges"):
        del whole["model"][name]
    tokenizer = HuggingFaceTokenizer(json.dumps(whole), 1, 2)
    assert_same_ids(tokenizer, MADE["gpt-2"])
    assert_same_ids(from_gguf(to_gguf(tokenizer, tokenizer.vocab_size), "it"), MADE["gpt-2"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>'"),
        ({"type": "WordLevel", "unk_token": "a"}, "is a WordLevel tokenizer"),
    ],
)
def test_a_json_of_another_kind(model, message):
    whole = json.loads(as_huggingface(MADE["gpt-2"]).content)
    whole["model"] |= model
    if "type" in model:
        del whole["model"]["merges"]
    with pytest.raises(JllamaError, match=message):
        HuggingFaceTokenizer(json.dumps(whole), 1, 2)


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
    rename = {
        "<|step_id|>": "<|reserved_special_token_2|>",
        "<|image|>": "<|reserved_special_token_3|>",
    }
    rename |= {
        f"<|reserved_special_token_{n}|>": f"<|reserved_special_token_{n + 2}|>"
        for n in range(2, 246)
    }
    model = json.loads(as_huggingface(MADE["tiktoken"]).content)["model"]
    save_meta(llama3_json(rename), tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == MADE["tiktoken"].content
    for number, tokenizer in enumerate(
        (
            llama3_json({"<|eom_id|>": "<|im_start|>"}),
            llama3_json({}, "<|python_tag|>"),
            huggingface(MADE["tiktoken"], normalizer={"type": "NFC"}),
            huggingface(MADE["tiktoken"], add_bos=False),
            huggingface(MADE["tiktoken"], model=model | {"merges": model["merges"][:-1]}),
        )
    ):
        save_meta(tokenizer, tmp_path / str(number))
        assert not (tmp_path / str(number) / "tokenizer.model").exists()
        assert load_tokenizer(tmp_path / str(number)).eos_id == tokenizer.eos_id


def test_a_json_of_llama2s_kind_that_sentencepiece_would_read_otherwise(tmp_path):
    whole = json.loads(as_huggingface(MADE["sentencepiece"]).content)
    change = {"model": whole["model"] | {"merges": whole["model"]["merges"][1:]}}
    with pytest.raises(JllamaError, match="does not join"):
        save_llama2c_tokenizer(
            huggingface(MADE["sentencepiece"], **change), tmp_path / "tokenizer.bin"
        )
    vocab = {
        token.replace("<0x0A>", "<newline>"): id for token, id in whole["model"]["vocab"].items()
    }
    with pytest.raises(JllamaError, match="lacks 1 of the 256 byte tokens"):
        to_gguf(huggingface(MADE["sentencepiece"], model=whole["model"] | {"vocab": vocab}), 400)
    with pytest.raises(JllamaError, match="NFC"):
        to_gguf(huggingface(MADE["sentencepiece"], normalizer={"type": "NFC"}), 400)


def test_a_json_of_llama2s_kind_as_transformers_5_writes_it():
    """Metaspace: all ids as SentencePiece's but for text that begins with a space."""
    metaspace = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    tokenizer = huggingface(MADE["sentencepiece"], normalizer=None, pre_tokenizer=metaspace)
    converted = from_gguf(to_gguf(tokenizer, 400), "it")
    assert_same_ids(converted, MADE["sentencepiece"])
    for text in TEXTS:
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


def test_special_tokens_in_text_stay_text():
    for tokenizer in MADE.values():
        specials = {tokenizer.bos_id, tokenizer.eos_id}
        for text in (
            "<s></s>",
            "<|begin_of_text|><|eot_id|>",
            "<|im_start|>x<|im_end|>",
            "<|endoftext|>",
            "<unk>",
        ):
            assert not specials & set(tokenizer.encode(text))
            assert tokenizer.token_bytes()[tokenizer.encode(text)].all()
        assert tokenizer.token_bytes()[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]


def test_an_added_token_that_is_not_special_is_text_that_stays_whole():
    token = {
        "id": MADE["smollm"].vocab_size,
        "content": "<tool>",
        "special": False,
        "normalized": False,
    }
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    added = json.loads(as_huggingface(MADE["smollm"]).content)["added_tokens"] + [token]
    tokenizer = huggingface(MADE["smollm"], added_tokens=added)
    for form in (tokenizer, from_gguf(to_gguf(tokenizer, 410), "it")):
        ids = form.encode("a <tool>\n")
        assert ids == [*form.encode("a "), token["id"], *form.encode("\n")]
        assert form.decode(ids) == "a <tool>\n"
        assert form.token_bytes()[token["id"]] == len("<tool>")


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken", "smollm", "gpt-2"])
def test_gguf_that_does_not_say_whether_bos_is_added(name):
    """llama.cpp adds it for Llama's own kinds."""
    metadata = to_gguf(MADE[name], MADE[name].vocab_size)
    del metadata["tokenizer.ggml.add_bos_token"]
    assert_same_ids(from_gguf(metadata, "it"), MADE[name])
