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

BOMB = b"".join(
    [
        b"a0: &a0 [1]\n",
        *(b"a%d: &a%d [%s]\n" % (n, n, b"*a%d, " % (n - 1) * 10) for n in range(1, 9)),
    ]
)
"""Lists of ten of ten of ten ...: a hundred million values once its aliases are resolved."""
TINY = {
    "model": {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64, "max_seq_len": 32},
    "training": {"batch_size": 8, "steps": 2, "sample_tokens": 0},
}


@pytest.fixture
def place(tmp_path):
    """A folder with a good corpus and a good configuration, to be spoilt."""
    (tmp_path / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    data = {
        "path": str(tmp_path / "corpus.txt"),
        "tokenizer": "bytes",
        "cache_dir": str(tmp_path / "cache"),
    }
    (tmp_path / "good.yaml").write_text(
        yaml.safe_dump(TINY | {"data": data, "run_dir": str(tmp_path / "run")})
    )
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
            "missing.txt' has no files: give stdlib, tinyshakespeare, persona, or an existing file",
        ),
        (
            "empty.txt",
            b"",
            "the train split is empty: the corpus has 0 documents, so give more text",
        ),
        ("binary.bin", b"\x7fELF\x00\x01", "byte 0x00 at offset 4 is not UTF-8 text"),
        (
            "latin.txt",
            "caf\xe9 au lait".encode("latin-1") * 99,
            "byte 0xE9 at offset 3 is not UTF-8 text",
        ),
        (
            "short.txt",
            b"x" * 100,
            "the training split has 92 tokens, and one batch of 8 x 32 needs 257: "
            "give more text, or lower batch_size or seq_len",
        ),
        ("one.txt", b"x", "split is empty"),
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
    code, message = fails(
        "train",
        "--config",
        place / "good.yaml",
        "--data.tokenizer",
        "bpe",
        "--data.vocab_size",
        "5000",
    )
    assert code == 1
    assert "5000" in message
    assert not (place / "run").exists()
    assert not list((place / "cache").glob("*"))


def test_a_tokenizer_that_is_not_there_or_none(place, fails):
    assert (
        fails("train", "--config", place / "good.yaml", "--data.tokenizer", place / "no.model")[0]
        == 1
    )
    code, message = fails(
        "train", "--config", place / "good.yaml", "--data.tokenizer", place / "corpus.txt"
    )
    assert (code, "is not a SentencePiece model" in message) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model.num_heads 5", "embed_dim 32 is not divisible by num_heads 5"),
        ("--model.num_kv_heads 3", "num_heads 4 is not divisible by num_kv_heads 3"),
        ("--model.head_dim 15", "head_dim 15 is odd"),
        ("--model.num_layers 0", "num_layers is 0; it must be at least 1"),
        ("--model.qk_norm heads", "model.qk_norm is 'heads'; it must be one of none, head, whole"),
        (
            "--model.no_rope_layers [9]",
            "no_rope_layers is (9,); it must be indices of layers, from 0 to 1",
        ),
        ("--model.no_rope_layers 1", "model.no_rope_layers is '1'; it must be JSON, such as [1, 2"),
        (
            "--model.full_attention_layers [1]",
            "full_attention_layers is set without a sliding_window: set both",
        ),
        ("--model.sliding_window -1", "sliding_window is -1; it must be a number of tokens, or 0"),
        (
            "--model.partial_rotary_factor 0.1",
            "head_dim 8 times partial_rotary_factor 0.1 makes 0 channels to rotate",
        ),
        ("--model.logits_scaling 0", "logits_scaling is 0.0; it must be positive, and finite"),
        (
            "--model.vocab_size 100",
            "model.vocab_size is 100; it must be 0, or at least the 259 tokens",
        ),
        ("--model.rope_scaling.type llama3", "rope_scaling.factor is missing"),
        (
            "--model.rope_scaling.type longrope",
            "rope_scaling.type is 'longrope'; it must be one of linear,",
        ),
        (
            "--model.rope_scaling.type linear --model.rope_scaling.factor 0.5",
            "rope_scaling.factor is 0.5; it must be at least 1, and finite",
        ),
        (
            "--modle.num_layers 3",
            "there is no option modle.num_layers; did you mean model.num_layers?",
        ),
        (
            "--model.num_layer 3",
            "there is no option model.num_layer; did you mean model.num_layers?",
        ),
        (
            "--learning_rate 1",
            "there is no option learning_rate; did you mean optimizer.learning_rate?",
        ),
        ("--qqqq 1", "there is no option qqqq"),
        (
            "stray",
            (
                "the configuration stray cannot be read: No such file or directory; give a "
                "file, or by its name one of"
            ),
        ),
        (
            "good.yaml stray",
            "'stray' is one argument too many; usage: python -m jllama train [CONFIG] [options]",
        ),
        ("--lr 1", "there is no option lr; did you mean optimizer.learning_rate?"),
        (
            "--optimizer.lr 1",
            "there is no option optimizer.lr; did you mean optimizer.learning_rate?",
        ),
        (
            "--learning-rate 1",
            "there is no option learning-rate; did you mean optimizer.learning_rate?",
        ),
        ("--max_steps 1", "there is no option max_steps; did you mean training.steps?"),
        ("--bs 1", "there is no option bs; did you mean training.batch_size?"),
        ("--model.activation gelu", "there is no option model.activation; docs/extend.md shows"),
        ("--model.dropout 0.1", "there is no option model.dropout; docs/extend.md shows"),
        ("--model.position learned", "there is no option model.position; docs/extend.md shows"),
        ("--block_size 1", "there is no option block_size; did you mean model.max_seq_len?"),
        ("--n_embd 1", "there is no option n_embd; did you mean model.embed_dim?"),
        ("--model 3", "there is no option model; did you mean model.vocab_size?"),
        ("--model.num_layers many", "model.num_layers is 'many'; it must be a whole number"),
        ("--model.num_layers 1.5", "model.num_layers is '1.5'; it must be a whole number"),
        (
            "--optimizer.learning_rate fast",
            "optimizer.learning_rate is 'fast'; it must be a finite number",
        ),
        (
            "--optimizer.learning_rate nan",
            "optimizer.learning_rate is 'nan'; it must be a finite number",
        ),
        (
            "--optimizer.learning_rate 1e999",
            "optimizer.learning_rate is inf; it must be positive and finite",
        ),
        (
            "--sampling.logit_bias x",
            "sampling.logit_bias is 'x'; it must be a JSON object, such as {\"5\": 1.5}",
        ),
        ("--sampling.banned_ids x", "sampling.banned_ids is 'x'; it must be JSON, such as [1, 2]"),
        ("--optimizer.learning_rate -1", "optimizer.learning_rate is -1.0; it must be positive"),
        (
            "--training.dtype float16",
            "training.dtype is 'float16'; it must be one of auto, float32, bfloat16",
        ),
        (
            "--training.remat=perhaps",
            "training.remat is 'perhaps'; it must be one of auto, none, dots, block, offload",
        ),
        ("--training.steps", "argument --training.steps: expected one argument"),
        ("--training.batch_size 0", "training.batch_size is 0; it must be at least 1"),
        (
            "--training.accumulation 3",
            "training.accumulation is 3; it must be a divisor of training.batch_size, 8",
        ),
        (
            "--training.steps 0 --training.epochs 0",
            "training.steps is 0; it must be positive, or training.epochs",
        ),
        (
            "--training.sample_tokens 99",
            "which is what training.sample_prompt leaves of model.max_seq_len",
        ),
        (
            "--data.validation_fraction 1",
            "data.validation_fraction is 1.0; it must be between 0 and 1",
        ),
        ("--data.vocab_size 100", "data.vocab_size is 100; it must be at least 260"),
        (
            "--sampling.temperature -1",
            "temperature is -1.0; it must be 0 (greedy) or a positive number",
        ),
        ("--seed -1", "seed is -1; it must be between 0 and 2**32 - 1"),
        ("--run_dir=", "run_dir is empty"),
        (
            "--mesh.data 3",
            "the mesh data=3 x fsdp=1 x sequence=1 x tensor=1 needs 3 devices, but there are 1",
        ),
        ("--mesh.tensor 0", "needs positive sizes"),
        ('--mesh.rules {"mpl":["tensor"]}', "there is no logical axis mpl; did you mean mlp?"),
        (
            '--mesh.rules {"mlp":["tensr"]}',
            "there is no mesh axis for parameters tensr; did you mean tensor?",
        ),
        (
            '--mesh.rules {"mlp":["data"]}',
            "there is no mesh axis for parameters data; there are fsdp, tensor",
        ),
        ("--mesh.rules mlp", "mesh.rules is 'mlp'; it must be a JSON object"),
        (
            "--config missing.yaml",
            "the configuration missing.yaml cannot be read: No such file or directory; give a file",
        ),
    ],
)
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
            "there is no option model.num_layer; did you mean model.num_layers?",
        ),
        (
            b"modle: {num_layers: 3}\n",
            "there is no option modle.num_layers; did you mean model.num_layers?",
        ),
        (b"model: {num_layers: many}\n", "model.num_layers is 'many'; it must be a whole number"),
        (b"model: 3\n", "there is no option model; did you mean model.vocab_size?"),
        (
            b"model: {rope_scaling: {type: longrope, factor: 8}}\n",
            "rope_scaling.type is 'longrope'; it must be one of",
        ),
        (b"model: {num_layers: [1\n", "bad.yaml is not YAML: while parsing a flow sequence"),
        (
            b"model:\n\tnum_layers: 3\n",
            "bad.yaml is not YAML: while scanning for the next token found character",
        ),
        (b"- 1\n", "bad.yaml holds '- 1'; it must hold options, such as 'seed: 1'"),
        (b"", "bad.yaml holds 'nothing'; it must hold options"),
        (
            b"training: {lr: 1}\n",
            "there is no option training.lr; did you mean optimizer.learning_rate?",
        ),
        (b"seed: 0001-99-99\n", "seed is '0001-99-99'; it must be a whole number"),
        (b"seed: " + b"9" * 6000, "seed must be a whole number"),
        (
            b"seed: !!python/object/apply:os.getpid []\n",
            "seed is '!!python/object/apply:os.getpid []'; it must be a whole",
        ),
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


def test_a_run_dir_that_is_a_file(place, fails):
    before = (place / "corpus.txt").read_text()
    code, message = fails(
        "train", "--config", place / "good.yaml", "--run_dir", place / "corpus.txt"
    )
    assert (code, str(place / "corpus.txt") in message) == (1, True)
    assert (place / "corpus.txt").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--temperature -1", 2, "temperature is -1.0; it must be 0 (greedy) or a positive number"),
        ("--top_p 0", 2, "top_p is 0.0; it must be over 0 and at most 1"),
        ("--top_p 1.5", 2, "top_p is 1.5; it must be over 0 and at most 1"),
        ("--top_k -1", 2, "top_k is -1; it must be 0 (all tokens) or a positive number"),
        (
            "--top_k 3000000000",
            2,
            "top_k is 3000000000; it must be 0 (all tokens) or a positive number below 2**31",
        ),
        ('--logit_bias {"5":1e39}', 2, "logit_bias is {5: 1e+39}; it must be of finite numbers"),
        (
            "--presence_penalty 1e39",
            2,
            "presence_penalty is 1e+39; it must be a finite number (0 is off), at most",
        ),
        ("--max_tokens 1", 2, "there is no option max_tokens; did you mean max_new_tokens?"),
        ("--model x", 2, "there is no option model; did you mean checkpoint?"),
        ("--dtype q4_k_m", 2, "dtype is 'q4_k_m'; it must be one of float32, bfloat16, float16"),
        ("--echo perhaps", 2, "echo is 'perhaps'; it must be true or false"),
        ("--rope_factor x", 2, "rope_factor is 'x'; it must be a finite number"),
        ("--seed -1", 2, "seed is -1"),
        ("--max_new_tokens -1", 2, "max_new_tokens is -1; it must be 0 or more"),
        (
            "--max_new_tokens 32",
            2,
            "the prompt's 1 tokens and 32 new ones exceed the context of 32",
        ),
        ("--prompt " + "x" * 40, 2, "exceed the context of 32"),
        ("--prompt abc --max_new_tokens 29", 2, "lower max_new_tokens to at most 28"),
        ("--step 7", 1, "has no checkpoint of step 7; it has 15, 20"),
        ("--step -1", 2, "step is -1"),
        ("--temp 1", 2, "there is no option temp; did you mean temperature?"),
        ("--n 0", 2, "n is 0; it must be at least 1"),
        ("--speculate -1", 2, "speculate is -1; it must be 0 or more"),
        ("--stop_ids [999]", 2, "the stop_ids have token 999; the ids run from 0 to 258"),
        ("--banned_ids [-4]", 2, "the banned_ids have token -4; the ids run from 0 to 258"),
        (
            "--regex (",
            2,
            (
                "the grammar (regex) cannot be compiled, give one that llguidance can serve: "
                "unclosed group"
            ),
        ),
        (
            "--regex a --banned_ids [5]",
            2,
            "banned_ids could leave nothing of what a grammar allows: use logit_bias",
        ),
        (
            "--regex a --stop_ids []",
            2,
            "a text that must match a grammar ends with a stop id, and there is none",
        ),
        (
            "--regex a --speculate 2",
            2,
            "json_schema, regex and speculate do not go together: give one of them",
        ),
        (
            "--regex a --json_schema {}",
            2,
            "json_schema, regex and speculate do not go together: give one of them",
        ),
        (
            "--json_schema x.json",
            2,
            "json_schema is x.json, which is neither a JSON object nor a file of one: No such",
        ),
        (
            "--json_schema " + "x" * 300,
            2,
            "which is neither a JSON object nor a file of one: File name too long",
        ),
        (
            '--json_schema {"type":',
            2,
            "the grammar (json_schema) cannot be compiled, give one that llguidance",
        ),
        (
            '--json_schema {"type":"x"}',
            2,
            "the grammar (json_schema) cannot be compiled, give one that llguidance can",
        ),
        ('--json_schema {"not":{}}', 2, 'can serve: Unimplemented keys: ["not"]'),
        ("--prompts_file x.jsonl", 2, "prompts_file and output go together: give both, or neither"),
        (
            "--prompts_file x.jsonl --output y.jsonl",
            1,
            "there is no prompts_file at x.jsonl: give a .jsonl file",
        ),
        (
            "--prompts_file x.jsonl --output y.jsonl --json",
            2,
            "json has no meaning with prompts_file: leave it out",
        ),
    ],
)
def test_sampling_from_a_good_run(small_run, fails, arguments, code, said):
    found, message = fails("sample", "--checkpoint", small_run.folder, *arguments.split())
    assert (found, said in message) == (code, True), message


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


def spoil(small_run, tmp_path, change):
    run = tmp_path / "spoilt"
    shutil.copytree(small_run.folder, run)
    change(run)
    return run


def edit_config(run, **model):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"] |= model
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: shutil.rmtree(run / "checkpoints"), "holds no checkpoint yet"),
        (
            lambda run: [shutil.rmtree(path) for path in (run / "checkpoints").iterdir()],
            "holds no finished checkpoint",
        ),
        (
            lambda run: edit_config(run, mlp_dim=96),
            "layers/w_up is [2, 32, 64], expected [2, 32, 96]",
        ),
        (lambda run: edit_config(run, tie_embeddings=True), "lm_head is [32, 259], expected none"),
        (
            lambda run: (run / "config.yaml").write_text("- 1\n"),
            "config.yaml does not describe a model",
        ),
        (
            lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe"),
            "config.yaml does not describe a model",
        ),
        (
            lambda run: (run / "tokenizer.bytes.json").unlink(),
            "has no tokenizer: put the one it was trained with",
        ),
        (
            lambda run: (run / "tokenizer.bytes.json").write_text(json.dumps({"type": "other"})),
            "is not a bytes tokenizer",
        ),
    ],
)
def test_a_run_that_is_damaged(small_run, fails, tmp_path, change, said):
    code, message = fails("sample", "--checkpoint", spoil(small_run, tmp_path, change))
    assert (code, said in message) == (1, True), message


def test_a_damaged_checkpoint_is_one_sentence(small_run, fails, tmp_path):
    """All its array files are cut short."""

    def cut(run):
        for path in (run / "checkpoints").rglob("d/*"):
            path.write_bytes(path.read_bytes()[:10])

    code, message = fails("sample", "--checkpoint", spoil(small_run, tmp_path, cut))
    assert (code, "cannot be read" in message) == (1, True), message


def test_a_command_that_is_none(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no command trian; did you mean train?\n"


def test_for_real(workshop):
    """The exit code and the one line, in a process of its own."""
    for arguments, code in [
        (["sample.py", "--checkpoint", workshop.folder / "nowhere"], 1),
        (["-m", "jllama", "train", "--config", workshop.yaml, "--model.num_heads", "5"], 2),
    ]:
        done = workshop.finish(workshop.start(*arguments))
        assert (done.code, done.out) == (code, "")
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
