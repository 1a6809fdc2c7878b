"""``sample.py`` and ``doctor`` on the small run."""

import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from hypothesis import given
from hypothesis import strategies as st

import jllama
from jllama.commands import cli, prompts_file
from jllama.commands.sample import SampleOptions
from jllama.core.config import LlamaConfig
from jllama.formats.receipt import weights_fingerprint
from jllama.formats.registry import load
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.models import oracle
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.base import BytesTokenizer

pytestmark = pytest.mark.usefixtures("loads_once")


@pytest.fixture
def sample(small_run, capfd):
    def run(*arguments):
        code = cli.run("sample", ["--checkpoint", str(small_run.folder), *map(str, arguments)])
        printed = capfd.readouterr()
        assert code == 0, printed.err
        return printed.out

    return run


def test_the_script_continues_the_prompt_on_stdout(small_run, workshop, sample):
    arguments = ["--prompt", "the quick", "--max_new_tokens", "12"]
    done = workshop.finish(
        workshop.start("sample.py", "--checkpoint", small_run.folder, *arguments)
    )
    assert done.code == 0, done.err
    assert done.out.startswith("the quick")
    assert len(done.out) > len("the quick\n")
    lines = (small_run.folder / "metrics.jsonl").read_text().splitlines()
    assert done.err == f"{small_run.folder}, step {json.loads(lines[-1])['best_step']}\n"
    assert sample(*arguments) == done.out  # the same seed, in another process


def test_the_text_is_what_the_library_gives(small_run, sample):
    model = load(small_run.folder)
    settings = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
    expected = generate(model, ["fox "], settings, max_new_tokens=20)[0].text
    assert sample("--prompt", "fox ", "--max_new_tokens", 20, "--seed", 5) == f"fox {expected}\n"


@pytest.mark.slow
def test_every_option_changes_something(sample):
    plain = ("--prompt", "the ", "--max_new_tokens", 20)
    text = sample(*plain)
    assert sample(*plain) == text
    words = "--seed 1,--temperature 3,--temperature 0,--top_k 1,--top_p 0.05,--max_new_tokens 5"
    words += ",--min_p 0.9,--repetition_penalty 9,--presence_penalty 9,--frequency_penalty 9"
    words += ",--step 15,--echo false,--logprobs,--json,-n 2"
    changes = [change.split() for change in words.split(",")]
    changes += [
        ("--logit_bias", '{"35": 50}'),
        ("--banned_ids", json.dumps([3 + byte for byte in text[4:].encode()])),
        ("--stop", text[8]),
        ("--stop", json.dumps(["never", text[8]])),
        ("--stop_ids", json.dumps([3 + ord(text[9])])),
        ("--prompt", "fox "),
    ]
    for change in changes:
        assert sample(*plain, *change) != text, change
    assert sample(*plain, "--quantize", "int8", "--logprobs") != sample(*plain, "--logprobs")
    assert sample(*plain, "--speculate", 3) == text
    greedy = sample(*plain, "--temperature", 0)
    assert sample(*plain, "--top_k", 1) == greedy
    assert sample(*plain, "--temperature", 0, "--seed", 1) == greedy
    assert sample(*plain, "--step", 0) == text


def test_special_tokens_that_a_prompt_or_a_stop_spells_out(sample, complete_file):
    """They are tokens, unless those of the prompt should not be; a line may set other stops."""
    a, b, *plain = BytesTokenizer().encode("aba</s>b")
    options = ("--max_new_tokens", 5, "--echo", "true", "--json", "--logprobs")
    for option, ids in (("true", [1, a, 2, b]), ("false", [1, *plain])):
        line = sample("--prompt", "a</s>b", *options, "--parse_special", option)
        actual = [token["id"] for token in json.loads(line)["tokens"]]
        assert actual[: len(ids)] == ids
    forced = ("--max_new_tokens", 3, "--logit_bias", '{"0": 1000}', "--stop", "<unk>")
    assert json.loads(sample("--prompt", "a", *forced, "--json"))["finish_reason"] == "stop_id"
    _, results, _ = complete_file(*forced)
    is_stopped = [result["finish_reason"] == "stop_id" for result in results]
    assert is_stopped == [True, True, False, False]


def test_max_new_tokens_is_honored(sample):
    """Greedy text only grows with it; every token is a byte here, and 0 fills the context of 32."""
    greedy = ("--prompt", "the ", "--temperature", 0)
    short, long = (sample(*greedy, "--max_new_tokens", count) for count in (7, 27))
    assert long.startswith(short.rstrip("\n"))
    assert (len(short), len(long)) == (len("the \n") + 7, len("the \n") + 27)
    assert sample(*greedy) == long


def test_echo_json_and_log_probabilities(small_run, sample):
    plain = ("--prompt", "the ", "--max_new_tokens", 6, "--seed", 4)
    text = sample(*plain).removesuffix("\n")
    assert sample(*plain, "--echo", "false") == text[4:] + "\n"
    actual = json.loads(sample(*plain, "--json"))
    reason = {"prompt": "the ", "seed": 4, "finish_reason": "length", "new_tokens": 6}
    assert actual == reason | {"text": text[4:]}
    actual = json.loads(sample(*plain, "--json", "--echo", "--logprobs"))
    assert actual["text"] == text
    tokens = actual["tokens"]
    assert "".join(token["text"] for token in tokens) == text
    assert tokens[0] == {"id": 1, "text": "", "log_prob": None}  # BOS
    ids = [token["id"] for token in tokens]
    logits = np.asarray(load(small_run.folder)(jnp.array([ids])))[0].astype(np.float64)
    expected = [np.log(oracle.softmax(row))[id] for row, id in zip(logits, ids[1:], strict=False)]
    np.testing.assert_allclose([token["log_prob"] for token in tokens[1:]], expected, atol=1e-4)
    table = sample(*plain, "--logprobs")
    assert table.startswith(text + "\n log_prob      id  token\n        -       1  ''\n")
    assert table.count("\n") == text.count("\n") + 2 + len(tokens)


def test_several_texts_of_a_prompt_have_consecutive_seeds(sample):
    plain = ("--prompt", "the ", "--max_new_tokens", 8)
    lines = sample(*plain, "-n", 3, "--seed", 7, "--json").splitlines()
    several = [json.loads(line) for line in lines]
    assert [line["seed"] for line in several] == [7, 8, 9]
    texts = [line["text"] for line in several]
    assert sample(*plain, "--seed", 9) == f"the {texts[2]}\n"
    shown = sample(*plain, "-n", 3, "--seed", 7)
    assert shown.startswith(f"--- text 1 of 3, seed 7\nthe {texts[0]}\n--- text 2 of 3, seed 8\n")


def test_a_prompt_from_stdin(sample, monkeypatch, capfd):
    plain = ("--max_new_tokens", 8)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("the é".encode())))
    assert sample("--prompt", "-", *plain) == sample("--prompt", "the é", *plain)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the \xff")))
    assert cli.run("sample", ["--checkpoint", "x", "--prompt", "-"]) == 2
    assert capfd.readouterr().err.startswith("error: the prompt on stdin is not UTF-8 text: ")


# A file of prompts

LINES = [
    {"prompt": "the quick ", "id": "a"},
    {"prompt": "fox", "temperature": 0, "max_new_tokens": 3, "note": "é", "odd": "\ud83d"},
    {"prompt": "", "seed": 9, "stop": [" "], "logit_bias": {"35": 2}, "banned_ids": [40]},
    {"prompt": "and says hello", "top_k": 5, "top_p": 0.5, "min_p": 0.01, "stop": "o"},
]


@pytest.fixture
def complete_file(small_run, tmp_path, capfd):
    """Complete ``LINES``; returns the exit code, the results and what was said."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def run(*arguments, output=tmp_path / "out.jsonl"):
        files = ["--prompts_file", str(tmp_path / "in.jsonl"), "--output", str(output)]
        options = [*files, "--max_new_tokens", "6", "--batch_size", "2", *map(str, arguments)]
        code = cli.run("sample", ["--checkpoint", str(small_run.folder), *options])
        text = output.read_text() if output.exists() else ""
        return code, [json.loads(line) for line in text.splitlines()], capfd.readouterr().err

    return run


def test_a_file_of_prompts(complete_file, sample, tmp_path):
    """Each line is completed as if it were alone."""
    code, results, err = complete_file()
    assert code == 0
    assert f"{tmp_path / 'out.jsonl'}: " in err
    assert [result["line"] for result in results] == [1, 2, 3, 4]
    for line, result in zip(LINES, results, strict=True):
        assert line.items() <= result.items()
        options = []
        for name, value in ({"max_new_tokens": 6, "temperature": 0.8} | line).items():
            if name not in ("id", "note", "odd"):
                text = value if isinstance(value, str | int | float) else json.dumps(value)
                options += [f"--{name}", text]
        alone = json.loads(sample(*options, "--json"))
        assert (result["text"], result["finish_reason"]) == (alone["text"], alone["finish_reason"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    code, _, err = complete_file()
    assert code == 1
    assert "out.jsonl exists already: remove it, or give another --output" in err
    code, results, _ = complete_file("-n", 2, "--logprobs", output=tmp_path / "two.jsonl")
    places = [(line, text) for line in (1, 2, 3, 4) for text in (0, 1)]
    assert [(result["line"], result["sample"]) for result in results] == places
    assert all(len(result["tokens"]) == result["new_tokens"] for result in results)


def test_texts_that_match(sample, complete_file, tmp_path):
    several = sample("--prompt", "the ", "--regex", "[a-c]{3,5}", "-n", 3, "--json").splitlines()
    assert all(re.fullmatch("[a-c]{3,5}", json.loads(line)["text"]) for line in several)
    schema = {"type": "object", "properties": {"é": {"type": "boolean"}}, "required": ["é"]}
    schema["additionalProperties"] = False
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema, ensure_ascii=False), encoding="utf-8")
    # Few spaces: the context is short.
    arguments = ["--prompt", "", "--logit_bias", '{"35": -20, "13": -20}']
    text = sample(*arguments, "--json_schema", path)
    assert json.loads(text).keys() == {"é"}
    assert sample(*arguments, "--json_schema", json.dumps(schema)) == text
    code, results, err = complete_file("--regex", "[xyz]{3}")
    assert code == 1
    matched = [bool(re.fullmatch("[xyz]{3}", result.get("text", ""))) for result in results]
    assert matched == [True, True, False, True]
    assert "line 3: banned_ids could leave nothing of what a grammar allows" in err


def test_an_interrupted_file_goes_on_where_it_was(complete_file, monkeypatch, tmp_path):
    expected = complete_file()[1]
    other, unfinished = tmp_path / "again.jsonl", tmp_path / "again.jsonl.unfinished"
    original, begun, made = prompts_file.completions, [], []

    def interrupted(model, prompts, *options):
        begun.append(len(prompts))
        for completion in original(model, prompts, *options):
            if len(begun) == 1 and len(made) == 2:
                raise KeyboardInterrupt
            yield completion
            made.append(completion)
            # It is in the file by now.
            assert len(unfinished.read_text().splitlines()) == 1 + len(made)

    monkeypatch.setattr(prompts_file, "completions", interrupted)
    code, results, err = complete_file(output=other)
    assert (code, results, "stopped" in err) == (1, [], True)
    with unfinished.open("a") as file:
        file.write('{"prompt": "cut sho')  # as by kill -9
    code, _, err = complete_file("--temperature", 1, output=other)
    assert code == 1
    problem = "was begun with other prompts, settings or another model (temperature changed)"
    assert f"{unfinished.name} {problem}: remove it, or give another --output" in err
    assert complete_file(output=other)[:2] == (0, expected)
    assert (begun, len(made)) == ([4, 2], 4)
    assert not unfinished.exists()


CHANGES = {
    "--quantize int8": "weights, quantize",
    "--step OTHER": "weights, step",
    "--stop x": "stop",
    "--dtype bfloat16": "weights, dtype",
    "--logprobs": "logprobs",
    "--echo true": "echo",
    "--speculate 2": "speculate",
    "-n 2": "n",
}


@pytest.mark.parametrize("options", slow_but([*CHANGES][:3], CHANGES))
def test_what_was_begun_otherwise_is_not_gone_on_with(
    complete_file, small_run, monkeypatch, tmp_path, options
):
    best = load(small_run.folder, layout="training").step
    other = 15 if best == 20 else 20
    unfinished = tmp_path / "out.jsonl.unfinished"

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(prompts_file, "completions", interrupted)
    complete_file()
    begun = unfinished.read_bytes()
    code, _, err = complete_file(*options.replace("OTHER", str(other)).split())
    assert code == 1
    assert f"another model ({CHANGES[options]} changed): remove it" in err
    assert unfinished.read_bytes() == begun
    # This is free: memory may be why it ended.
    assert "stopped" in complete_file("--batch_size", 3)[2]


def test_a_damaged_unfinished_file(complete_file, tmp_path):
    for content in (b"\0\0\n", b"[]\n", b'{"of": 3}\n', b'{"of": {}}\n{"text": "no line"}\n'):
        (tmp_path / "out.jsonl.unfinished").write_bytes(content)
        code, _, err = complete_file()
        assert code == 1
        assert "out.jsonl.unfinished does not hold what was written there" in err


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_the_fingerprint_of_weights_sees_every_value_and_its_place(first, second, dtype):
    values = (np.random.default_rng(0).normal(size=(10, 100)) * 50).astype(jnp.dtype(dtype))

    def fingerprint(values, name="w"):
        params = {"layers": {name: values}}
        return weights_fingerprint(LanguageModel(LlamaConfig(vocab_size=300), params))

    other, swapped = values.copy(), values.copy()
    other.flat[first] += 1
    swapped.flat[[first, second]] = swapped.flat[[second, first]]
    whole = fingerprint(jnp.asarray(values))
    assert whole == fingerprint(values.copy())
    assert whole != fingerprint(other)
    assert (whole == fingerprint(swapped)) == (swapped == values).all()
    assert whole not in (fingerprint(values.reshape(100, 10)), fingerprint(values, "v"))
    assert whole != fingerprint(values.view(f"uint{8 * values.itemsize}"))


HUGE = "1" + "0" * 400
NO_PROMPT = 'it must be an object with a "prompt", such as {"prompt": "Once"}'
BAD_LINES = [
    ("not json", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ("[1]", NO_PROMPT),
    ('{"prompt": "a", "top_p": 2}', "top_p is 2; it must be over 0 and at most 1"),
    ('{"prompt": "a", "top_p": "x"}', 'top_p is "x"; it must be a number'),
    ('{"prompt": "a", "seed": 1.5}', "seed is 1.5; it must be a whole number"),
    ('{"prompt": "a", "stop": 3}', "stop is 3; it must be a string or a list of strings"),
    ('{"prompt": "a", "stop": {"b": 1}}', 'stop is {"b": 1}; it must be a string or a list'),
    ('{"prompt": "a", "seed": true}', "seed is true; it must be a whole number"),
    ('{"prompt": "a", "top_p": true}', "top_p is true; it must be a number"),
    ('{"prompt": "a", "stop_ids": [true]}', "stop_ids is [true]; it must be a list of whole"),
    ('{"prompt": "a", "logit_bias": [0]}', "it must be an object of numbers by token id"),
    ('{"prompt": "a", "logit_bias": {" 1": 1}}', "logit_bias is "),
    ('{"prompt": "a", "stop_ids": [999]}', "token 999; the ids run from 0 to 258"),
    (f'{{"prompt": "{"x" * 40}"}}', "exceed the context of 32"),
    ('{"prompt": "\xff"}', "it is not JSON"),  # in Latin-1
    ('{"prompt": "a", "id": 7, "top_k": 3000000000}', "top_k is 3000000000; it must be"),
    ('{"prompt": "a", "id": 8, "top_k": 99999999999999}', "top_k is 99999999999999; it must be"),
    (f'{{"prompt": "a", "id": 9, "temperature": {HUGE}}}', "temperature is 1000"),
    ('{"id": 10}', NO_PROMPT),
    ('{"prompt": "a \\ud83d", "id": 11}', "the text has the lone surrogate U+D83D"),
]


def test_bad_lines_are_reported_and_the_rest_goes_on(complete_file, tmp_path):
    with (tmp_path / "in.jsonl").open("a", encoding="latin-1") as file:
        file.write("\n" + "\n".join(line for line, _ in BAD_LINES))
    code, results, err = complete_file()
    assert code == 1
    numbers = range(6, 6 + len(BAD_LINES))
    assert [result["line"] for result in results] == [1, 2, 3, 4, *numbers]
    assert all("text" in result for result in results[:4])
    for number, (_, problem) in zip(numbers, BAD_LINES, strict=True):
        assert f"error: {tmp_path / 'in.jsonl'}, line {number}: " in err
        assert problem in err
        assert problem in results[number - 2]["error"]
    assert [result["id"] for result in results[-5:]] == [7, 8, 9, 10, 11]
    assert results[-2] == {"id": 10, "line": numbers[-2], "error": results[-2]["error"]}


def test_doctor(capsys):
    assert cli.run("doctor", []) == 0
    out = capsys.readouterr().out
    parts = ["Python 3.", "jax ", "orbax-checkpoint ", "device 0: cpu", " free in ", "GB of memory"]
    for part in (*parts, "3,082,752", "layers/w_gate", "int8 3.1 MB", "relative error"):
        assert part in out


def test_doctor_fails_where_the_device_computes_wrongly(small_run, capsys, monkeypatch):
    monkeypatch.setattr("jllama.lab.checks.TOLERANCE", 1e-12)
    assert cli.run("doctor", ["--checkpoint", str(small_run.folder)]) == 1
    out, err = capsys.readouterr()
    assert "35,168" in out  # of the run
    assert "self-check failed on this device" in err


@pytest.mark.parametrize(("platform", "lines"), [("cpu", 0), ("gpu", 1), ("tpu", 1)])
def test_int8_says_where_it_saves_no_time(monkeypatch, capsys, platform, lines):
    """In a line as it is used, and in the help of all commands that have it."""
    model = LanguageModel(LlamaConfig(), {}, None)
    monkeypatch.setattr(jllama, "load", lambda *args, **options: model)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    for quantize in ("int8", None):
        SampleOptions(checkpoint="it", quantize=quantize).load_with(None, None)
    said = capsys.readouterr().err
    assert said.count("\n") == said.count("quantize int8 saves memory here and no time") == lines
