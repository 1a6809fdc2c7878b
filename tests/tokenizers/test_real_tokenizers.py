"""The tokenizers of Llama 3, Mistral, SmolLM2, Qwen, Phi-4 and OLMo 2 in every possible format.

Marked ``real_weights``; ``python tests/fetch_real_weights.py`` fetches them.
"""

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
from helpers_real import ranks_of, real_cl100k, real_file, real_o200k, real_qwen, real_tekken

from jllama.data import corpus
from jllama.formats.gguf_file import read_gguf_file
from jllama.templates.messages import TEMPLATES, find_template, template_variables
from jllama.templates.template import render
from jllama.tokenizers.gguf import from_gguf, to_gguf
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.llama2c import save_llama2c_tokenizer
from jllama.tokenizers.loading import load_tokenizer, save_huggingface, save_meta
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.tiktoken import PATTERN, TiktokenTokenizer

pytestmark = pytest.mark.real_weights


def real_smollm2():
    metadata, _ = read_gguf_file(real_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return from_gguf(metadata, "SmolLM2")


MAKE = {
    "llama3": lambda: load_tokenizer(real_file("llama3_tokenizer.model")),
    "mistral": lambda: load_tokenizer(real_file("mistral_tokenizer.model")),
    "smollm2": real_smollm2,
    "qwen": real_qwen,
    "tekken": real_tekken,
}


@functools.cache
def real(name):
    return MAKE[name]()


def assert_same_ids(actual, expected):
    for text in HARD:
        assert actual.encode(text) == expected.encode(text), text
        assert actual.decode(actual.encode(text)) == text
    for name in ("bos_id", "eos_id", "add_bos"):
        assert getattr(actual, name) == getattr(expected, name)


def assert_transformers_agrees(tokenizer, folder):
    save_huggingface(tokenizer, folder)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in HARD:
        ids = peer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text)


def test_llama3(tmp_path):
    llama3 = real("llama3")
    assert isinstance(llama3, TiktokenTokenizer)
    assert (llama3.vocab_size, llama3.bos_id, llama3.eos_id) == (128_256, 128_000, 128_001)
    assert llama3.encode("Hello world!") == [9906, 1917, 0]
    ranks = {token: rank for rank, token in enumerate(llama3.tokens)}
    original = tiktoken.Encoding("it", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in HARD:
        assert llama3.encode(text) == original.encode_ordinary(text)
    assert_transformers_agrees(llama3, tmp_path / "hf")
    whole = load_tokenizer(tmp_path / "hf")
    assert_same_ids(whole, llama3)
    assert isinstance(whole, HuggingFaceTokenizer)
    assert len(whole.json["model"]["merges"]) == 280_147  # as in the json that Meta published
    save_meta(whole, tmp_path / "meta")
    original_file = real_file("llama3_tokenizer.model").read_bytes()
    assert (tmp_path / "meta" / "tokenizer.model").read_bytes() == original_file
    assert_same_ids(from_gguf(to_gguf(llama3, 128_256), "it"), llama3)


def test_mistral(tmp_path):
    mistral = real("mistral")
    assert isinstance(mistral, SentencePieceTokenizer)
    assert mistral.vocab_size == 32_000
    original = sentencepiece.SentencePieceProcessor(
        model_file=str(real_file("mistral_tokenizer.model"))
    )
    for text in HARD:
        assert mistral.encode(text) == original.encode(text)
    assert_transformers_agrees(mistral, tmp_path / "hf")
    assert_same_ids(load_tokenizer(tmp_path / "hf"), mistral)
    assert_same_ids(from_gguf(to_gguf(mistral, 32_064), "it"), mistral)
    save_llama2c_tokenizer(mistral, tmp_path / "tokenizer.bin")
    assert_same_ids(load_tokenizer(tmp_path / "tokenizer.bin"), mistral)
    (tmp_path / "hf" / "tokenizer.model").unlink()
    whole = load_tokenizer(tmp_path / "hf")
    assert isinstance(whole, HuggingFaceTokenizer)
    save_meta(whole, tmp_path / "meta")
    assert_same_ids(load_tokenizer(tmp_path / "meta"), mistral)


def test_smollm2(tmp_path):
    smollm2 = real("smollm2")
    assert isinstance(smollm2, HuggingFaceTokenizer)
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49_152, 1, 2)
    assert not smollm2.add_bos
    assert_transformers_agrees(smollm2, tmp_path / "hf")
    assert_same_ids(load_tokenizer(tmp_path / "hf"), smollm2)
    assert_same_ids(from_gguf(to_gguf(smollm2, 49_152), "it"), smollm2)
    save_meta(smollm2, tmp_path / "meta")
    assert_same_ids(load_tokenizer(tmp_path / "meta"), smollm2)
    plane = [chr(code) for code in range(0x40000) if not 0xD800 <= code < 0xE000]
    lost = [ord(char) for char in plane if smollm2.decode(smollm2.encode(char)) != char]
    assert lost == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]


CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
"""How tiktoken splits text for the ranks of Phi-4 and OLMo 2."""


def assert_same_as_tiktoken(tokenizer, original, first_id=0, form=None):
    for text in HARD:
        expected = unicodedata.normalize(form, text) if form else text
        ids = [first_id + id for id in original.encode_ordinary(expected)]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == expected


def original_of(name, pattern):
    ranks = {token: rank for rank, token in enumerate(ranks_of(name))}
    return tiktoken.Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def assert_gguf_agrees(tokenizer, vocab_size, pre):
    fields = to_gguf(tokenizer, vocab_size)
    assert fields["tokenizer.ggml.pre"] == pre
    actual = from_gguf(fields, "it")
    assert [actual.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]


def test_qwen(tmp_path):
    """Its text is brought to Unicode's form C, and each digit is a token."""
    qwen = real("qwen")
    original = original_of("qwen.tiktoken", PATTERN.replace("{1,3}", ""))
    assert_same_as_tiktoken(qwen, original, form="NFC")
    assert qwen.encode("Hello, world! 12") == [9707, 11, 1879, 0, 220, 16, 17]
    assert qwen.encode_with_special_tokens("<|im_end|>") == [151_645]
    assert_gguf_agrees(qwen, 151_936, "qwen2")
    assert_transformers_agrees(qwen, tmp_path)


@pytest.mark.parametrize(
    ("make", "name", "pattern", "pre"),
    [
        (real_cl100k, "cl100k_base.tiktoken", CL100K, "dbrx"),
        (real_o200k, "o200k_base.tiktoken", None, "gpt-4o"),
    ],
)
def test_the_ranks_of_phi_4_and_olmo_2(make, name, pattern, pre, tmp_path):
    tokenizer = make()
    content = tokenizer.json
    split = content["pre_tokenizer"]["pretokenizers"][0]
    assert_same_as_tiktoken(tokenizer, original_of(name, pattern or split["pattern"]["Regex"]))
    assert_gguf_agrees(tokenizer, tokenizer.vocab_size + 60, pre)
    split |= {"behavior": "Removed", "invert": True}  # as in the published files
    ends = tokenizer.bos_id, tokenizer.eos_id
    published = HuggingFaceTokenizer(json.dumps(content), *ends)
    assert [*map(published.encode, HARD)] == [*map(tokenizer.encode, HARD)]
    assert published.vocabulary() == tokenizer.vocabulary()


def test_tekken(tmp_path):
    tekken = real("tekken")
    content = json.loads(real_file("tekken.json").read_bytes())
    ranks = {bytes_: rank for rank, bytes_ in enumerate(tekken.pieces[1000:])}
    pattern = content["config"]["pattern"]
    original = tiktoken.Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert_same_as_tiktoken(tekken, original, first_id=1000)
    assert (tekken.vocab_size, tekken.add_bos) == (131_072, True)
    assert_gguf_agrees(tekken, 131_072, "tekken")
    assert_transformers_agrees(tekken, tmp_path)
    assert_same_ids(load_tokenizer(tmp_path), tekken)
    assert tekken.decode([1, tekken.special_tokens["[TOOL_CALLS]"], 4]) == "[TOOL_CALLS]"


MISTRAL_IDS = {
    "v3": [1, 3, 23325, 29493, 1043, 2792, 1185, 4, 24873, 29491, 2, 3, 1183, 8854, 29572, 4],
    "tekken": [1, 3, 22177, 1044, 1285, 3238, 1543, 4, 94506, 1046, 2, 3, 1784, 17253, 1063, 4],
}
"""What mistral-common 1.13.1 makes of the conversation below."""
CONVERSATION = [("user", "Hello, wörld"), ("assistant", "Fine."), ("user", "The weather?")]


def chat_ids(tokenizer, template, messages, tools=None):
    variables = template_variables(tokenizer, messages, True, tools)
    return tokenizer.encode_with_special_tokens(render(template, **variables))


@pytest.mark.parametrize("name", ["v3", "tekken"])
def test_mistrals_conversations_are_mistral_commons(name, tmp_path):
    """The published json of the third version puts no space behind a special token."""
    stock = Path(__file__).parent.parent / "templates/stock"
    messages = [{"role": role, "content": content} for role, content in CONVERSATION]
    tokenizer = real("tekken")
    template = (stock / "mistral_nemo.jinja").read_text()
    if name == "v3":
        template = (stock / "mistral_v0.3.jinja").read_text()
        model = load_tokenizer(real_file("mistral_v3_tokenizer.model"))
        assert (model.special_tokens["[INST]"], model.special_tokens["[TOOL_CALLS]"]) == (3, 5)
        assert find_template(model, None) == TEMPLATES["mistral"]
        assert chat_ids(model, TEMPLATES["mistral"], messages) == MISTRAL_IDS[name]
        save_huggingface(model, tmp_path)
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        split = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
        content |= {"normalizer": None, "pre_tokenizer": split | {"split": False}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = load_tokenizer(tmp_path)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert find_template(tokenizer, None) == TEMPLATES["mistral"]
    assert chat_ids(tokenizer, find_template(tokenizer, template), messages) == MISTRAL_IDS[name]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n", " "])
def test_a_corpus_in_chunks_has_the_ids_of_the_whole_text(name, end, monkeypatch):
    tokenizer = real(name)
    monkeypatch.setattr(corpus, "CHUNK", 500)
    text = Path(inspect.__file__).read_text("utf-8").replace("\n", end) + end.join(HARD)
    parts = (text[start : start + 500] for start in range(0, len(text), 500))
    first, *rest = corpus.cut_chunks(parts)
    assert len(rest) > 100
    others = [id for chunk in rest for id in corpus.encode_rest(tokenizer, chunk)]
    assert tokenizer.encode(first) + others == tokenizer.encode(text)
