"""Texts that must match: masks against trying every token, texts against ``re`` and ``jsonschema``,
nasty grammars.
"""

import concurrent.futures
import json
import re
import string
import sys
from unittest import mock

import jax
import jsonschema
import llguidance
import numpy as np
import pytest
from helpers import trained_llama3, trained_smollm
from helpers_real import real_file
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.generation import grammar as module
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.generate import generate, stream
from jllama.generation.grammar import Grammar, Matcher
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.lab.checks import random_params
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.loading import as_huggingface, load_tokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

BYTES = BytesTokenizer()
TEXTS = [
    '{"name": "Ada", "age": 36, "tags": ["a", "b"]}\n',
    "the cat sat on the mat 2024-01-31 true false null\n",
    "né 世 🙂\n",
]
PIECES = train_sentencepiece(TEXTS * 9, 340)
TOKENIZERS = {
    "bytes": BYTES,
    "sentencepiece": PIECES,
    "byte fallback": as_huggingface(PIECES),
    "byte-level": trained_smollm(TEXTS * 9, 340),
    "tiktoken": trained_llama3(TEXTS * 9, 300),
}
CONFIG = LlamaConfig(vocab_size=270, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=256)
PARAMS = jax.jit(decode_layout, static_argnums=1)(random_params(CONFIG, 0), CONFIG)
MODEL = LanguageModel(CONFIG, PARAMS, BYTES)
ROWS, NEW = 8, 120
REGEXES = [
    r"[a-c]{1,3}(, [a-c]{1,3})*",
    r"(the |cat |né|世|🙂){0,5}",
    r"[0-9]{4}-[0-9]{2}|true|false",
    r"(a|ab)(bc|c)?[^x]",
]
DATE = Grammar("regex", r"[0-9]{4}-[0-9]{2}")
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def flags(words, size):
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)


def ids_of(matcher, tokenizer):
    words = matcher.allowed()
    assert words.dtype == np.int32
    assert len(words) == -(-tokenizer.vocab_size // 32)
    assert not flags(words, None)[tokenizer.vocab_size :].any()
    return np.flatnonzero(flags(words, tokenizer.vocab_size)).tolist()


def walk(matcher, tokenizer, seed, steps=30):
    """Masks and tokens of a text of random tokens."""
    random, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        allowed = ids_of(matcher, tokenizer)
        token = int(random.choice(allowed))
        matcher.accept(token)
        seen.append((allowed, token))
    return seen


def matches(regex, text):
    try:
        return bool(re.fullmatch(regex, text.decode()))
    except UnicodeDecodeError:  # it ends within a character
        return False


# Masks


@every_tokenizer
@settings(max_examples=5)
@given(regex=st.sampled_from(REGEXES), seed=st.integers(0, 2**32 - 1))
def test_a_mask_holds_the_tokens_that_can_come_next_and_where_the_text_matches_the_stop_ids(
    tokenizer, regex, seed
):
    """Tried one by one; whether a text matches, and that each can still come to match, is what
    ``re`` says.
    """
    stop_ids = (tokenizer.eos_id, tokenizer.bos_id)
    matcher = Matcher(Grammar("regex", regex), tokenizer, stop_ids)
    random, pieces = np.random.default_rng(seed), []
    text_of = tokenizer.pieces
    nonempty = [id for id, text in enumerate(text_of) if text]
    for _ in range(40):
        allowed = ids_of(matcher, tokenizer)
        ordinary = [id for id in allowed if id not in stop_ids]
        assert ordinary == [id for id in nonempty if matcher._matcher.validate_tokens([id])]
        may_end = len(set(stop_ids) & set(allowed)) == 2
        assert may_end == matches(regex, b"".join(pieces))
        token = int(random.choice(allowed))
        matcher.accept(token)
        if token in stop_ids:
            break
        pieces.append(text_of[token])


@settings(max_examples=5)
@given(
    seeds=st.lists(st.integers(0, 99), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_matchers_share_nothing(seeds, order):
    """Each goes its way as alone, whatever the others of the same grammar have taken meanwhile,
    also in threads.
    """
    grammar = Grammar("json_schema", '{"type": "array", "items": {"type": ["string", "integer"]}}')

    def new():
        return Matcher(grammar, PIECES, (PIECES.eos_id,))

    alone = [walk(new(), PIECES, seed) for seed in seeds]
    matchers, seen = [new() for _ in seeds], [[] for _ in seeds]
    turns = [row for row in range(len(seeds)) for _ in alone[row]]
    order.shuffle(turns)
    for row in turns:
        allowed, (_, token) = ids_of(matchers[row], PIECES), alone[row][len(seen[row])]
        matchers[row].accept(token)
        seen[row].append((allowed, token))
    assert seen == alone
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda seed: walk(new(), PIECES, seed), seeds)] == alone


def test_stop_ids_are_allowed_where_the_text_may_end_and_nothing_else_behind_one():
    a, b, c = BYTES.encode("abc")
    # A token of text may be a stop id, too.
    matcher = Matcher(Grammar("regex", "ab?c*"), BYTES, (2, 0, c))
    assert ids_of(matcher, BYTES) == [a]
    for token, allowed in ((a, [0, 2, b, c]), (b, [0, 2, c]), (2, [0, 2, c]), (a, [0, 2, c])):
        matcher.accept(token)
        assert ids_of(matcher, BYTES) == allowed


def test_a_text_that_went_wrong_ends():
    matcher = Matcher(DATE, BYTES, (2,))
    assert not matcher.failed
    matcher.accept(BYTES.encode("x")[0])
    assert ids_of(matcher, BYTES) == [2]
    assert matcher.failed


def test_a_text_that_comes_to_a_limit_does_not_end_as_if_it_matched(monkeypatch):
    limits = llguidance.LLParserLimits
    monkeypatch.setattr(
        llguidance, "LLParserLimits", lambda **given: limits(**given | {"max_items_in_row": 100})
    )
    schema = {"type": "object", "properties": {f"k{n}": {} for n in range(60)}}
    grammar = Grammar("json_schema", json.dumps(schema))
    limited, free = drawn([grammar, None])
    assert (limited.finish_reason, len(limited.text) < 9) == ("length", True)
    assert free == drawn([None, None])[1]


@pytest.mark.parametrize(
    "lark",
    ["start: <[1]> | <[5]>", "start: <[*]>", '%llguidance {"no_forcing": false}\nstart: "true"'],
)
def test_special_tokens_are_no_text_and_nothing_is_forced(lark):
    allowed = ids_of(Matcher(Grammar("lark", lark), BYTES, (2,)), BYTES)
    assert not {0, 1} & set(allowed)
    assert not {5, *BYTES.encode("t")}.isdisjoint(allowed)


@pytest.mark.real_weights
@pytest.mark.parametrize("name", ["llama3_tokenizer.model", "mistral_tokenizer.model"])
def test_released_tokenizers_write_json(name):
    tokenizer = load_tokenizer(real_file(name))
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}}
    schema |= {"minItems": 2, "maxItems": 5}
    grammar = Grammar("json_schema", json.dumps(schema))
    for seed in range(5):
        matcher = Matcher(grammar, tokenizer, (tokenizer.eos_id,))
        seen = walk(matcher, tokenizer, seed, 200)
        ids = [token for _, token in seen if token != tokenizer.eos_id]
        assert len(ids) < 200
        for allowed, _ in seen[: len(ids)]:
            assert not set(allowed) - {tokenizer.eos_id} & set(tokenizer.special_tokens.values())
        jsonschema.validate(json.loads(tokenizer.decode(ids)), schema)


# Grammars that cannot be served

CHAIN = {f"{number}": {"$ref": f"#/$defs/{number + 1}"} for number in range(20_000)}
LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
EITHER = [{"anyOf": [{"properties": {f"{c}{n}": {}}} for c in "ab"]} for n in range(20)]
NASTY = {
    "json_schema": {
        "no text": "",
        "no JSON": '{"type": ',
        "no schema": "[1]",
        "no such type": '{"type": "text"}',
        "unknown keyword": '{"type": "integer", "not": {"const": 1}}',
        "unknown keyword, lenient by its own word": '{"x-guidance": {"lenient": true}, "if": {}}',
        "unknown format": '{"type": "string", "format": "nonsense"}',
        "impossible": '{"type": "string", "minLength": 2, "maxLength": 1}',
        "false": '{"type": "object", "properties": {"a": false}, "required": ["a"]}',
        "a number that is rounded": '{"enum": [18014226710785025]}',
        "a huge one": f'{{"maximum": 1{"0" * 5000}}}',
        "more are required": '{"type": "object", "minProperties": 2, "required": ["a"]}',
        "property names": '{"propertyNames": {"maxLength": 3}}',
        "a class in a class in a class": '{"pattern": "[^a[b[\\"]]]"}',
        "wrong alternatives to a date": '{"format": "date", "allOf": 5}',
        "itself": '{"$ref": "#"}',
        "a loop": json.dumps({"$ref": "#/$defs/a", "$defs": LOOP}),
        "a chain that no stack holds": json.dumps({"$ref": "#/$defs/0", "$defs": CHAIN}),
        "elsewhere": '{"$ref": "http://127.0.0.1:9/a.json"}',
        "a file": '{"$ref": "file:///etc/hostname"}',
        "a megabyte": json.dumps({"properties": {f"{n:08}": {} for n in range(50_000)}}),
        "deep": '{"items":' * 10_000 + "{}" + "}" * 10_000,
        "deep data": '{"enum": [' + "[" * 10_000 + "]" * 10_000 + "]}",
        "two to the twentieth": json.dumps({"allOf": EITHER}),
        "a lone surrogate": '{"const": "\ud800"}',
        "an escaped one": '{"const": "\\ud800"}',
    },
    "regex": {
        "open": "(a",
        "look-ahead": "(?=a)b",
        "back-reference": r"(a)\1",
        "parentheses": "(" * 20_000 + "a" + ")" * 20_000,
        "surrogate": "\ud800",
    },
    "lark": {
        "no rules": "",
        "unknown rule": "start: other",
        "special token": "start: </s> <s>",
        "rules": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(20_000)),
        "nested": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "deep": "start: %json " + '{"items":' * 10_000 + "{}" + "}" * 10_000,
        "a number that is rounded": 'start: %json {"const": 18014226710785025}',
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in NASTY for name in NASTY[kind]])
def test_what_cannot_be_compiled_is_refused_in_a_sentence(kind, name):
    message = f"^the grammar \\({kind}\\) cannot be compiled, .*: ."
    with pytest.raises(UsageError, match=message) as caught:
        Matcher(Grammar(kind, NASTY[kind][name]), BYTES, (2,))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


MINUTES = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(60)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar",
    [("json_schema", json.dumps(MINUTES)), ("regex", "a*" * 50_000)],  # minutes, five gigabytes
    ids=["patterns", "stars"],
)
def test_what_would_take_minutes_is_given_up(grammar):
    with pytest.raises(UsageError, match="it takes over 2 s or 1 GiB, or is nested too deep"):
        Matcher(Grammar(*grammar), BYTES, (2,))


@pytest.mark.parametrize(
    "grammar",
    [
        ("regex", "(a{1,1000}){1,1000}"),
        ("regex", ".*a.{500}"),
        ("regex", "((a*)*)*b|(.*.*.*.*.*a){50}"),
        ("json_schema", '{"type": "string", "minLength": 1000000000}'),
        ("json_schema", '{"type": "array", "minItems": 1000000}'),
        ("lark", 'start: start start start | "a" | ""'),
    ],
)
def test_what_explodes_is_refused_or_goes_on(grammar):
    try:
        matcher = Matcher(Grammar(*grammar), BYTES, (2,))
    except UsageError:
        return
    assert all(allowed for allowed, _ in walk(matcher, BYTES, 0, 100))


def test_a_grammar_has_a_greatest_length():
    Matcher(Grammar("regex", "a" * module.MAX_CHARACTERS), BYTES, (2,))
    with pytest.raises(UsageError, match="it has 131073 characters, and at most 131072 are served"):
        Matcher(Grammar("regex", "a" * (module.MAX_CHARACTERS + 1)), BYTES, (2,))


def test_what_is_kept_is_bounded_and_used_last(monkeypatch):
    """A few long grammars push the others out, a long one that is used all the time stays."""
    compile_ = mock.Mock(side_effect=module._compile)
    monkeypatch.setattr(module, "_compile", compile_)
    monkeypatch.setattr(module, "_cache", {})
    monkeypatch.setattr(module, "MAX_CACHED_CHARACTERS", 3000)
    for char in "abcdefg":
        for text in ("z" * 1000, char * 1000):
            assert Matcher(Grammar("regex", text), BYTES, (2,)).allowed().any()
        assert sum(len(kept.text) for kept, _ in module._cache) <= 3000
    assert "".join(call.args[0].text[0] for call in compile_.call_args_list) == "zabcdefg"
    assert [kept.text[0] for kept, _ in module._cache] == ["f", "z", "g"]


def test_wrong_use(monkeypatch):
    with pytest.raises(UsageError, match="there is no kind of grammar regexp; did you mean regex"):
        Matcher(Grammar("regexp", "a"), BYTES, (2,))
    with pytest.raises(UsageError, match="ends with a stop id, and there is none"):
        generate(MODEL, "a", grammar=DATE, stop_ids=())
    with pytest.raises(UsageError, match="banned_ids could leave nothing of what a grammar allows"):
        generate(MODEL, "a", grammar=DATE, banned_ids=(5,))
    with pytest.raises(UsageError, match="speculate guesses several tokens"):
        generate(MODEL, "a", grammar=DATE, speculate=3)
    with pytest.raises(UsageError, match="cannot be compiled"):
        encode_prompt(MODEL, Prompt("a", grammar=Grammar("regex", "(")))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    message = r"a grammar needs the package llguidance: pip install 'jllama\[grammar\]'"
    with pytest.raises(JllamaError, match=message):
        Matcher(DATE, BytesTokenizer(), (2,))


def accepts(schema, text, kind="json_schema"):
    """Whether a text, in JSON's form, may be written and end."""
    grammar = json.dumps(schema)
    if kind == "lark":  # as the calls of tools are written
        grammar = f"start: %json {grammar}"
    matcher = Matcher(Grammar(kind, grammar), BYTES, (2,))
    for token in BYTES.encode(text):
        if token not in ids_of(matcher, BYTES):
            return False
        matcher.accept(token)
    return 2 in ids_of(matcher, BYTES)


CLASSES = [
    r"[^\"]",
    r"[^\\]",
    r"[^\"\\\n]",
    r"[^\]\"-]",
    r"[\x00-!#-~]",
    r"\\\[",
    r"[^\x00]",
    ".",
    r"\D",
]
CLASSES = {name: name for name in CLASSES} | {
    r"[^]\"]": r"[^\]\"]",
    r"(?:[^\"\s]|\s)": r"[^\"]",
    r"[[:cntrl:]!]": r"[\x00-\x1f\x7f!]",
    r"\p{Cc}": r"[\x00-\x1f\x7f]",
    r"\P{P}": r"[^!\"#%&'()*,\-./:;?@\[\\\]_{}]",
}
"""Classes of llguidance's expressions, and of ``re``'s."""


@pytest.mark.parametrize("expression", CLASSES)
def test_an_escape_is_the_character_that_it_stands_for(expression):
    """The class has the characters that ``re`` says, however JSON writes them, without U+0000."""
    chars = string.punctuation + "aZ7 \t\n\r\x01\x1f" + ("" if "00]" in expression else "é")
    schema = {"type": "string", "pattern": f"^{expression}$"}
    for char in chars:
        forms = {json.dumps(char), json.dumps(char, ensure_ascii=False), f'"\\u{ord(char):04x}"'}
        allowed = {form for form in forms if accepts(schema, form)}
        if re.fullmatch(CLASSES[expression], char):
            assert json.dumps(char, ensure_ascii=False) in allowed
        else:
            assert not allowed


EXACT = {"type": "object", "patternProperties": {'^[^"]+$': {"const": {"pattern": '[^"]'}}}}


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"format": "time"}, "03:33:59-11:45 23:59:59.5Z", "03:33:60-11:45 23:59:60Z"),
        (
            {"format": "date-time", "pattern": "^2"},
            "2024-02-29T00:00:59Z 2000-12-31t01:02:03+01:00",
            "2024-02-29T00:00:60Z 2023-02-29T00:00:00Z 1999-01-01T00:00:00Z",
        ),
        (
            {"format": "date", "allOf": [{"maxLength": 10}]},
            "2024-02-29 2000-02-29 1900-02-28 2023-10-31 2023-01-30 2023-12-01",
            "2023-02-29 1900-02-29 2023-02-30 2023-04-31 2023-00-01 2023-13-01",
        ),
    ],
)
def test_formats(schema, allowed, refused, kind):
    texts = [*allowed.split(), *refused.split()]
    actual = [text for text in texts if accepts({"type": "string"} | schema, f'"{text}"', kind)]
    assert actual == allowed.split()


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_names_and_data_in_schemas(kind):
    """Keywords without an effect are no reason to refuse; data that looks like a schema stays."""
    assert accepts(EXACT, '{"a": {"pattern": "[^\\"]"}}', kind)
    assert not accepts(EXACT | {"additionalProperties": False}, r'{"a\"": 1}', kind)
    named = {"properties": {"const": {"pattern": r'^[^"]$'}, "pattern": {"type": "integer"}}}
    assert accepts(named, '{"const": "a", "pattern": 1}', kind)
    assert not accepts(named, r'{"const": "\""}', kind)
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    without_effect = {"uniqueItems": False, "unevaluatedProperties": {}}
    for names in ({"type": "string"}, True):
        schema |= without_effect | {"propertyNames": names}
        assert accepts({"type": "object", "properties": {"a": schema}}, '{"a": {}}', kind)


# Texts


def drawn(grammar_of_rows, seed=0, max_new_tokens=NEW, **settings):
    """Completions of a batch that has as many rows whatever is asked: the same program."""
    prompts = []
    for row, grammar in enumerate(grammar_of_rows):
        sampling = SamplingParams(seed=seed + row, **settings)
        prompts.append(Prompt("x", sampling, max_new_tokens, grammar=grammar))
    others = [Prompt("x", SamplingParams(seed=seed), NEW)] * (ROWS - len(prompts))
    return generate(MODEL, [*prompts, *others])[: len(prompts)]


def test_texts_match_and_nothing_compiles_for_another_grammar():
    regexes = [*REGEXES, r"[ -~]{3,9}", r"<b>(.|\n)*</b>", "", "(a|b)*"]
    grammars = [Grammar("regex", regex) for regex in regexes]
    completions = drawn(grammars)
    programs = steps.decode_block._cache_size()
    completions += drawn(grammars[::-1], 50, top_p=0.9, repetition_penalty=1.2)
    assert steps.decode_block._cache_size() == programs
    num_finished = 0
    for regex, completion in zip(regexes + regexes[::-1], completions, strict=True):
        if completion.finish_reason == "stop_id":
            num_finished += 1
            assert re.fullmatch(regex, completion.text)
    assert num_finished > 10


def test_greedy_texts_match_too():
    (completion,) = drawn([DATE], temperature=0.0)
    assert completion.finish_reason == "stop_id"
    assert re.fullmatch(DATE.text, completion.text)


def test_rows_without_a_grammar_do_not_know_of_it():
    mixed, free = drawn([None, DATE, None]), drawn([None, None, None])
    assert [mixed[0], mixed[2]] == [free[0], free[2]]  # log-probabilities, too
    assert mixed[1] == drawn([None, DATE, DATE])[1]
    assert re.fullmatch(DATE.text, mixed[1].text)


def test_a_stream_is_what_is_made_whole():
    grammar = Grammar("regex", "[a-f]{5,20}")
    (whole,) = drawn([grammar], seed=3)
    engine = Engine(MODEL, ROWS)  # whose programs are those of a batch
    pieces = stream(MODEL, "x", seed=3, grammar=grammar, max_new_tokens=NEW, engine=engine)
    assert "".join(pieces) == whole.text
    assert re.fullmatch("[a-f]{5,20}", whole.text)


def test_a_text_that_is_cut_says_so():
    (completion,) = drawn([DATE], max_new_tokens=6)
    assert completion.finish_reason == "length"
    assert re.fullmatch("[0-9]{4}-[0-9]", completion.text)


def fields(**strategies):
    strategies = {
        name: value if hasattr(value, "map") else st.just(value)
        for name, value in strategies.items()
    }
    return st.fixed_dictionaries(strategies)


SCALAR = {"type": ["string", "integer", "null", "boolean"], "maxLength": 5}
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]
PATTERNS = ["^[a-z]{2,5}$", "^[0-9]+$", "^(ab|cd)?$", "x{1,3}$"]
leaves = st.one_of(
    fields(type=st.sampled_from(["null", "boolean", "number", "integer"])),
    fields(type="string", minLength=st.integers(0, 3), maxLength=st.integers(3, 6)),
    fields(type="integer", minimum=st.integers(-99, 3), exclusiveMaximum=st.integers(5, 10**6)),
    fields(type="number", exclusiveMinimum=st.integers(-9, 0), maximum=st.integers(1, 9)),
    fields(type="string", format=st.sampled_from(FORMATS)),
    fields(type="string", pattern=st.sampled_from(PATTERNS)),
    fields(type=st.lists(st.sampled_from(["null", "boolean", "integer"]), min_size=1, unique=True)),
    fields(enum=from_schema({"type": "array", "minItems": 1, "maxItems": 3, "items": SCALAR})),
    fields(const=from_schema({"type": "array", "maxItems": 2, "items": SCALAR})),
)


def nested(inner):
    """Objects, arrays and alternatives of schemas."""
    required = st.lists(st.sampled_from("ab"), unique=True)
    properties = fields(a=inner, b=inner) | fields(a=inner, b=inner, **{'é "\\\n': inner})
    return st.one_of(
        fields(type="object", properties=properties, required=required, additionalProperties=False),
        fields(type="object", additionalProperties=inner, maxProperties=2),
        fields(type="array", items=inner, minItems=st.integers(0, 1), maxItems=st.integers(1, 3)),
        fields(type="array", prefixItems=st.lists(inner, min_size=1, max_size=2), items=False),
        fields(anyOf=st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(leaves, nested, max_leaves=5)
schemas |= fields(**{"$ref": "#/$defs/it", "$defs": fields(it=schemas)})


@settings(max_examples=4)
@given(schemas=st.lists(schemas, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 2**31))
def test_a_finished_answer_is_json_that_its_schema_allows(schemas, seed):
    asked = [Grammar("json_schema", json.dumps(schema)) for schema in schemas]
    for grammar in asked:
        try:
            Matcher(grammar, BYTES, (2,))
        except UsageError:
            assume(False)
    num_finished = 0
    for schema, completion in zip(schemas, drawn(asked, seed), strict=True):
        assert completion.finish_reason in ("stop_id", "length", "context")
        if completion.finish_reason == "stop_id":
            num_finished += 1
            answer = json.loads(completion.text)
            jsonschema.validate(answer, schema, jsonschema.Draft202012Validator)
    assert num_finished >= ROWS // 2
