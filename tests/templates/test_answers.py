"""Which tokens of a conversation count: exactly the answers and their ends, whatever the template.

Stock templates have no ``{% generation %}`` tags. Here each gets them, by hand, and transformers
says what is in them.
"""

import collections
import itertools
from pathlib import Path
from unittest import mock

import pytest
import transformers
from hard_text import CHAT_CORPUS, texts
from helpers import trained_llama3, trained_smollm
from helpers_real import (
    GRANITE_TOKENS,
    MISTRAL_TOKENS,
    PHI_TOKENS,
    QWEN_TOKENS,
    real_cl100k,
    real_file,
    real_qwen,
    real_tekken,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jllama.core import JllamaError, UsageError
from jllama.formats.gguf_file import read_gguf_file
from jllama.templates import messages as answers
from jllama.templates import template as limits
from jllama.templates.messages import (
    TEMPLATES,
    conversation_tokens,
    end_of_turn_ids,
    find_template,
    openai_messages,
)
from jllama.tokenizers.base import TokenType
from jllama.tokenizers.gguf import from_gguf
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.loading import load_tokenizer, save_huggingface
from jllama.tokenizers.sentencepiece import train_sentencepiece


def phi_3():
    """SentencePiece with more special tokens, which drop the white space behind them."""
    vocabulary = train_sentencepiece(CHAT_CORPUS, 340).vocabulary()
    count = len(PHI_TOKENS)
    return HuggingFaceTokenizer.from_vocabulary(
        vocabulary._replace(
            tokens=[*vocabulary.tokens, *PHI_TOKENS],
            token_type=[*vocabulary.token_type, *[TokenType.CONTROL] * count],
            scores=[*vocabulary.scores, *[0.0] * count],
            eos_token_id=len(vocabulary.tokens),
            strips_spaces=True,
        )
    )


TOYS = {
    "llama2": lambda: train_sentencepiece(CHAT_CORPUS, 340),
    "llama3": lambda: trained_llama3(CHAT_CORPUS, 350),
    "smollm2": lambda: trained_smollm(CHAT_CORPUS, 350),
    "qwen": lambda: trained_smollm(CHAT_CORPUS, 350, "qwen2", QWEN_TOKENS, (0, 2)),
    "phi": lambda: trained_smollm(CHAT_CORPUS, 350, "dbrx", PHI_TOKENS, (0, 0)),
    "phi3": phi_3,
    "granite": lambda: trained_smollm(CHAT_CORPUS, 350, "smollm", GRANITE_TOKENS, (0, 0)),
    "mistral_v3": lambda: train_sentencepiece(CHAT_CORPUS, 340),
    "mistral": lambda: trained_smollm(
        CHAT_CORPUS, 350, "tekken", MISTRAL_TOKENS, (1, 2), add_bos=True
    ),
}
REAL = {
    "llama2": lambda: load_tokenizer(real_file("mistral_tokenizer.model")),
    "llama3": lambda: load_tokenizer(real_file("llama3_tokenizer.model")),
    "smollm2": lambda: from_gguf(read_gguf_file(real_file(SMOLLM2))[0], "SmolLM2"),
    "qwen": real_qwen,
    "phi": real_cl100k,
    "phi3": TOYS["phi3"],
    "granite": TOYS["granite"],
    "mistral_v3": lambda: load_tokenizer(real_file("mistral_v3_tokenizer.model")),
    "mistral": real_tekken,
}
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
STOCK = {path.stem: path.read_text() for path in (Path(__file__).parent / "stock").glob("*.jinja")}

TAGGED = {  # the tokenizer's kind, what stands before an answer, and what writes it
    "chatml": ("smollm2", "message['role'] + '\n' + ", "message['content'] + '<|im_end|>'"),
    "smollm2": ("smollm2", "message['role'] + '\n' + ", "message['content'] + '<|im_end|>'"),
    "llama2": ("llama2", "{{ ", "' '  + content.strip() + ' ' + eos_token"),
    "mistral": ("llama2", "{{ ", "message['content'] + eos_token"),
    "mistral_v0.2": ("llama2", "{{- ", '" " + message["content"] + eos_token'),
    "mistral_v0.3": ("mistral_v3", "{{- ", '" " + message["content"] + eos_token'),
    "mistral_nemo": ("mistral", "{{- ", 'message["content"] + eos_token'),
    "zephyr": ("llama2", "'<|assistant|>\n'  + ", "message['content'] + eos_token"),
    "llama3": ("llama3", None, None),
    "llama3_1": ("llama3", "|>\\n\\n'+ ", "message['content'] | trim + '<|eot_id|>'"),
    "llama3_2": ("llama3", "|>\\n\\n'+ ", "message['content'] | trim + '<|eot_id|>'"),
    "qwen2_5": ("qwen", "message.role + '\\n' + ", "message.content + '<|im_end|>'"),
    "qwen3": ("qwen", None, None),
    "phi3": ("phi", "'<|assistant|>\n' + ", "message['content'] + '<|end|>'"),
    "phi3_5": ("phi3", "'<|assistant|>\n' + ", "message['content'] + '<|end|>'"),
    "phi4": ("phi", "assistant<|im_sep|>' + ", "message['content'] + '<|im_end|>'"),
    "phi4_mini": ("phi", "'|>' + ", "message['content'] + '<|end|>'"),
    "olmo2": ("phi", "'<|assistant|>\n'  + ", "message['content'] + eos_token"),
    "granite3_3": ("granite", "end_of_role|>' + ", "message['content'] + '<|end_of_text|>'"),
}
NO_SYSTEM = ["mistral", "mistral_v0.3", "mistral_nemo"]
QWEN3 = {
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + "
    "'\\n</think>\\n\\n' + content.lstrip('\\n') }}": "{{- '<|im_start|>assistant\\n' }}"
    "{%- set body = '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' %}"
    "{%- if not reasoning_content.strip('\\n') %}{{- body }}{%- set body = '' %}{%- endif %}"
    "{%- set body = body + content.lstrip('\\n') %}",
    "{{- '<|im_start|>' + message.role + '\\n' + content }}": "{{- '<|im_start|>assistant\\n' }}"
    "{%- set body = content %}",
    "{%- if message.tool_calls %}": "{%- generation %}{{- body }}{%- if message.tool_calls %}",
    "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}": "{{- '<|im_end|>' }}"
    "{%- endgeneration %}{{- '\\n' }}{%- elif message.role == 'tool' %}",
}
"""The tags in Qwen3's template: empty thoughts are the template's, all others the answer's."""


def tagged(name):
    if name == "llama3":
        return STOCK["llama3_training"]
    template = STOCK[name]
    for end in ("<|end|>", "<|end_of_text|>"):
        template = template.replace(f"{end}\n'", f"{end}' + '\n'")
    _, begin, content = TAGGED[name]
    replacements = QWEN3
    if begin:
        tags = (
            "{% generation %}{{- CONTENT }}{% endgeneration %}{% else %}{{- CONTENT }}{% endif %}"
        )
        answer = "{% if message['role'] == 'assistant' %}" + tags.replace("CONTENT", content)
        replacements = {begin + content: begin + "'' }}" + answer + "{{- ''"}
    for text, other in replacements.items():
        assert text in template
        template = template.replace(text, other)
    return template


@pytest.fixture(
    scope="module",
    params=[TOYS, pytest.param(REAL, marks=pytest.mark.real_weights)],
    ids=["toy", "real"],
)
def tokenizers(request, tmp_path_factory):
    """Each kind's tokenizer, and the same as transformers has it."""
    actual = {}
    for name, make in request.param.items():
        folder = tmp_path_factory.mktemp(name)
        save_huggingface(tokenizer := make(), folder)
        actual[name] = tokenizer, transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return actual


def jllama_tokens(tokenizer, template, messages, tools=None):
    stop_ids = end_of_turn_ids(tokenizer, [tokenizer.eos_id])
    return conversation_tokens(tokenizer, template, messages, stop_ids, tools)


def peer_tokens(peer, template, messages, tools=None):
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = peer.apply_chat_template(messages, tools, chat_template=template, **options)
    return encoded["input_ids"], [bool(mask) for mask in encoded["assistant_masks"]]


def counted_texts(tokenizer, ids, counted):
    """The text of each run of counted tokens, special tokens spelled out."""
    special = {id: text for text, id in tokenizer.special_tokens.items()}
    texts = []
    for counts, run in itertools.groupby(zip(ids, counted, strict=True), lambda pair: pair[1]):
        text, plain = "", []
        for id, _ in [*run, (None, False)]:
            if id is None or id in special:
                text += tokenizer.decode(plain) + special.get(id, "")
                plain = []
            else:
                plain.append(id)
        if counts:
            texts.append(text)
    return texts


turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


def conversation(exchanges, system=None):
    """Questions and answers as messages."""
    parts = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in exchanges:
        parts += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return parts


PLAIN = [("hello", "the user says"), ("12", "345 to the assistant")]


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=8)
@given(exchanges=turns, system=st.none() | texts)
@example(exchanges=PLAIN, system="the system")
@example(exchanges=[("a", ""), ("", " \n"), ("b", "\nc\n")], system=None)
def test_stock_templates_count_what_tags_around_the_answers_would(
    tokenizers, name, exchanges, system
):
    tokenizer, peer = tokenizers[TAGGED[name][0]]
    if name == "phi3_5":
        # Where a special token takes an answer's first spaces, transformers counts that token.
        exchanges = [(question, answer.lstrip()) for question, answer in exchanges]
    messages = conversation(exchanges, None if name in NO_SYSTEM else system)
    ids, counted = jllama_tokens(tokenizer, STOCK[name], messages)
    assert ids == peer.apply_chat_template(messages, chat_template=STOCK[name], return_dict=False)
    assert (ids, counted) == peer_tokens(peer, tagged(name), messages)
    assert (ids, counted) == jllama_tokens(tokenizer, tagged(name), messages)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
ASKED = [
    {"role": "system", "content": "the system"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "22"},
    {"role": "assistant", "content": "the user says 22"},
]


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_a_call_of_a_tool_counts_and_its_result_does_not(tokenizers, name):
    tokenizer, peer = tokenizers["llama3"]
    messages = list(ASKED)
    if name == "llama3_2":  # a content may be missing, too
        messages[2] = {"role": "assistant", "tool_calls": [CALL]}
    ids, counted = jllama_tokens(tokenizer, STOCK[name], messages, TOOLS)
    assert ids == peer.apply_chat_template(
        messages, TOOLS, chat_template=STOCK[name], return_dict=False
    )
    call = '{"name": "weather", "parameters": {"city": "Zürich"}}<|eot_id|>'
    assert counted_texts(tokenizer, ids, counted) == [call, "the user says 22<|eot_id|>"]


@pytest.mark.parametrize("name", ["qwen2_5_training", "qwen3_training", "smollm3"])
@settings(max_examples=8)
@given(exchanges=turns, system=st.none() | texts | st.just("be /no_think"))
def test_the_tags_of_templates_are_taken_as_they_are(tokenizers, name, exchanges, system):
    """Also where the newlines around an answer are in them, as in those of TRL."""
    tokenizer, peer = tokenizers["qwen"]
    for template, messages, tools in (
        (STOCK[name], conversation(exchanges, system), None),
        (find_template(tokenizer, STOCK[name]), ASKED, TOOLS),
    ):
        actual = jllama_tokens(tokenizer, template, messages, tools)
        assert actual == peer_tokens(peer, template, messages, tools)
    assert '{"city": "Zürich"}}\n</tool_call>' in counted_texts(tokenizer, *actual)[0]


def thinks(content, thoughts=None):
    message = {"role": "assistant", "content": content}
    return message | ({} if thoughts is None else {"reasoning_content": thoughts})


thoughts = st.none() | st.sampled_from(["", "hm", "\n\nhm\n", "<think>", "the user says 22"])
inline = st.sampled_from(
    ["", "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\n", "<think>hm</think>"]
)


@settings(max_examples=15)
@given(
    exchanges=st.lists(st.tuples(texts, thoughts, inline, texts), min_size=1, max_size=3),
    calls=st.booleans(),
)
@example(
    exchanges=[("a", "hm", "", "b"), ("c", None, "<think>\nno\n</think>\n\n", "d")], calls=True
)
def test_thoughts_that_qwen3s_template_writes_count(tokenizers, exchanges, calls):
    """Those of the turn that is answered; it drops those of earlier turns."""
    tokenizer, peer = tokenizers["qwen"]
    messages = []
    for question, thought, begin, answer in exchanges:
        messages.append({"role": "user", "content": question})
        if calls:
            message = thinks("", thought) | {"tool_calls": [CALL]}
            messages += [message, {"role": "tool", "content": "22"}]
        messages.append(thinks(begin + answer, thought))
    expected = peer_tokens(peer, tagged("qwen3"), messages, TOOLS)
    assert jllama_tokens(tokenizer, STOCK["qwen3"], messages, TOOLS) == expected


def test_thoughts_that_a_template_drops_are_noted(tokenizers):
    tokenizer, _ = tokenizers["qwen"]
    messages = [*says(thinks("b", "of b")), *says(thinks("c", "of c"))]
    actual, notes = tokens_and_notes(tokenizer, STOCK["qwen3"], messages)
    assert actual == ["b<|im_end|>", "<think>\nof c\n</think>\n\nc<|im_end|>"]
    assert notes == {"answers whose thoughts the template leaves out": 1}
    actual, notes = tokens_and_notes(tokenizer, STOCK["qwen2_5"], messages)
    assert actual == ["b<|im_end|>", "c<|im_end|>"]
    assert notes == {"answers whose thoughts the template leaves out": 2}
    messages = [*says(thinks("<think>\nof b\n</think>\n\nb")), *says(thinks("c"))]
    actual, notes = tokens_and_notes(tokenizer, STOCK["qwen3"], messages)
    assert actual == ["b<|im_end|>", "c<|im_end|>"]
    assert notes == {
        "answers of which the template leaves out or changes a part": 1,
        "answers behind '<think>\\n\\n</think>', which the template writes and is not learned": 1,
    }


SHORT = '[{"name": "weather", "arguments": {"city": "Zürich"}'
WRITTEN = {
    "qwen2_5": ("qwen", "<tool_call>\n" + SHORT[1:] + "}\n</tool_call><|im_end|>"),
    "qwen3": ("qwen", "<tool_call>\n" + SHORT[1:] + "}\n</tool_call><|im_end|>"),
    "mistral_v0.3": ("mistral_v3", "[TOOL_CALLS] " + SHORT + ', "id": "789abcdef"}]</s>'),
    "mistral_nemo": ("mistral", "[TOOL_CALLS]" + SHORT + ', "id": "789abcdef"}]</s>'),
    "granite3_3": ("granite", "<|tool_call|>" + SHORT + "}]<|end_of_text|>"),
    "phi4_mini": ("phi", "<|tool_call|>" + SHORT + "}]<|/tool_call|><|end|>"),
}
"""What the models of a template learn of a call: the tokenizer's kind, and the text."""


@pytest.mark.parametrize("name", WRITTEN)
def test_each_familys_calls_are_learned_as_its_models_write_them(tokenizers, name):
    kind, text = WRITTEN[name]
    tokenizer, _ = tokenizers[kind]
    asks = {"role": "assistant", "tool_calls": [CALL | {"id": "call_0123456789abcdef"}]}
    result = {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "22"}
    messages = openai_messages([ASKED[1], asks, result, ASKED[4]], is_request=False)
    template = find_template(tokenizer, STOCK[name])
    ids, counted = jllama_tokens(tokenizer, template, messages, TOOLS)
    actual = counted_texts(tokenizer, ids, counted)
    end = text[text.rindex("<") :]
    before = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert [each.strip() for each in actual] == [text, f"the user says 22{end}"]
    assert before + "the user says 22" in tokenizer.decode(ids)


def test_tags_without_the_end_of_an_answer(tokenizers):
    """The end counts, or nothing would be learned about when to stop; what follows it does not."""
    tokenizer, _ = tokenizers["smollm2"]
    template, inside = tagged("chatml"), " + '<|im_end|>' }}{% endgeneration %}"
    assert inside in template
    without = template.replace(inside, " }}{% endgeneration %}{{ '<|im_end|>' }}")
    messages = conversation([*PLAIN, ("a", "")])
    expected = jllama_tokens(tokenizer, template, messages)
    assert jllama_tokens(tokenizer, without, messages) == expected


def test_an_end_in_the_tags_is_the_only_one(tokenizers):
    """What ends the text may follow it; as in transformers, it does not count."""
    tokenizer, peer = tokenizers["smollm2"]
    template = tagged("chatml").replace("'\n'}}{% endfor %}", "'<|endoftext|>'}}{% endfor %}")
    messages = conversation(PLAIN)
    actual = conversation_tokens(tokenizer, template, messages, [0, 2])
    assert actual[0].count(0) == 4
    assert actual == peer_tokens(peer, template, messages)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("no generation prompt", STOCK["chatml"].partition("{% if add")[0]),
        ("one that differs", STOCK["chatml"].replace("assistant\n'", "assistant\n<think>\n'")),
        ("the system's message last",
         "{% set system = messages[0].content %}{% for message in messages[1:] %}"
         "{{ '<|im_start|>' + message.role + '\n' + (system if loop.revindex == 2 else '') + "
         "message.content }}"
         "{{ '<|im_end|>\n' }}{% endfor %}"),
        ("no end before the next turn",
         "{% for message in messages %}{{ '<|im_end|>\n' if not loop.first }}"
         "{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endfor %}<|im_end|>"),
    ],
)  # fmt: skip
def test_templates_whose_parts_do_not_follow_each_other(tokenizers, name, template):
    tokenizer, _ = tokenizers["smollm2"]
    actual, _ = tokens_and_notes(tokenizer, template, conversation(PLAIN, "the system"))
    assert actual == [f"{answer}<|im_end|>" for _, answer in PLAIN]


def test_a_greeting_and_two_answers_in_a_row(tokenizers):
    tokenizer, _ = tokenizers["smollm2"]
    messages = [thinks("hello"), *says(thinks("12"), thinks("the user")), *says()]
    template = STOCK["smollm2"].replace("loop.first", "false")
    actual, _ = tokens_and_notes(tokenizer, template, messages)
    assert actual == ["hello<|im_end|>", "12<|im_end|>", "the user<|im_end|>"]


def test_an_end_further_on_is_another_messages(tokenizers):
    """Where a template ends no answer, the next question's end is not counted."""
    tokenizer, _ = tokenizers["smollm2"]
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + "
        "('<|im_end|>' if m.role == 'user' else '') + '\n' }}{% endfor %}"
    )
    actual, _ = tokens_and_notes(tokenizer, template, conversation(PLAIN))
    assert actual == [answer for _, answer in PLAIN]


def counting(roles):
    """Messages of these roles count, as if they were answers."""

    def render_answers(template, variables, indices):
        messages = enumerate(variables["messages"])
        indices = [index for index, message in messages if message["role"] in roles]
        return render_original(template, variables, indices)

    return render_answers


def with_headers(template, variables, indices):
    rendered = render_original(template, variables, indices)
    spans = [span._replace(start=span.start - len("assistant\n")) for span in rendered.spans]
    return rendered._replace(spans=spans)


render_original = answers.render_answers


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("render_answers", with_headers),
        ("render_answers", counting(["assistant", "user"])),
        ("render_answers", counting(["assistant", "system"])),
        ("_special_at", lambda *_: ""),
    ],
)
def test_mistakes_are_seen(tokenizers, name, mistake, monkeypatch):
    """Each one planted, transformers gives another mask."""
    tokenizer, peer = tokenizers["smollm2"]
    messages = conversation(PLAIN, "the system")
    right = peer_tokens(peer, tagged("chatml"), messages)
    assert jllama_tokens(tokenizer, STOCK["chatml"], messages) == right
    monkeypatch.setattr(answers, name, mistake)
    assert jllama_tokens(tokenizer, STOCK["chatml"], messages) != right


def says(*messages):
    return [{"role": "user", "content": "a"}, *messages]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (says(), "no message is the assistant's, so there is nothing to learn"),
        (says({"role": "robot", "content": "a"}), "the role 'robot'; it must be one of system, us"),
        (says(thinks(3)), "message 1 has a content of type int, not text"),
        (
            says({"role": "assistant"}),
            "message 1 has 'role'; it must have just 'role' and 'content'",
        ),
        (says({"role": ["assistant"], "content": "a"}), r"message 1 has the role \['assistant'\]"),
        (says({"role": "assistant", "tool_calls": ["a"]}), "tool_calls that are not a list of obj"),
        (says({"role": "tool", "content": None}), "message 1 has a content of type NoneType, not"),
        (
            says({"role": "user", "content": "a", "tool_calls": []}),
            "'role', 'content', 'tool_calls'",
        ),
        (says({"role": "system", "content": "a"}), "message 1 is the system's: the roles are out"),
        (says({"role": "tool", "content": "a"}), "message 1 is a tool's and message 0 calls none"),
        (says(thinks("\ud83d")), "lone surrogate U\\+D83D"),
    ],
)
def test_conversations_that_are_none(tokenizers, messages, message):
    with pytest.raises(JllamaError, match=message):
        jllama_tokens(tokenizers["smollm2"][0], TEMPLATES["chatml"], messages)


def test_templates_that_do_not_serve(tokenizers):
    tokenizer, _ = tokenizers["smollm2"]
    messages = conversation(PLAIN)
    for step, exchanges, number in (
        ("{{ m.content | length if loop.last else m.content }}", PLAIN, 2),
        ("{{ m.content }}, {{ m.content | length }}; ", PLAIN, 1),
        ("{{ messages[0].content if loop.first }}", PLAIN, 1),
        ("{{ m.content }}", [("a", "")], 1),
    ):
        template = f"{{% for m in messages %}}{step}{{% endfor %}}"
        message = f"answer {number} is no part of its own in what the chat template writes: fill"
        with pytest.raises(JllamaError, match=message):
            jllama_tokens(tokenizer, template, conversation(exchanges))
    with pytest.raises(JllamaError, match="refuses these messages: Conversation roles must alter"):
        jllama_tokens(tokenizers["llama2"][0], STOCK["mistral"], messages[1:])
    with pytest.raises(UsageError, match="as JSON does"):
        jllama_tokens(tokenizer, TEMPLATES["chatml"], messages, [{"name": {1, 2}}])
    for tools in ({"name": "a"}, ["a"], 3):
        message = "the tools must be a list of objects, each the JSON schema of a function"
        with pytest.raises(UsageError, match=message):
            jllama_tokens(tokenizer, TEMPLATES["chatml"], messages, tools)


# --- what a template leaves out, adds, or ends with


def call(city):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": "call12345", "type": "function", "function": function}


def tokens_and_notes(tokenizer, template, messages, stop_ids=(2,), tools=None, **options):
    """The texts that count, and what is noted."""
    notes = collections.Counter()
    actual = conversation_tokens(
        tokenizer, template, messages, stop_ids, tools, notes=notes, **options
    )
    return [text.strip() for text in counted_texts(tokenizer, *actual)], dict(notes)


WITHOUT = (
    "{% for m in messages if m.role != 'ROLE' %}<|im_start|>"
    "{{ m.content or m.tool_calls }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "part"),
    [
        (STOCK["smollm2"], ASKED, None, "the tool_calls of message 2"),
        (STOCK["smollm2"], conversation(PLAIN), TOOLS, "the tools"),
        (STOCK["smollm2"], ASKED, TOOLS, "the tools and the tool_calls of message 2"),
        (WITHOUT.replace("ROLE", "system"), conversation(PLAIN, "the system"), None, "message 0"),
        (WITHOUT.replace("ROLE", "tool"), ASKED, None, "message 3"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tokenizers, template, messages, tools, part):
    messages = [message | {"content": message["content"] or ""} for message in messages]
    with pytest.raises(JllamaError, match=f"the chat template leaves out {part}, which would be"):
        jllama_tokens(tokenizers["smollm2"][0], template, messages, tools)


def test_no_part_is_missed_that_is_there(tokenizers):
    """Contents that are blank, twice the same, or those that a template writes in any case."""
    tokenizer, _ = tokenizers["smollm2"]
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    for system in (default, "", " "):
        messages = conversation([("a", "b"), ("a", "b"), (" ", "c")], system)
        actual, _ = tokens_and_notes(tokenizer, STOCK["smollm2"], messages)
        assert actual == ["b<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_smollm2_learns_calls_as_the_server_reads_them(tokenizers, content):
    """Its own template has no tools; its replacement takes them, for messages in OpenAI's form."""
    tokenizer, _ = tokenizers["smollm2"]
    arguments = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "a", "type": "function", "function": arguments}]
    asks = {"role": "assistant", **content, "tool_calls": calls}
    written = [*ASKED[:2], asks, {"role": "tool", "tool_call_id": "a", "content": "22"}, ASKED[4]]
    template = find_template(tokenizer, STOCK["smollm2"])
    messages = openai_messages(written, is_request=False)
    texts, notes = tokens_and_notes(tokenizer, template, messages, tools=TOOLS)
    assert texts == [
        '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_call><|im_end|>',
        "the user says 22<|im_end|>",
    ]
    assert notes == {}
    assert messages == openai_messages(written) or content == {"content": None}


MISTRAL_CALLS = r"""{{ bos_token }}{% set ns = namespace(turn=0, last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[TOOLS]{{ tools | tojson }}{% endif %}
{{- '[INST]' + m.content + '[/INST]\n' }}
{%- elif m.tool_calls %}[CALLS] [{% for call in m.tool_calls %}{% if call.id | length != 9 %}
{{- raise_exception('IDs must have a length of 9') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id }}"}
{%- endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}{{- '[RESULT]' + m.content + '[/RESULT]\n' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
"""Mistral's third template: calls are not turns, their ids have nine characters, tools are last."""


def test_calls_where_a_template_takes_turns_without_them(tokenizers):
    tokenizer, _ = tokenizers["llama2"]
    two = {"role": "assistant", "tool_calls": [call("Rome"), call("Oslo")]}
    one = {"role": "assistant", "tool_calls": [call(12)]}
    result = {"role": "tool", "content": "22"}
    question = {"role": "user", "content": "the user"}
    messages = [question, two, result, result, one, result, thinks("hello"), question, thinks("12")]
    rome, oslo, twelve = (
        f'{{"name": "weather", "arguments": {{"city": {city}}}, "id": "call12345"}}'
        for city in ('"Rome"', '"Oslo"', 12)
    )
    expected = [f"[CALLS] [{rome}{oslo}]</s>", f"[CALLS] [{twelve}]</s>", "hello</s>", "12</s>"]
    for count, num_answers in ((9, 4), (7, 3), (5, 2), (2, 1)):
        actual = tokens_and_notes(tokenizer, MISTRAL_CALLS, messages[:count], [2], TOOLS)
        assert actual == (expected[:num_answers], {})
    _, counted = jllama_tokens(tokenizer, MISTRAL_CALLS, messages)
    begin = tokenizer.encode_with_special_tokens("<s>[INST]the user[/INST]\n")
    assert not any(counted[: len(begin) - 1])


PHI = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% else %}{{ eos_token }}{% endif %}"""


def test_the_end_that_a_template_writes_counts_though_it_is_no_stop_id(tokenizers):
    tokenizer, _ = tokenizers["smollm2"]
    tokenizer_stop = tokenizer.special_tokens["<|endoftext|>"]
    messages = conversation(PLAIN)
    ends = [f"{answer}<|im_end|>" for _, answer in PLAIN]
    assert tokens_and_notes(tokenizer, PHI, messages, [tokenizer_stop]) == (ends, {})
    # If a conversation ends with a question, nothing tells whether the token ends an answer or
    # begins a question.
    texts, notes = tokens_and_notes(tokenizer, PHI, messages[:3], [tokenizer_stop])
    assert texts == [PLAIN[0][1]]
    assert notes == {
        "answers followed by '<|im_end|>', which is no stop id and is not learned": 1,
        "conversations that end without an answer": 1,
    }


def test_what_a_template_writes_or_cuts_out_of_answers_is_noted(tokenizers):
    """Qwen3's empty thoughts, and R1's, which are cut out."""
    tokenizer, _ = tokenizers["smollm2"]
    answer = (
        "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.last }}"
        "{{ m.content.split('</think>')[-1] }}"
    )
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\nANSWER<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = template.replace("ANSWER", answer.replace("loop.last }}", "loop.last else '' }}"))
    messages = conversation([("a", "<think>hm</think>b"), ("c", "")])
    texts, notes = tokens_and_notes(tokenizer, template, messages)
    assert texts == ["b<|im_end|>", "<|im_end|>"]
    assert notes == {
        "answers behind '<think>\\n\\n</think>', which the template writes and is not learned": 1,
        "answers of which the template leaves out or changes a part": 1,
        "answers that are empty": 1,
    }


@pytest.mark.parametrize("name", ["chatml", "tagged"])
def test_only_the_answers_asked_for_count(tokenizers, name):
    tokenizer, _ = tokenizers["smollm2"]
    template = tagged("chatml") if name == "tagged" else STOCK[name]
    messages = conversation([*PLAIN, ("a", "b")])
    texts, _ = tokens_and_notes(tokenizer, template, messages, learned={3})
    assert texts == [f"{PLAIN[1][1]}<|im_end|>"]
    with pytest.raises(JllamaError, match="no answer has a weight of 1, so there is nothing"):
        tokens_and_notes(tokenizer, template, messages, learned={0})


def test_arguments_are_text_to_templates_that_want_it(tokenizers):
    """DeepSeek's adds them to a text, others write them as JSON."""
    tokenizer, _ = tokenizers["smollm2"]
    template = (
        "{% for m in messages %}<|im_start|>{% for c in m.tool_calls %}{{ ARGUMENTS }}"
        "{% endfor %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    actual = []
    for written in ("'' + c.function.arguments", "c.function.arguments | tojson"):
        messages = [message | {"content": message["content"] or ""} for message in ASKED]
        actual += [jllama_tokens(tokenizer, template.replace("ARGUMENTS", written), messages)]
    assert actual[0] == actual[1]
    assert counted_texts(tokenizer, *actual[0])[0] == '{"city": "Zürich"}<|im_end|>'


def test_a_conversation_is_one_request(tokenizers, monkeypatch):
    ask = mock.Mock(side_effect=limits._ask)
    monkeypatch.setattr(limits, "_ask", ask)
    jllama_tokens(tokenizers["smollm2"][0], STOCK["smollm2"], conversation(PLAIN, "the system"))
    ask.assert_called_once()
