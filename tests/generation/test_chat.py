"""Conversations as token ids: what transformers gives, what Meta's reference code gives, and hostile templates."""

import json
import tracemalloc

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from jllama.checkpoints.formats import Model
from jllama.config import LlamaConfig
from jllama.errors import JllamaError, UsageError
from jllama.generation import template as limits
from jllama.generation.chat import TEMPLATES, chat_ids, chat_stop_ids, chat_template
from jllama.generation.template import render
from jllama.tokenizers import BytesTokenizer, HuggingFaceTokenizer, TiktokenTokenizer, train_sentencepiece
from jllama.tokenizers.byte_level import BYTE_CHARS, CHAR_BYTES, byte_level_json
from jllama.tokenizers.convert import as_huggingface, save_huggingface
from jllama.tokenizers.tiktoken import write_ranks

CORPUS = [
    "the system says hello to the user and the assistant, don't they? 12 345\n\n  user\n héllo 世界 [INST] <<SYS>>\n"
    * 20
]
CONFIG = LlamaConfig(vocab_size=300, num_layers=1, embed_dim=32)


def trained_byte_level():
    """Vocabulary and merges of a small byte-level BPE."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=350, initial_alphabet=BYTE_CHARS, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def chatml_tokenizer():
    vocab, merges = trained_byte_level()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    whole = {token: id for id, token in enumerate(specials)} | {token: id + 3 for token, id in vocab.items()}
    added = [(id, token, True) for id, token in enumerate(specials)]
    return HuggingFaceTokenizer(byte_level_json(whole, merges, added, "smollm", None), 1, 2)


def llama3_tokenizer():
    _, merges = trained_byte_level()
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(CHAR_BYTES[char] for char in "".join(merge)) for merge in merges]
    return TiktokenTokenizer(write_ranks(tokens))


LLAMA_2, LLAMA_3, CHATML = train_sentencepiece(CORPUS, 340), llama3_tokenizer(), chatml_tokenizer()
TOKENIZERS = {"llama2": LLAMA_2, "llama3": LLAMA_3, "chatml": CHATML}


def model_with(tokenizer, template=None, stop_ids=()):
    return Model(CONFIG, {}, tokenizer, template, stop_ids)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """Each tokenizer as transformers has it."""
    found = {}
    for name, tokenizer in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(name)
        save_huggingface(tokenizer, folder)
        found[name] = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return found


WORDS = ["the user", "é", "世界", "👩‍👩‍👧", "12", "[INST]", "{{ x }}", "don't", " ", "  ", "\n", "\n\n", "\t", "\0"]
SPECIALS = ["</s>", "<s>", "<unk>", "<|im_end|>", "<|eot_id|>", "<|im_", "|>"]
texts = st.lists(
    st.sampled_from(WORDS + SPECIALS)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=5),
    max_size=6,
).map("".join)


@st.composite
def conversations(draw):
    system = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    turns = [{"role": ("user", "assistant")[i % 2], "content": draw(texts)} for i in range(draw(st.integers(1, 5)))]
    return system + turns


LONG = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": " Hello  👩‍👩‍👧\n\n"},
    {"role": "assistant", "content": "\nHi \n"},
    {"role": "user", "content": "the user says </s> <|eot_id|><|im_end|>  "},
]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(messages=conversations(), prompt=st.booleans())
@example(messages=LONG, prompt=True)
@example(messages=[{"role": "user", "content": ""}], prompt=True)
def test_ids_are_those_of_transformers(peers, name, messages, prompt):
    model, template = model_with(TOKENIZERS[name]), TEMPLATES[name]
    expected = peers[name].apply_chat_template(
        messages, chat_template=template, add_generation_prompt=prompt, return_dict=False
    )
    assert chat_template(model) == template
    assert chat_ids(model, messages, add_generation_prompt=prompt) == expected
    converted = model_with(as_huggingface(TOKENIZERS[name]))
    assert chat_template(converted) == template
    assert chat_ids(converted, messages, add_generation_prompt=prompt) == expected


plain = texts.filter(lambda text: "<" not in text)


@given(st.lists(plain, min_size=1, max_size=5), plain)
def test_llama_2_is_metas_dialogue(contents, system):
    """Each question and its answer is a text of its own, between BOS and EOS. Source: Meta's ``generation.py``."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=LLAMA_2.model)
    roles = [("user", "assistant")[place % 2] for place in range(len(contents))][
        : len(contents) - (len(contents) + 1) % 2
    ]
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    told = [f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}", *contents[1:]]
    expected = []
    for place in range(0, len(turns), 2):
        text = f"[INST] {told[place].strip()} [/INST]"
        if place + 1 < len(turns):
            expected += [1, *processor.encode(f"{text} {told[place + 1].strip()} "), 2]
        else:
            expected += [1, *processor.encode(text)]
    ids = chat_ids(model_with(LLAMA_2), [{"role": "system", "content": system}, *turns])
    assert ids == expected
    assert ids.count(1) == (len(turns) + 1) // 2


def test_llama_2_is_transformers_legacy(tmp_path):
    save_huggingface(LLAMA_2, tmp_path)
    peer = transformers.LlamaTokenizer.from_pretrained(tmp_path, legacy=True)
    messages = [*LONG[:3], {"role": "user", "content": "\tthe  user é 👩‍👩‍👧"}]
    expected = peer.apply_chat_template(
        messages, chat_template=TEMPLATES["llama2"], add_generation_prompt=True, return_dict=False
    )
    assert chat_ids(model_with(LLAMA_2), messages) == expected


@given(
    conversations().map(lambda said: [message | {"content": message["content"].replace("<", "")} for message in said])
)
def test_llama_3_is_metas_dialogue(messages):
    """Header, content and end of each message. Source: Meta's ``ChatFormat``."""
    special, encode = LLAMA_3.special_tokens, LLAMA_3.encode

    def header(role):
        return [special["<|start_header_id|>"], *encode(role), special["<|end_header_id|>"]]

    expected = [LLAMA_3.bos_id]
    for message in messages:
        expected += [*header(message["role"]), *encode("\n\n" + message["content"].strip()), special["<|eot_id|>"]]
    ids = chat_ids(model_with(LLAMA_3), messages)
    assert ids == [*expected, *header("assistant"), *encode("\n\n")]
    assert ids.count(LLAMA_3.bos_id) == 1


def test_chatml_with_and_without_bos():
    messages = [{"role": "system", "content": " a"}, {"role": "user", "content": "b\n"}]
    text = "<|im_start|>system\n a<|im_end|>\n<|im_start|>user\nb\n<|im_end|>\n<|im_start|>assistant\n"
    assert chat_ids(model_with(CHATML), messages) == CHATML.encode_with_special_tokens(text)
    with_bos = chat_ids(model_with(BytesTokenizer()), messages, TEMPLATES["chatml"])
    assert with_bos == [1, *BytesTokenizer().encode(text)]


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), BytesTokenizer()], ids=[*TOKENIZERS, "bytes"])
@given(parts=st.lists(texts, max_size=4))
def test_special_tokens_in_a_text(tokenizer, parts):
    """Between any two, what ``encode`` gives; none of them, all of what it gives."""
    special = {text: id for text, id in tokenizer.special_tokens.items() if id in (tokenizer.bos_id, tokenizer.eos_id)}
    assert len(special) == 2
    without = [part for part in parts if not any(text in part for text in tokenizer.special_tokens)]
    (bos, eos), ids = special, []
    for place, part in enumerate(without):
        ids += [*tokenizer.encode(part), special[eos if place % 2 else bos]]
    text = "".join(part + (eos if place % 2 else bos) for place, part in enumerate(without))
    assert tokenizer.encode_with_special_tokens(text) == ids
    assert tokenizer.encode(text) != ids or not ids  # to encode they are text


def test_a_long_text_with_special_tokens():
    """Longer than tiktoken takes at once: no special token is cut."""
    text = ("a" * 24_990 + "<|eot_id|>") * 5
    assert LLAMA_3.encode_with_special_tokens(text) == as_huggingface(LLAMA_3).encode_with_special_tokens(text)
    assert LLAMA_3.encode_with_special_tokens(text).count(LLAMA_3.special_tokens["<|eot_id|>"]) == 5


FEATURES = """\
{%- set ns = namespace(seen=0, last='') -%}
{%- macro show(message, sign='>') -%}{{ sign ~ message.content | trim | upper ~ 1 ~ none }}{%- endmacro -%}
{{- bos_token }}{% if tools is none %} no tools{% endif %}
{% for message in messages[::-1] recursive %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- show(message) }}{{ loop.length }}{{ loop.last }}{{ loop.nextitem is defined }}
    {%- generation %}
        {{- message['content'].split(' ')[-1].strip() + eos_token }}{% set ns.last = message.role %}
    {%- endgeneration %}
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}
{{ messages | tojson(indent=2) }}
{{ {'a': (1, 2.5, true), "é<": none} | tojson }} {{ ns.seen * 2 ** 3 % 7 }} {{ ns.last }}
{% for name, value in messages[0].items() %}{{ name }}={{ value | replace('e', '<e>') | indent(2) }}; {% endfor %}
{{ '%s and %5.1f' % ('x', 2) }} {{ ['b', 'a'] | sort | join('-') }} {{ strftime_now('%Y') }} {{ 'a' in ['a', 'b'] }}
  {% if messages %}
    {# a line of its own #}
  {% endif %}
{% set text %}  kept {{ messages | length }}{% endset %}{{ text }}{{ undefined_thing }}{{ (1, [2], {3: 4}) }}
{%- if add_generation_prompt %}{{ '<|im_start|>' -}}{% endif %}
"""


@given(conversations(), st.booleans())
def test_what_a_template_may_use(messages, prompt):
    variables = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template([messages], chat_template=FEATURES, **variables)
    assert render(FEATURES, messages=messages, tools=None, documents=None, **variables) == expected


def test_the_checkpoints_own_template_comes_first(tmp_path):
    own = "{{ messages[0].content }}"
    model = model_with(LLAMA_2, own)
    assert chat_template(model) == own
    assert chat_ids(model, [{"role": "user", "content": "the user"}]) == LLAMA_2.encode("the user")
    assert chat_template(model, "llama2") == TEMPLATES["llama2"]
    (tmp_path / "mine.jinja").write_text("mine é", encoding="utf-8")
    assert chat_template(model, str(tmp_path / "mine.jinja")) == "mine é"


def test_what_ends_an_answer():
    assert chat_stop_ids(model_with(LLAMA_2, stop_ids=(2,))) == (2,)
    assert chat_stop_ids(model_with(CHATML, stop_ids=(0,))) == (0, 2)
    assert chat_stop_ids(model_with(CHATML, stop_ids=(2,))) == (2,)
    special = LLAMA_3.special_tokens
    assert set(chat_stop_ids(model_with(LLAMA_3))) == {special["<|eot_id|>"], special["<|eom_id|>"]}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "there are no messages"),
        ([{"role": "user"}], "message 0 has 'role'; it must have just 'role' and 'content'"),
        ([{}], "message 0 has nothing; it must have"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "b"}],
            "message 1 has 'role', 'co",
        ),
        ([{"role": "robot", "content": "a"}], "has the role 'robot'; it must be one of system, user, assistant"),
        ([{"role": "user", "content": None}], "message 0 has a content of type NoneType, not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has a content of type list, not text"),
    ],
)
def test_messages_that_are_none(messages, said):
    with pytest.raises(UsageError, match=said):
        chat_ids(model_with(LLAMA_2), messages)


def test_templates_that_are_not_there(tmp_path):
    with pytest.raises(JllamaError, match="no chat template and its tokenizer no special tokens of a known one"):
        chat_template(model_with(BytesTokenizer()))
    with pytest.raises(JllamaError, match="the model has no tokenizer"):
        chat_ids(model_with(None), LONG)
    with pytest.raises(JllamaError, match=r"'nowhere.jinja' cannot be read \(No such file"):
        chat_template(model_with(LLAMA_2), "nowhere.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(JllamaError, match=r"cannot be read \(it is not UTF-8 text\): give a file or one of llama2, "):
        chat_template(model_with(LLAMA_2), str(tmp_path / "latin.jinja"))


@pytest.mark.parametrize("turns", ["aa", "a", "uu", "us", "suua"])
def test_llama_2_needs_turns(turns):
    roles = {"a": "assistant", "u": "user", "s": "system"}
    with pytest.raises(JllamaError, match="refuses these messages: user and assistant must take turns"):
        chat_ids(model_with(LLAMA_2), [{"role": roles[turn], "content": "a"} for turn in turns])


NESTED = "{% set ns = namespace(l=[1, 2]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
DOUBLED = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}"
LOOPS = "{% for a in r %}{% for b in r %}{% for c in r %}"
TIME = "it takes too much time or memory"
TEXT = "it makes a text of over 100,000 characters"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
        (f"{LOOPS}{{% endfor %}}{{% endfor %}}{{% endfor %}}", TIME),
        (f"{LOOPS.replace(' %}', ' if not a %}')}{{% endfor %}}{{% endfor %}}{{% endfor %}}", TIME),
        ("{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}", TIME),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
        ("{% for a in range(99999) %}{% set x = messages | map('tojson') | list %}{% endfor %}", TIME),
        ("{% set ns = namespace(l=[]) %}{% for a in range(9999) %}{% set ns.l = ['a' * 90000] %}{% endfor %}", TIME),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "calls itself without end"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ 'a' * 10 ** 10 }}", TEXT),
        ("{{ [1] * 10 ** 10 }}", TEXT),
        ("{{ 10 ** 999 }}", "it computes a number of over 1000 bits"),
        (DOUBLED.replace("STEP", "ns.s + ns.s"), TEXT),
        (DOUBLED.replace("STEP", "ns.s ~ ns.s"), TEXT),
        (DOUBLED.replace("STEP", "[ns.s, ns.s] | join"), TEXT),
        (DOUBLED.replace("STEP", "ns.s.replace('a', ns.s)"), TEXT),
        ("{% set s = 'a' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60, TEXT),
        (NESTED, TEXT),
        ("{{ ('a' * 9999) | join('b' * 9999) }}{{ ('b' * 9999).join('a' * 9999) }}", TEXT),
        ("{{ ('b' * 9999).join('a' * 9999) }}", TEXT),
        ("{{ ('a' * 9999) | replace('a', 'b' * 9999) }}", TEXT),
        ("{{ ('\n' * 9999) | indent(9999) }}", TEXT),
        ("{{ ([1] * 9999) | tojson(indent=9999) }}", TEXT),
        ("{{ range(99999) | join('b' * 9999) }}", TEXT),
        ("{% for a in range(9999) %}{{ messages[0].content * 9 }}{% endfor %}", TEXT),
        ("a" * 100_001, TEXT),
        ("{{ 'a' | center(10 ** 9) }}", "a number over 100,000"),
        ("{{ 'a' | center(1000000000) }}", "a number over 100,000"),
        ("{{ 'a'.ljust(10 ** 9) }}", "a number over 100,000"),
        ("{{ '%1000000000d' % 1 }}", "to a width that may be too large: '%1000000000d'"),
        ("{{ '%*d' % (1000000000, 1) }}", "to a width that may be too large"),
        ("{{ '%1000000000d' | format(1) }}", "to a width that may be too large"),
        ("{{ '{:1000000000}'.format(1) }}", "to a width that may be too large"),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "to a width that may be too large"),
        ("{{ (1).to_bytes(10 ** 9) }}", "it reaches for 'to_bytes' of a int"),
        ("{{ ''.__class__.__mro__ }}", "it reaches for '__class__' of a str"),
        ("{{ ''['__class__'] }}", "it reaches for '__class__' of a str"),
        ("{{ '' | attr('__class__') }}", "it reaches for '__class__' of a str"),
        ("{{ [''] | map(attribute='__class__') | list }}", "it reaches for '__class__' of a str"),
        ("{{ '{0.__class__}'.format('') }}", "it reaches for '__class__' of a str"),
        ("{{ raise_exception.__globals__ }}", "it reaches for '__globals__' of a function"),
        ("{{ messages.append(1) }}", "it reaches for 'append' of a list"),
        ("{{ namespace(__html__=1) }}", "it sets '__html__' in a namespace"),
        ("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", "it sets '__html__' in a namespace"),
        ("{% if %}", "is not Jinja: Expected an expression, got 'end of statement block' in line 1"),
        ("\n{{ 1 | nope }}", "is not Jinja: No filter named 'nope'. in line 2"),
        ("{% include 'other' %}", "failed: no loader"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ messages[0].nope.more }}", "failed: 'dict object' has no attribute 'nope'"),
        ("{{ raise_exception('only\n \x1b[1mEnglish') }}", r"refuses these messages: only \[1mEnglish$"),
        ("{{ raise_exception('a' * 9999) }}", "a{250}"),
    ],
    ids=lambda value: value[:50],
)
def test_hostile_templates_end_with_one_sentence(template, said, monkeypatch):
    if said == TIME:
        monkeypatch.setattr(limits, "SECONDS", 0.05)
    monkeypatch.setattr(limits, "MAX_TEXT", 100_000)
    with pytest.raises(JllamaError, match=said) as caught:
        render(template, r=range(99999), messages=[{"role": "user", "content": "hi there\n" * 99}])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ ('a' * 30000) | join('b' * 30000) }}",
        "{{ ('b' * 30000).join('a' * 30000) }}",
        "{{ (['a' * 30000] * 100) | join('b' * 90000) }}",
        "{{ ('a' * 30000).replace('a', 'b' * 30000) }}",
        "{{ ('\n' * 30000) | indent(30000) }}",
        "{{ ([1] * 5000) | tojson(indent=90000) }}",
        "{{ '%0900000000d' | format(1) }}",
        "{{ '' | center(10 ** 9) }}",
    ],
)
def test_what_is_refused_takes_no_memory(template, monkeypatch):
    monkeypatch.setattr(limits, "MAX_TEXT", 100_000)
    tracemalloc.start()
    with pytest.raises(JllamaError, match="was stopped"):
        render(template)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5_000_000


def test_a_long_conversation_is_not_hostile():
    """Of a hundred messages and over two megabytes."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": "the user " * 2400} for i in range(101)]
    for template in TEMPLATES.values():
        assert len(render(template, messages=messages, bos_token="<s>", eos_token="</s>")) > 2_000_000
