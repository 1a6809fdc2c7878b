"""Calls of tools: templates that are shown them, grammars that let only calls through, answers read
piece by piece."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import trained_llama3, trained_smollm
from helpers_real import real_file
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from transformers.utils.chat_template_utils import render_jinja_template

import jllama
from jllama.core import UsageError
from jllama.generation.grammar import Matcher
from jllama.generation.text import Prompt, TextDecoder
from jllama.serve.tools import ToolParser, call_grammar, check_tools, find_dialect
from jllama.templates.messages import (
    TEMPLATES,
    end_of_turn_ids,
    openai_messages,
    template_variables,
)
from jllama.templates.template import render
from jllama.tokenizers.base import BytesTokenizer

STOCK = {
    path.stem: path.read_text()
    for path in (Path(__file__).parent.parent / "templates/stock").glob("*.jinja")
}
DIALECTS = {
    name: find_dialect(STOCK[stock])
    for name, stock in {
        "smollm2": "smollm2",
        "hermes": "qwen2_5_training",
        "llama": "llama3_1",
        "mistral": "mistral_v0.3",
        "granite": "granite3_3",
        "phi4_mini": "phi4_mini",
    }.items()
}
SMOLLM2, HERMES, LLAMA, MISTRAL, GRANITE, PHI4_MINI = DIALECTS.values()
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": function}
    for function in (
        {"name": "weather", "description": "The weather.", "parameters": WEATHER},
        {"name": "now"},
    )
]
NAMES = ["weather", "now"]
NOW = {"type": "function", "function": {"name": "now"}}
ANSWER = {"role": "assistant", "content": None}


def function(**fields):
    return {"type": "function", "function": {"name": "now", **fields}}


def written(dialect, calls):
    """An answer of calls, (name, arguments), as a model of the dialect writes it."""
    objects = [
        json.dumps({"name": name, dialect.arguments: arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    return dialect.before + dialect.between.join(objects) + dialect.after


def read(dialect, pieces, **options):
    """The text and the calls that come out, and what came before the end."""
    parser = ToolParser(dialect, NAMES, "key", **options)
    early = [each for piece in pieces for each in parser.push(piece)]
    out = early + parser.push("", is_end=True)
    assert [each for each in out if isinstance(each, dict)] == parser.calls
    assert all(call["type"] == "function" for call in parser.calls)
    return "".join(each for each in out if isinstance(each, str)), parser.calls, early


def said(call):
    """The name and the arguments of a call."""
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_dialects():
    marks = {name: dialect.mark for name, text in STOCK.items() if (dialect := find_dialect(text))}
    tool_call = "smollm2 qwen2_5 qwen2_5_training qwen3 qwen3_training smollm3"
    assert marks == {
        **dict.fromkeys(["llama3_1", "llama3_2"], ""),
        **dict.fromkeys(tool_call.split(), "<tool_call>"),
        **dict.fromkeys(["mistral_v0.3", "mistral_nemo"], "[TOOL_CALLS]"),
        **dict.fromkeys(["granite3_3", "phi4_mini"], "<|tool_call|>"),
    }
    assert (PHI4_MINI.end, GRANITE.end, MISTRAL.end) == ("<|/tool_call|>", "", "")
    for name in ("qwen2_5", "qwen3", "qwen3_training", "smollm3"):
        assert find_dialect(STOCK[name])[1:] == HERMES[1:]
    assert MISTRAL.before == "[TOOL_CALLS] ["
    assert find_dialect(STOCK["mistral_nemo"]).before == "[TOOL_CALLS]["
    assert [name for name, template in TEMPLATES.items() if find_dialect(template)] == []
    assert (LLAMA.template, HERMES.template) == (STOCK["llama3_1"], STOCK["qwen2_5_training"])
    assert find_dialect(LLAMA.template.replace("tools", "tolls")) is None
    for dialect in DIALECTS.values():
        assert find_dialect(dialect.template) == dialect


# --- reading answers


def objects_of(values):
    return st.dictionaries(st.text(max_size=9), values, max_size=3)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    # NaN and infinities are no JSON.
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda values: st.lists(values, max_size=3) | objects_of(values),
    max_leaves=6,
)
call_lists = st.lists(
    st.tuples(st.sampled_from(NAMES), objects_of(json_values)), min_size=1, max_size=3
)
MARKS = """<tool_call> </tool_call> <|tool_call|> <|/tool_call|> [TOOL_CALLS] <|/tool [TOOL <tool
_call> <think> </think> < { } [ ] [] " \\ \\u12 , hello é👩‍👩‍👧 NaN -Infinity 1e999 -1.5e+ tru
true"""
CALLS = """
    "now", "arguments": {}}
    "now", "parameters": {}}
    "now", "arguments": "{}"}
    "now", "arguments": "{"}
    "now", "arguments": []}
    "now", "arguments": {"a":
    "now"}
    "nothing", "arguments": {}}
    ["now"], "arguments": {}}"""
CALL_TEXTS = [f'{{"name": {line.strip()}' for line in CALLS.strip().splitlines()]
FRAGMENTS = ["\n", "  ", '{"a": ', *CALL_TEXTS, *MARKS.split(), "9" * 5000]
places = st.lists(st.integers(0, 999), max_size=9)
hard_texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def cut(text, places):
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@settings(max_examples=12)
@given(calls=call_lists, places=places, before=st.sampled_from(["", "I look.\n "]))
def test_calls_come_back(dialect, calls, places, before):
    if not dialect.between:
        calls, before = calls[:1], ""
    text = before + written(dialect, calls)
    out, actual, early = read(dialect, cut(text, places))
    assert out == before.rstrip()
    assert [*map(said, actual)] == calls
    assert [call["index"] for call in actual] == list(range(len(calls)))
    # A call comes no later than its last character.
    assert actual == [piece for piece in early if isinstance(piece, dict)]
    assert len({call["id"] for call in actual}) == len(calls)
    assert all(re.fullmatch("call_[0-9a-f]{24}", call["id"]) for call in actual)
    assert read(dialect, list(text))[:2] == (out, actual)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@given(text=hard_texts, places=places)
@example(text="<tool_call>" + "[" * 100_000, places=[])
@example(text='<tool_call>[{"name": "now", "arguments": {}}', places=[])  # its end is missing
@example(text='{"name": "now", "parameters": {}}  hello', places=[34])
@example(text='[TOOL_CALLS][{"name": "now", "arguments": {}}]\n hello', places=[46])
@example(
    text='I look.\n<|tool_call|> [{"name": "now", "arguments": {}}] <|/tool_call|> b', places=[60]
)
@example(
    text=' {"name": "now", "parameters": {}}; {"name": "now", "parameters": {}} ', places=[2, 40]
)
def test_no_text_is_lost_and_pieces_do_not_matter(dialect, text, places):
    out, calls, _ = read(dialect, [text])
    assert read(dialect, cut(text, places))[:2] == (out, calls)
    if len(text) < 300:
        assert read(dialect, list(text))[:2] == (out, calls)
    if calls:
        assert len(out) < len(text)
    else:
        assert out == text


IT = '{"name": "it", "arguments": {}}'


@pytest.mark.parametrize(
    ("name", "text", "early"),
    [
        *(
            (name, text, text)
            for name, text in (
                ("smollm2", "Hello there"),
                ("smollm2", "a < b"),
                ("smollm2", "a <tool_cat"),
                ("smollm2", "<tool_call>no"),
                ("smollm2", '<tool_call>[{"name": oh, my word'),
                ("smollm2", f"<tool_call>[{IT}]"),
                ("mistral", "[TOOL_CALLS] no"),
                ("llama", "Hello there"),
                ("llama", IT.replace("arguments", "parameters")),
                ("llama", 'So: {"name"'),
            )
        ),
        ("smollm2", "a <tool", "a"),
        ("smollm2", '<tool_call>[{"name": "now", "arg', ""),
        ("mistral", "a [TOOL_CAL", "a"),
        ("granite", '<|tool_call|>[{"name": "now", "arg', ""),
        ("llama", '{"name"', ""),
    ],
)
def test_text_waits_no_longer_than_it_must(name, text, early):
    out, calls, pieces = read(DIALECTS[name], [text])
    assert ("".join(pieces), out, calls) == (early, text, [])


def assert_reads(dialect, cases):
    """Compare texts, whole and by letters, with what comes out and the number of calls."""
    for text, out, num_calls in cases:
        for pieces in ([text], [*text]):
            actual, calls, _ = read(dialect, pieces)
            assert (actual, len(calls)) == (out, num_calls)


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "llama"])
def test_calls_in_thoughts_are_drafts(name):
    call = written(DIALECTS[name], [("now", {})])
    draft = f"<think>\nPerhaps {call}?\n</think>"
    assert_reads(
        DIALECTS[name],
        [
            (f"{draft}\n\n{call}", draft, 1),
            (f"I look.{call}{draft} Done.", f"I look.{draft} Done.", 1),
            (draft, draft, 0),
            (f"<think>{call}", f"<think>{call}", 0),
            (f"<thinks>{call}", "<thinks>", 1),
        ],
    )


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_thoughts_that_the_prompt_begins(dialect):
    call = written(dialect, [("now", {})])
    cases = [(f"{call}</think>\n{call}", f"{call}</think>", 1), (f" {call}", f" {call}", 0)]
    assert_reads(dialect._replace(thinks=True), cases)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_under_either_key_and_as_json_in_a_text(dialect, key):
    for arguments, expected in (
        ({"city": "Rome"}, {"city": "Rome"}),
        ('{"city": "Ro\\"me"}', {"city": 'Ro"me'}),
        ("", {}),
        *((wrong, None) for wrong in ('{"city": "Rome', "[1]", '"{}"', 7)),
    ):
        call = json.dumps({"name": "weather", key: arguments})
        text = f"{dialect.before}{call}{dialect.after}"
        for pieces in ([text], [*text]):
            out, calls, early = read(dialect, pieces)
            if expected is None:
                assert (out, calls) == (text, [])
            else:
                assert (out, [*map(said, calls)]) == ("", [("weather", expected)])
                assert early == calls


def test_one_call_where_no_more_are_wanted():
    text = written(SMOLLM2, [("now", {}), ("weather", {"city": "Rome"})])
    for parallel, names in ((True, ["now", "weather"]), (False, ["now"])):
        _, calls, _ = read(SMOLLM2, [text], parallel=parallel)
        assert [said(call)[0] for call in calls] == names
    text = '{"name": "now", "parameters": {}}'
    assert read(LLAMA, [f"{text}; {text}"])[0] == f"; {text}"


def test_ids_are_those_of_the_key():
    ids = [
        ToolParser(SMOLLM2, NAMES, key).push(written(SMOLLM2, [("now", {})]))[0]["id"]
        for key in ("a", "a", "b")
    ]
    assert ids[0] == ids[1] != ids[2]


# --- grammars


@pytest.fixture(scope="module")
def bytes_only():
    """A tokenizer whose tokens are bytes, as llguidance has it."""

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")

        def __call__(self, text):
            return list(text.encode() if isinstance(text, str) else text)

    return LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(tokenizer, grammar, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.text))
    assert grammar.kind == "lark"
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return (
        matcher.validate_tokens(ids) == len(ids)
        and matcher.consume_tokens(ids)
        and matcher.is_accepting()
    )


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_grammar_accepts_valid_calls_and_nothing_else(bytes_only, dialect):
    weather, now = (("weather", {"city": 'Rome "<tool_call>" é', "days": 3}), ("now", {}))
    required = call_grammar(TOOLS, "required", dialect)
    named = call_grammar(TOOLS, NOW, dialect)
    one = call_grammar(TOOLS, "required", dialect, parallel=False)

    def accepts_calls(grammar, *calls):
        return accepts(bytes_only, grammar, written(dialect, calls))

    for call in (weather, ("weather", {"city": ""}), now):
        assert accepts_calls(required, call)
        assert accepts_calls(named, call) is (call == now)
    for call in (
        ("weather", {}),
        ("weather", {"city": 1}),
        ("weather", {"city": "", "days": 10}),
        ("weather", {"city": "", "more": 1}),
        ("nothing", {}),
        ("now", {"a": 1}),
        ("now", []),
    ):
        assert not accepts_calls(required, call)
    for text in ("", "hello", written(dialect, [weather]) + " "):
        assert not accepts(bytes_only, required, text)
    has_several = bool(dialect.between)
    assert accepts_calls(required, weather, now) is has_several
    assert accepts_calls(required, *[now] * 8) is has_several
    assert not accepts_calls(required, *[now] * 9)
    assert not accepts_calls(one, weather, now)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_strict_tools_and_a_free_choice(bytes_only, dialect):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert [call_grammar(TOOLS, choice, dialect) for choice in (None, "auto", "none")] == [None] * 3
    assert call_grammar(strict, "none", dialect) is None
    right, wrong, other = (
        written(dialect, [call])
        for call in (("weather", {"city": "Rome"}), ("weather", {"city": 1}), ("now", {}))
    )
    for choice in (None, "auto"):
        free = call_grammar(strict, choice, dialect)
        for text in ("", "hello {\n world", "a < b [TOOL", right):
            assert accepts(bytes_only, free, text)
        for text in (wrong, other):
            assert not accepts(bytes_only, free, text)


@settings(max_examples=12)
@given(call_lists)
def test_what_a_grammar_accepts_is_read_as_calls(bytes_only, calls):
    schema = {"type": "object", "additionalProperties": True}
    tools = [function(name=name, parameters=schema) for name in NAMES]
    # llguidance takes the control character DEL in a string only if it is escaped.
    text = written(SMOLLM2, calls).replace("\x7f", "\\u007f")
    assert accepts(bytes_only, call_grammar(tools, "required", SMOLLM2), text)
    assert [*map(said, read(SMOLLM2, [text])[1])] == calls


@pytest.mark.parametrize("name", ["mistral", "granite", "phi4_mini", "hermes"])
def test_a_mark_that_is_a_special_token_is_forced_and_seen(name):
    """It is text of the answer, as one token; other special tokens are not."""
    dialect = DIALECTS[name]
    special = ["<s>", "</s>", "[INST]", dialect.mark, *filter(None, [dialect.end])]
    tokenizer = trained_smollm(["a"], 256, "tekken", special, (0, 1), add_bos=True)
    text = written(dialect, [("now", {})])
    ids = tokenizer.encode_with_special_tokens(text)
    assert ids[0] == 3
    matcher = Matcher(call_grammar(TOOLS, "required", dialect), tokenizer, (1,))
    decoder = TextDecoder(tokenizer, Prompt((0, 2), stop_ids=(1,)))
    parser = ToolParser(dialect, NAMES, "key")
    pieces = []
    for id in [*ids, 1]:
        allowed = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
        assert allowed[id]
        assert not allowed[[0, 2]].any()
        matcher.accept(id)
        pieces += parser.push(decoder.push(id))
    assert decoder.text == text
    assert [*map(said, pieces)] == [("now", {})]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}},
        {"not": {}},
        {"type": "object", "$ref": "#/$defs/a"},
    ],
)
def test_a_schema_that_cannot_be_served_is_refused(schema):
    tools = [function(parameters=schema)]
    check_tools(tools)
    with pytest.raises(UsageError, match=r"the grammar .* cannot be compiled"):
        Matcher(call_grammar(tools, "required", SMOLLM2), BytesTokenizer(), (1,))


# --- templates

CORPUS = ["the weather in Rome, please: 12 345 {} <tool_call> name arguments parameters\n"]
TOKENIZERS = {
    "smollm2": trained_smollm(CORPUS, 350),
    "qwen2_5_training": trained_smollm(CORPUS, 350),
}
TOKENIZERS |= dict.fromkeys(["llama3_1", "llama3_2"], trained_llama3(CORPUS, 350))
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
}
CONVERSATION = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": text} for text in ("In", "Rome?")]},
    ANSWER | {"tool_calls": [CALL], "refusal": None, "annotations": [], "audio": None},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sun": true}'},
    {"role": "assistant", "content": "It shines.", "tool_calls": None},
    {"role": "user", "content": "Thanks", "name": "Ann"},
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("tools", "more"),
    [
        (None, {}),
        (TOOLS, {}),
        (TOOLS, {"date_string": "1 May 2030", "tools_in_user_message": False}),
    ],
)
def test_templates_are_shown_what_transformers_shows_them(name, tools, more):
    tokenizer = TOKENIZERS[name]
    template = find_dialect(STOCK[name]).template
    messages = openai_messages(CONVERSATION)
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    (expected,), _ = render_jinja_template(
        [messages],
        chat_template=template,
        tools=tools,
        add_generation_prompt=True,
        bos_token=texts[tokenizer.bos_id],
        eos_token=texts[tokenizer.eos_id],
        **more,
    )
    variables = template_variables(tokenizer, messages, True, tools, more)
    assert render(template, **variables) == expected
    shown = '"name":"weather","description":"Theweather."' in re.sub(r"\s", "", expected)
    assert shown is bool(tools)


CALLERS = dict.fromkeys(("qwen2_5", "qwen3", "smollm3", "granite3_3", "phi4_mini"), "smollm2")
CALLERS |= {name: name for name in TOKENIZERS}
CALLERS |= dict.fromkeys(["mistral_v0.3", "mistral_nemo"], "smollm2")
"""The templates that are shown calls, and a tokenizer for each."""


def rendered_calls(name, calls):
    """The prompt behind an answer of calls, whose results are there."""
    results = ({"role": "tool", "content": "22", "tool_call_id": call["id"]} for call in calls)
    messages = [{"role": "user", "content": "?"}, ANSWER | {"tool_calls": calls}, *results]
    tokenizer = TOKENIZERS[CALLERS[name]]
    variables = template_variables(tokenizer, openai_messages(messages), True, TOOLS)
    return render(find_dialect(STOCK[name]).template, **variables)


@pytest.mark.parametrize("name", CALLERS)
def test_calls_in_a_template_are_as_models_write_them(name):
    """An answer's calls, given back as OpenAI's clients do, stand in the next prompt as the model
    wrote them. Mistral's templates add ids, which have nine letters and digits."""
    its = find_dialect(STOCK[name])
    calls = [("weather", {"city": "Rome", "days": 2}), ("now", {})][: 2 if its.between else 1]
    text = written(its, calls)
    given_back = read(its, [text])[1]
    actual = rendered_calls(name, given_back)
    if name.startswith("mistral"):
        ids = [call["id"][-9:] for call in given_back]
        assert ids == re.findall(r'"id": "([a-z0-9]{9})"', actual)
        assert ids == re.findall(r'"call_id": "([a-z0-9]{9})"', actual)
        actual = re.sub(r', "id": "[a-z0-9]{9}"', "", actual)
    assert text in actual
    assert read(its, [actual[actual.index(text) :][: len(text)]])[1] == given_back


@pytest.mark.parametrize("id", ["a", "call_1-2", "abcdefghi", "toolu_01A09q90qw90lq917835lq9"])
def test_mistrals_templates_are_given_ids_of_nine_letters(id):
    text = rendered_calls("mistral_v0.3", [CALL | {"id": id}])
    (first,) = re.findall(r'"id": "([A-Za-z0-9]{9})"', text)
    assert re.findall(r'"call_id": "([A-Za-z0-9]{9})"', text) == [first]
    assert first == id or id != "abcdefghi"


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", [name for name in CALLERS if "llama" not in name])
def test_templates_without_calls_are_the_models_own(name, prompt):
    roles = ("user", "assistant", "tool", "user", "assistant")[: 5 if name == "smollm2" else 1]
    turns = [{"role": role, "content": f"turn {role}\n "} for role in roles]
    for system in ([], [{"role": "system", "content": "Be é."}]):
        for count in range(1, len(turns) + 1):
            tokenizer = TOKENIZERS[CALLERS[name]]
            variables = template_variables(tokenizer, system + turns[:count], prompt)
            texts = [
                render(text, **variables)
                for text in (find_dialect(STOCK[name]).template, STOCK[name])
            ]
            assert texts[0] == texts[1]


# --- bad input


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        *((tools, "tools must be a list of 1 to 128 functions") for tools in ([], {}, TOOLS * 65)),
        *(
            ([tool], 'tool 0 must be {"type": "function"')
            for tool in ("now", {"type": "web_search"}, {"type": "function", "function": "now"})
        ),
        ([*TOOLS, function()], "tool 1 must be .* with a name of its own"),
        *(
            (
                [function(name=name)],
                "a name of its own, 1 to 64 letters, digits, underscores and hyphens",
            )
            for name in ("a b", "a" * 65, 7, "now\n")
        ),
        (
            [function(description=7)],
            "the tool now has a wrong 'description': its fields are name, description, s",
        ),
        ([function(strict="yes")], "the tool now has a wrong 'strict'"),
        ([function(parameters=[])], "the tool now has a wrong 'parameters'"),
        ([function(more=1)], "the tool now has a wrong 'more'"),
        (
            [function(parameters={"type": "string"})],
            "a wrong 'parameters': .*, the schema of an object",
        ),
    ],
)
def test_tools_that_are_none(tools, said):
    with pytest.raises(UsageError, match=said):
        check_tools(tools)


@pytest.mark.parametrize(
    "choice",
    [
        "sometimes",
        {"type": "function", "function": {"name": "nothing"}},
        {"type": "function", "function": {"name": ["now"]}},
        {"type": "allowed_tools", "allowed_tools": {}},
        ["auto"],
    ],
)
def test_choices_that_are_none(choice):
    said = 'tool_choice must be "auto", "none", "required" or .* the name of one of the tools'
    with pytest.raises(UsageError, match=said):
        check_tools(TOOLS, choice)


def test_tools_that_are_right():
    for choice in (None, "auto", "none", "required", NOW):
        check_tools(TOOLS, choice)
        check_tools([function(description=None, parameters=None, strict=None)], choice)
        check_tools([function(parameters={}, strict=True)], choice)


BOTH = "it must have just 'role' and 'content'"
NO_TEXT = "message 0 has a part that is not text"
NO_CALLS = "message 0 has tool_calls that are none: each must have an id"
RESULT = {"role": "tool", "content": "1"}


def saying(content, **fields):
    return [{"role": "user", "content": content} | fields]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "there are no messages"),
        (["hello"], "message 0 is of type str; it must have a role and a content"),
        (saying(None), f"message 0 has 'role'; {BOTH}"),
        ([{"role": "assistant"}], BOTH),
        (saying(7), "message 0 has a content of type int, not text"),
        (saying([{"type": "image_url", "image_url": {}}]), NO_TEXT),
        (saying([{"type": "text"}]), NO_TEXT),
        (saying(["text"]), NO_TEXT),
        (saying("a", role=["user"]), "has the role"),
        (saying("a", mood="sad"), BOTH),
        (saying("a", name=7), "message 0 has 'role', 'content', 'name'; it must"),
        (saying("a", tool_calls=[CALL]), BOTH),
        ([ANSWER | {"audio": {"id": "a"}}], f"message 0 has 'role', 'audio', 'content'; {BOTH}"),
        *(
            ([ANSWER | {"tool_calls": calls}], NO_CALLS)
            for calls in ("now", 7, [CALL | {"id": 7}], [{"id": "a", "type": "function"}])
        ),
        ([RESULT | {"tool_call_id": "call_1"}], "message 0 answers no call"),
        ([*CONVERSATION[:3], RESULT], "message 3 answers no call"),
        ([*CONVERSATION[:3], RESULT | {"tool_call_id": []}], "message 3 answers no call"),
    ],
)
def test_messages_of_openai_that_are_none(messages, said):
    with pytest.raises(UsageError, match=said):
        openai_messages(messages)


def test_null_of_an_assistant_is_an_empty_text():
    """As clients give an answer back that had no text; in a file it stays what it is."""
    messages = [*saying("a"), ANSWER]
    assert openai_messages(messages)[1] == {"role": "assistant", "content": ""}
    with pytest.raises(UsageError, match=BOTH):
        openai_messages(messages, is_request=False)


@pytest.mark.parametrize(
    "arguments", ["", "{}", "[]", "{", "7", "null", {}, None, "[" * 100_000, "9" * 5000]
)
def test_arguments_are_an_object_as_json(arguments):
    call = CALL | {"function": {"name": "now", "arguments": arguments}}
    messages = [ANSWER | {"tool_calls": [call]}]
    if arguments in ("", "{}"):
        (answer,) = openai_messages(messages)
        assert answer["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
    else:
        with pytest.raises(UsageError, match="arguments, an object as JSON"):
            openai_messages(messages)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "add_generation_prompt", "documents", "add_bos"]
)
def test_a_template_is_given_nothing_twice(name):
    with pytest.raises(
        UsageError, match=f"the chat template is given '{name}' in any case: leave it out"
    ):
        template_variables(TOKENIZERS["smollm2"], [], True, None, {name: 1})


@pytest.mark.real_weights
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", True), ("required", False), (NOW, True)]
)
def test_smollm2_calls_what_it_must(choice, parallel):
    """SmolLM2 would rather talk.

    Where a call is required, one comes, with the arguments that the question gives.
    """
    model = jllama.load(real_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert find_dialect(model.chat_template) == SMOLLM2
    tokenizer = model.text_tokenizer
    messages = openai_messages(saying("What is the weather in Paris for the next 3 days?"))
    text = render(SMOLLM2.template, **template_variables(tokenizer, messages, True, TOOLS))
    (completion,) = jllama.generate(
        model,
        tokenizer.encode_with_special_tokens(text),
        max_new_tokens=99,
        temperature=0,
        stop_ids=end_of_turn_ids(tokenizer, model.stop_ids),
        grammar=call_grammar(TOOLS, choice, SMOLLM2, parallel),
    )
    text, calls, _ = read(SMOLLM2, [completion.text])
    assert (text, completion.finish_reason) == ("", "stop_id")
    if choice == NOW:
        assert [*map(said, calls)] == [("now", {})]
    else:
        assert said(calls[0])[0] == "weather"
        assert said(calls[0])[1]["city"] == "Paris"
