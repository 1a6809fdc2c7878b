"""Conversations as token ids: what transformers gives, what Meta's reference code gives."""

import datetime
import itertools
from pathlib import Path

import pytest
import sentencepiece
import transformers
from hard_text import CHAT_CORPUS, texts
from helpers import trained_llama3, trained_smollm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.generation.conversation import chat_ids
from jllama.models.language_model import LanguageModel
from jllama.templates.messages import (
    TEMPLATES,
    check_messages,
    end_of_turn_ids,
    find_template,
    template_variables,
    with_date,
)
from jllama.templates.template import render
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.loading import as_huggingface, save_huggingface
from jllama.tokenizers.sentencepiece import train_sentencepiece

CONFIG = LlamaConfig(vocab_size=300, num_layers=1, embed_dim=32)


LLAMA_2, LLAMA_3 = train_sentencepiece(CHAT_CORPUS, 340), trained_llama3(CHAT_CORPUS, 350)
CHATML = trained_smollm(CHAT_CORPUS, 350)
TOKENIZERS = {"llama2": LLAMA_2, "llama3": LLAMA_3, "chatml": CHATML}


def chat_template(model, choice=None):
    return find_template(model.text_tokenizer, model.chat_template, choice)


def model_with(tokenizer, template=None, stop_ids=()):
    return LanguageModel(CONFIG, {}, tokenizer, template, stop_ids)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """Each tokenizer as transformers has it."""
    actual = {}
    for name, tokenizer in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(name)
        save_huggingface(tokenizer, folder)
        actual[name] = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return actual


@st.composite
def conversations(draw):
    system = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": draw(texts)}
        for i in range(draw(st.integers(1, 5)))
    ]
    return system + turns


LONG = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": " Hello  👩‍👩‍👧\n\n"},
    {"role": "assistant", "content": "\nHi \n"},
    {"role": "user", "content": "the user says </s> <|eot_id|><|im_end|>  "},
]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=10)
@given(messages=conversations(), prompt=st.booleans())
@example(messages=LONG, prompt=True)
@example(messages=[{"role": "user", "content": ""}], prompt=True)
def test_ids_are_those_of_transformers(peers, name, messages, prompt):
    expected = peers[name].apply_chat_template(
        messages, chat_template=TEMPLATES[name], add_generation_prompt=prompt, return_dict=False
    )
    for tokenizer in (TOKENIZERS[name], as_huggingface(TOKENIZERS[name])):
        model = model_with(tokenizer)
        assert chat_template(model) == TEMPLATES[name]
        assert chat_ids(model, messages, add_generation_prompt=prompt) == expected


plain = texts.filter(lambda text: "<" not in text)


@settings(max_examples=10)
@given(st.lists(st.tuples(plain, plain), min_size=1, max_size=3), plain)
def test_llama_2_is_metas_dialogue(exchanges, system):
    """Each question and its answer is a text of its own, between BOS and EOS.

    Source: Meta's ``generation.py``.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=LLAMA_2.content)
    messages, expected = [{"role": "system", "content": system}], []
    for number, (question, answer) in enumerate(exchanges):
        begin = "" if number else f"<<SYS>>\n{system}\n<</SYS>>\n\n"
        text = f"[INST] {(begin + question).strip()} [/INST]"
        messages.append({"role": "user", "content": question})
        assert chat_ids(model_with(LLAMA_2), messages) == [*expected, 1, *processor.encode(text)]
        messages.append({"role": "assistant", "content": answer})
        expected += [1, *processor.encode(f"{text} {answer.strip()} "), 2]
        assert chat_ids(model_with(LLAMA_2), messages) == expected


@settings(max_examples=10)
@given(st.lists(plain, min_size=1, max_size=6))
def test_llama_3_is_metas_dialogue(contents):
    """Header, content and end of each message. Source: Meta's ``ChatFormat``."""
    special, encode = LLAMA_3.special_tokens, LLAMA_3.encode

    def header(role):
        return [special["<|start_header_id|>"], *encode(role), special["<|end_header_id|>"]]

    expected, messages = [LLAMA_3.bos_id], []
    for role, content in zip(itertools.cycle(("system", "user", "assistant")), contents):
        messages.append({"role": role, "content": content})
        expected += [*header(role), *encode("\n\n" + content.strip()), special["<|eot_id|>"]]
    ids = chat_ids(model_with(LLAMA_3), messages)
    assert ids == [*expected, *header("assistant"), *encode("\n\n")]
    assert ids.count(LLAMA_3.bos_id) == 1


def test_chatml_with_and_without_bos():
    messages = [{"role": "system", "content": " a"}, {"role": "user", "content": "b\n"}]
    text = "<|im_start|>system\n a<|im_end|>\n<|im_start|>user\nb\n<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    assert chat_ids(model_with(CHATML), messages) == CHATML.encode_with_special_tokens(text)
    with_bos = chat_ids(model_with(BytesTokenizer()), messages, TEMPLATES["chatml"])
    assert with_bos == [1, *BytesTokenizer().encode(text)]


@pytest.mark.parametrize(
    "tokenizer", [*TOKENIZERS.values(), BytesTokenizer()], ids=[*TOKENIZERS, "bytes"]
)
@given(parts=st.lists(texts, max_size=4))
def test_special_tokens_in_a_text(tokenizer, parts):
    """Between any two, what ``encode`` gives; none of them, all of what it gives."""
    names = {id: text for text, id in tokenizer.special_tokens.items()}
    without = [part for part in parts if not any(text in part for text in tokenizer.special_tokens)]
    text, ids = "", []
    for part, id in zip(without, [tokenizer.bos_id, tokenizer.eos_id] * 2, strict=False):
        ids += [*tokenizer.encode(part), id]
        text += part + names[id]
    assert tokenizer.encode_with_special_tokens(text) == ids
    assert tokenizer.encode(text) != ids or not ids  # to encode they are text


def test_a_long_text_with_special_tokens():
    """Longer than tiktoken takes at once: no special token is cut."""
    text = ("a" * 24_990 + "<|eot_id|>") * 5
    ids = LLAMA_3.encode_with_special_tokens(text)
    assert ids == as_huggingface(LLAMA_3).encode_with_special_tokens(text)
    assert ids.count(LLAMA_3.special_tokens["<|eot_id|>"]) == 5


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
{% set a = 'x' %}{% generation %}{{ a }}{% set a = 'y' %}{{ a }}{% endgeneration %}{{ a }}
{%- if add_generation_prompt %}{{ '<|im_start|>' -}}{% endif %}
"""  # noqa: E501


@pytest.mark.parametrize("name", ["llama3_2", "smollm3", "granite3_3"])
def test_the_date_is_a_part_of_the_template(name):
    """A rendering is the same on any day; to other programs the date is a comment."""
    own = Path(__file__).with_name("stock").joinpath(f"{name}.jinja").read_text()
    dated = with_date(own)
    assert dated == f"{{# date: {datetime.date.today()} #}}{own}"
    assert with_date(dated) == dated
    assert find_template(LLAMA_3, dated).endswith(dated)
    assert with_date(FEATURES[:99]) == FEATURES[:99]
    variables = {"messages": [{"role": "user", "content": "q"}], "bos_token": "<s>", "tools": None}
    other_day = f"{{# date: 2021-01-31 #}}{own}"
    texts = [render(template, **variables) for template in (own, dated, other_day)]
    assert texts[0] == texts[1] != texts[2]
    assert "31 Jan" in texts[2] or "January 31" in texts[2] or "31 January" in texts[2]
    messages = variables.pop("messages")
    theirs, _ = render_jinja_template([messages], chat_template=dated, **variables)
    assert theirs == [texts[0]]
    with pytest.raises(JllamaError, match="the chat template failed: month must be in 1"):
        render("{# date: 2021-31-31 #}", **variables)


@settings(max_examples=10)
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


STOCK = {path.stem: path.read_text() for path in (Path(__file__).parent / "stock").glob("*.jinja")}


@pytest.mark.parametrize(
    ("name", "special", "stock"),
    [
        ("phi4", ("<|im_start|>", "<|im_end|>", "<|im_sep|>"), "phi4"),
        ("granite", ("<|start_of_role|>", "<|end_of_text|>"), "granite3_3"),
        ("mistral", ("<s>", "</s>", "[INST]"), "mistral_nemo"),
    ],
)
def test_a_family_is_known_by_a_special_token(name, special, stock):
    """A checkpoint without a template has its family's, which writes what the published does."""
    tokenizer = trained_smollm(["a"], 300, special=special, ends=(0, 1))
    template = find_template(tokenizer, None)
    assert template == TEMPLATES[name]
    for count, has_system, prompt in itertools.product((1, 2, 3), (True, False), (True, False)):
        if name == "granite" and not has_system:
            continue  # the published one writes a system message of its own
        if name == "mistral" and has_system and count == 2:
            continue  # the published one leaves out the system's message
        messages = [{"role": "system", "content": "Be é."}] if has_system else []
        for turn in range(count):
            role = ("user", "assistant")[turn % 2]
            messages.append({"role": role, "content": f"turn {turn} "})
        variables = template_variables(tokenizer, messages, prompt)
        assert render(template, **variables) == render(STOCK[stock], **variables)


def test_thoughts_are_text_of_the_assistants():
    thinks = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    check_messages([thinks])
    for message in (thinks | {"reasoning_content": 7}, thinks | {"role": "user"}):
        with pytest.raises(UsageError, match="it must have just 'role' and 'content'"):
            check_messages([message])


def test_what_ends_an_answer():
    assert end_of_turn_ids(LLAMA_2, (2,)) == (2,)
    assert end_of_turn_ids(CHATML, (0,)) == (0, 2)
    assert end_of_turn_ids(CHATML, (2,)) == (2,)
    phi_3 = trained_smollm(["a"], 300, special=("<s>", "<|endoftext|>", "<|end|>"), ends=(0, 1))
    assert end_of_turn_ids(phi_3, (1,)) == (1, 2)
    special = LLAMA_3.special_tokens
    assert set(end_of_turn_ids(LLAMA_3, ())) == {special["<|eot_id|>"], special["<|eom_id|>"]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        ([{}], "message 0 has nothing; it must have just 'role' and 'content'"),
        ([{"role": "user", "content": "a", "name": "b"}], "message 0 has 'role', 'content', 'name"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has a content of type list, not text"),
    ],
)
def test_messages_that_are_none(messages, message):
    with pytest.raises(UsageError, match=message):
        chat_ids(model_with(LLAMA_2), messages)


def test_messages_of_a_file():
    message = "message 1 is of type str; it must have a role and a content"
    with pytest.raises(UsageError, match=message):
        check_messages([{"role": "user", "content": "a"}, "hello"])


def test_templates_that_are_not_there(tmp_path):
    message = "no chat template and its tokenizer no special tokens of a known one"
    with pytest.raises(JllamaError, match=message):
        chat_template(model_with(BytesTokenizer()))
    with pytest.raises(JllamaError, match="the model has no tokenizer"):
        chat_ids(model_with(None), LONG)
    with pytest.raises(JllamaError, match=r"'nowhere.jinja' cannot be read: .*: No such file"):
        chat_template(model_with(LLAMA_2), "nowhere.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    message = "read: give a file or one of chatml, granite, llama2, llama3.*codec can't decode"
    with pytest.raises(JllamaError, match=message):
        chat_template(model_with(LLAMA_2), str(tmp_path / "latin.jinja"))


@pytest.mark.parametrize("turns", ["aa", "a", "uu", "us", "suua"])
def test_llama_2_needs_turns(turns):
    roles = {"a": "assistant", "u": "user", "s": "system"}
    messages = [{"role": roles[turn], "content": "a"} for turn in turns]
    message = "refuses these messages: user and assistant must take turns"
    with pytest.raises(JllamaError, match=message):
        chat_ids(model_with(LLAMA_2), messages)
