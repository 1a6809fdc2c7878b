"""Every mistake a user can make is one sentence on stderr with the right exit code; nothing is
written.
"""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import yaml

from jllama.commands import cli

pytestmark = pytest.mark.usefixtures("loads_once")
BOMB = b"a0: &a0 [1]\n"
"""Lists of ten of ten of ten ...: a hundred million values once its aliases are resolved."""
for number in range(1, 9):
    BOMB += b"a%d: &a%d [%s]\n" % (number, number, b"*a%d, " % (number - 1) * 10)
TINY = """
model: {num_layers: 2, embed_dim: 32, num_heads: 4, mlp_dim: 64, max_seq_len: 32}
training: {batch_size: 8, steps: 2, sample_tokens: 0}
"""


def rows(text):
    """Lines of arguments, an arrow, and what is said of them."""
    return [line.split(" -> ") for line in text.strip().splitlines()]


@pytest.fixture
def place(tmp_path):
    """A folder with a good corpus and a good configuration, to be spoilt."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    data = {"path": str(corpus), "tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
    others = yaml.safe_dump({"data": data, "run_dir": str(tmp_path / "run")})
    (tmp_path / "good.yaml").write_text(TINY + others)
    return tmp_path


@pytest.fixture
def fails(capsys):
    """Run a command that must fail; returns its exit code and its one sentence."""

    def run(command, *arguments):
        code = cli.run(command, [str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert "Traceback" not in printed.err
        assert "Union" not in printed.err
        return code, printed.err.removeprefix("error: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "missing.txt",
            None,
            "missing.txt' has no files: give stdlib, tinyshakespeare, persona, or",
        ),
        (
            "empty.txt",
            b"",
            "the train split is empty: the corpus has 0 documents, so give more text",
        ),
        ("binary.bin", b"\x7fELF\x00\x01", "byte 0x00 at offset 4 is not UTF-8 text"),
        ("latin.txt", b"caf\xe9 au lait" * 99, "byte 0xE9 at offset 3 is not UTF-8 text"),
        (
            "short.txt",
            b"x" * 100,
            "the training split has 92 tokens, and one batch of 8 x 32 needs 257: "
            "give more text, or lower batch_size or seq_len",
        ),
        ("bad.jsonl", b'{"text": "a"}\nnot json\n', "bad.jsonl line 2 is not a JSON object: "),
        ("field.jsonl", b'{"body": "a"}\n', "has no field 'text'"),
    ],
)
def test_the_corpus(place, fails, name, content, said):
    if content is not None:
        (place / name).write_bytes(content)
    code, message = fails("train", "--config", place / "good.yaml", "--data.path", place / name)
    assert code == 1
    assert said in message
    assert not (place / "run").exists()


def test_a_vocabulary_larger_than_the_text_supports(place, fails):
    options = ("--data.tokenizer", "bpe", "--data.vocab_size", "5000")
    code, message = fails("train", "--config", place / "good.yaml", *options)
    assert code == 1
    assert "5000" in message
    assert not (place / "run").exists()
    assert not list((place / "cache").glob("*"))


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("data.tokenizer", "no.model", ""),
        ("data.tokenizer", "corpus.txt", "is not a SentencePiece model"),
        ("run_dir", "corpus.txt", "corpus.txt"),
    ],
)
def test_a_file_that_is_not_there_or_something_else(place, fails, option, name, said):
    before = (place / "corpus.txt").read_text()
    code, message = fails("train", "--config", place / "good.yaml", f"--{option}", place / name)
    assert (code, said in message) == (1, True)
    assert (place / "corpus.txt").read_text() == before


TRAINING = """
--model.num_heads 5 -> embed_dim 32 is not divisible by num_heads 5
--model.qk_norm heads -> model.qk_norm is 'heads'; it must be one of none, head, whole
--model.no_rope_layers [9] -> no_rope_layers is (9,); it must be indices of layers, from 0 to 1
--model.no_rope_layers 1 -> model.no_rope_layers is '1'; it must be JSON, such as [1, 2
--model.full_attention_layers [1] -> full_attention_layers is set without a sliding_window: set both
--model.sliding_window -1 -> sliding_window is -1; it must be a number of tokens, or 0
--model.partial_rotary_factor 0.1 -> head_dim 8 times partial_rotary_factor 0.1 makes 0 channels to
--model.logits_scaling 0 -> logits_scaling is 0.0; it must be positive, and finite
--model.vocab_size 100 -> model.vocab_size is 100; it must be 0, or at least the 259 tokens
--model.rope_scaling.type llama3 -> rope_scaling.factor is missing
--model.rope_scaling.type longrope -> rope_scaling.type is 'longrope'; it must be one of linear,
--modle.num_layers 3 -> there is no option modle.num_layers; did you mean model.num_layers?
--learning_rate 1 -> there is no option learning_rate; did you mean optimizer.learning_rate?
--qqqq 1 -> there is no option qqqq
stray -> stray cannot be read: No such file or directory; give a file, or by its name one of
good.yaml stray -> 'stray' is one argument too many; usage: python -m jllama train [CONFIG]
--learning-rate 1 -> there is no option learning-rate; did you mean optimizer.learning_rate?
--block_size 1 -> there is no option block_size; did you mean model.max_seq_len?
--model.activation gelu -> there is no option model.activation; docs/extend.md shows
--model 3 -> there is no option model; did you mean model.vocab_size?
--model.num_layers 1.5 -> model.num_layers is '1.5'; it must be a whole number
--optimizer.learning_rate nan -> optimizer.learning_rate is 'nan'; it must be a finite number
--optimizer.learning_rate 1e999 -> optimizer.learning_rate is inf; it must be positive and finite
--sampling.logit_bias x -> sampling.logit_bias is 'x'; it must be a JSON object, such as {"5": 1.5}
--sampling.banned_ids x -> sampling.banned_ids is 'x'; it must be JSON, such as [1, 2]
--training.remat=perhaps -> is 'perhaps'; it must be one of auto, none, dots, block, offload
--training.steps -> argument --training.steps: expected one argument
--training.batch_size 0 -> training.batch_size is 0; it must be at least 1
--training.accumulation 3 -> accumulation is 3; it must be a divisor of training.batch_size, 8
--training.steps 0 --training.epochs 0 -> steps is 0; it must be positive, or training.epochs
--training.sample_tokens 99 -> which is what training.sample_prompt leaves of model.max_seq_len
--seed -1 -> seed is -1; it must be between 0 and 2**32 - 1
--run_dir= -> run_dir is empty
--mesh.data 3 -> x expert=1 x sequence=1 x tensor=1 needs 3 devices, but there are 1
--mesh.rules {"mpl":["tensor"]} -> there is no logical axis mpl; did you mean mlp?
--mesh.rules {"mlp":["data"]} -> there is no mesh axis for parameters data; there are fsdp, tensor
--mesh.rules mlp -> mesh.rules is 'mlp'; it must be a JSON object
--config missing.yaml -> the configuration missing.yaml cannot be read: No such file or directory
"""


@pytest.mark.parametrize(("arguments", "said"), rows(TRAINING))
def test_the_command_line(place, fails, monkeypatch, arguments, said):
    monkeypatch.chdir(place)
    code, message = fails("train", "--config", place / "good.yaml", *arguments.split())
    assert code == 2
    assert said in message
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"model: {num_layer: 3}\n",
            "there is no option model.num_layer; did you mean model.num_l",
        ),
        (b"model: {num_layers: many}\n", "model.num_layers is 'many'; it must be a whole number"),
        (b"model: 3\n", "there is no option model; did you mean model.vocab_size?"),
        (b"model: {num_layers: [1\n", "bad.yaml is not YAML: while parsing a flow sequence"),
        (b"model:\n\tnum_layers: 3\n", "is not YAML: while scanning for the next token found"),
        (b"- 1\n", "bad.yaml holds '- 1'; it must hold options, such as 'seed: 1'"),
        (b"", "bad.yaml holds 'nothing'; it must hold options"),
        (b"seed: 0001-99-99\n", "seed is '0001-99-99'; it must be a whole number"),
        (b"seed: " + b"9" * 6000, "seed must be a whole number"),
        (b"seed: !!python/object/apply:os.getpid []\n", "apply:os.getpid []'; it must be a whole"),
        (b"a: " + b"[" * 10_000 + b"]" * 10_000, "bad.yaml is too large or nested too deep"),
        (b"a: &a [*a]\n", "bad.yaml is too large or nested too deep"),
        (BOMB, "bad.yaml is too large or nested too deep"),
        (b"#" * 1_000_001, "bad.yaml is too large or nested too deep"),
        (b"\xff\xfe\x00", "bad.yaml is not YAML: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_the_yaml_file(place, fails, content, said):
    (place / "bad.yaml").write_bytes(content)
    code, message = fails("train", "--config", place / "good.yaml", "--config", place / "bad.yaml")
    assert code == 2
    assert said in message
    assert not (place / "run").exists()


SAMPLING = f"""
--temperature -1 -> temperature is -1.0; it must be 0 (greedy) or a positive number
--top_p 1.5 -> top_p is 1.5; it must be over 0 and at most 1
--top_k 3000000000 -> top_k is 3000000000; it must be 0 (all tokens) or a positive number below
--logit_bias {{"5":1e39}} -> logit_bias is {{5: 1e+39}}; it must be of finite numbers
--presence_penalty 1e39 -> presence_penalty is 1e+39; it must be a finite number (0 is off)
--max_tokens 1 -> there is no option max_tokens; did you mean max_new_tokens?
--dtype q4_k_m -> dtype is 'q4_k_m'; it must be one of float32, bfloat16, float16
--echo perhaps -> echo is 'perhaps'; it must be true or false
--rope_factor x -> rope_factor is 'x'; it must be a finite number
--max_new_tokens -1 -> max_new_tokens is -1; it must be 0 or more
--max_new_tokens 32 -> the prompt's 1 tokens and 32 new ones exceed the context of 32
--prompt {"x" * 40} -> exceed the context of 32
--prompt abc --max_new_tokens 29 -> lower max_new_tokens to at most 28
--step -1 -> step is -1
--speculate -1 -> speculate is -1; it must be 0 or more
--stop_ids [999] -> the stop_ids have token 999; the ids run from 0 to 258
--banned_ids [-4] -> the banned_ids have token -4; the ids run from 0 to 258
--regex ( -> (regex) cannot be compiled, give one that llguidance can serve: unclosed group
--regex a --banned_ids [5] -> banned_ids could leave nothing of what a grammar allows
--regex a --stop_ids [] -> a text that must match a grammar ends with a stop id, and there is
--regex a --speculate 2 -> json_schema, regex and speculate do not go together: give one of them
--json_schema x.json -> x.json, which is neither a JSON object nor a file of one: No such
--json_schema {"x" * 300} -> which is neither a JSON object nor a file of one: File name too long
--json_schema {{"type": -> the grammar (json_schema) cannot be compiled, give one that llguidance
--json_schema {{"not":{{}}}} -> can serve: Unimplemented keys: ["not"]
--prompts_file x.jsonl -> prompts_file and output go together: give both, or neither
--prompts_file x.jsonl --output y.jsonl --json -> json has no meaning with prompts_file: leave it
"""
NOT_THERE = """
--step 7 -> has no checkpoint of step 7; it has 15, 20
--prompts_file x.jsonl --output y.jsonl -> there is no prompts_file at x.jsonl: give a .jsonl file
"""


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [*((*row, 2) for row in rows(SAMPLING)), *((*row, 1) for row in rows(NOT_THERE))],
)
def test_sampling_from_a_good_run(small_run, fails, arguments, said, code):
    actual, message = fails("sample", "--checkpoint", small_run.folder, *arguments.split())
    assert (actual, said in message) == (code, True), message


def test_the_checkpoint_folder(small_run, fails, tmp_path):
    run = small_run.folder
    cases = [
        (tmp_path / "missing", "there is no checkpoint at"),
        (tmp_path, "is no checkpoint that jllama knows"),
        (run / "checkpoints", f"is no checkpoint by itself: give its folder, {run}"),
        (run / "checkpoints" / "20", f"is no checkpoint by itself: give its folder, {run}"),
        (run / "config.yaml", f"is no checkpoint by itself: give its folder, {run}"),
    ]
    for path, said in cases:
        code, message = fails("sample", "--checkpoint", path)
        assert (code, said in message) == (1, True), message
    usage = "usage: python -m jllama sample CHECKPOINT [options]"
    assert fails("sample", "--seed", 1) == (2, f"checkpoint is missing; {usage}")
    assert fails("doctor", "--checkpoint", tmp_path / "missing")[0] == 1


def edit_config(run, **model):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"] |= model
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def cut_arrays(run):
    for path in (run / "checkpoints").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "holds no checkpoint yet"),
        (
            lambda run: [shutil.rmtree(path) for path in (run / "checkpoints").iterdir()],
            "holds no finished checkpoint",
        ),
        (lambda run: edit_config(run, mlp_dim=96), "w_up is [2, 32, 64], expected [2, 32, 96]"),
        (lambda run: edit_config(run, tie_embeddings=True), "is [32, 259], expected none"),
        (lambda run: (run / "config.yaml").write_text("- 1\n"), "does not describe a model"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe"), "does not describe a model"),
        (lambda run: (run / "tokenizer.bytes.json").unlink(), "put the one it was trained with"),
        (
            lambda run: (run / "tokenizer.bytes.json").write_text(json.dumps({"type": "other"})),
            "is not a bytes tokenizer",
        ),
        (cut_arrays, "cannot be read"),
    ],
)
def test_a_run_that_is_damaged(copied, fails, change, said):
    change(copied)
    code, message = fails("sample", "--checkpoint", copied)
    assert (code, said in message) == (1, True), message


def test_a_command_that_is_none(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no command trian; did you mean train?\n"


def test_for_real(workshop):
    """The exit code and the one line, in a process of its own."""
    done = workshop.finish(workshop.start("sample.py", workshop.folder / "nowhere"))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


ESCAPE = "\x1b[2J\x1b]0;title\x07"


def test_no_escape_code_reaches_the_terminal(place, fails, small_run):
    """Of a folder's name, or of a key in a file."""
    (place / "rows.jsonl").write_text(json.dumps({ESCAPE: "text"}) + "\n")
    shutil.copytree(small_run.folder, place / ESCAPE.replace("/", ""))
    (place / ESCAPE / "config.yaml").unlink()
    for arguments in (
        ("report", place / ESCAPE),
        ("sample", "--checkpoint", place / ESCAPE),
        ("train", place / "good.yaml", f"--{ESCAPE}", "1"),
        ("train", place / "good.yaml", "--data.path", place / "rows.jsonl"),
        ("convert", place / ESCAPE / "metrics.jsonl" / "x", place / "out.gguf"),
    ):
        _, message = fails(*arguments)
        assert message.isprintable(), message
    _, message = fails("report", place / ESCAPE)
    assert "\\x1b[2J" in message


def test_a_name_of_100_000_characters_is_cut(tmp_path, fails):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tensors = {"n" * 100_000: np.zeros(1, np.int64)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    _, message = fails("sample", "--checkpoint", tmp_path)
    assert len(message) < 2000
    assert f"{'n' * 50}..." in message
