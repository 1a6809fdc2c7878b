"""A run does not depend on the number of devices that began it."""

import base64
import json

import pytest
import yaml

TINY = ("--training.steps", 2, "--training.eval_every", 2, "--training.sample_tokens", 0)
PADDED = ("--model.vocab_size", 264)  # 259 tokens do not divide two ways
REFUSED = [
    (
        "--mesh.tensor=3",
        "the heads axis of layers/wq has size 4, which does not divide 3 ways: "
        "the nearest mesh.tensor that does is 2",
    ),
    (
        "--mesh.fsdp=3",
        "no axis of layers/wq, of sizes [32], divides 3 ways: "
        "the nearest mesh.fsdp that one does is 2",
    ),
    (
        "--mesh.data=3",
        "training.batch_size is 8; it must be a multiple of 3 device(s) times 1 part(s)",
    ),
    ("--mesh.sequence=3", "training.seq_len is 32; it must be a multiple of mesh.sequence, 3"),
    ("--training.reduce_dtype=bfloat16", "reduce_dtype is bfloat16; it must be float32 on CPUs"),
]


def shardings(run, step):
    """How the checkpoint of a step says its parameters were split."""
    saved = json.loads((run / "checkpoints" / str(step) / "params" / "_sharding").read_text())
    described = {base64.b64decode(path).decode(): json.loads(text) for path, text in saved.items()}
    return {path: each["partition_spec"] for path, each in described.items()}


@pytest.mark.slow
def test_rules_in_a_configuration_split_the_parameters(workshop, read_run, tmp_path):
    """Four devices sample what one does, and one goes on with the run."""
    rules = {"mlp": ["fsdp"], "embed": [], "vocab": ["tensor"]}
    run, mesh = tmp_path / "run", tmp_path / "mesh.yaml"
    mesh.write_text(yaml.safe_dump({"mesh": {"fsdp": 2, "tensor": 2, "rules": rules}}))
    done = workshop.finish(workshop.train(run, *TINY, *PADDED, "--config", mesh, devices=4))
    assert done.code == 0, done.err
    split = shardings(run, 2)
    assert split["embed"] == ["tensor", None]
    assert split["layers.wq"] == split["layers.wk"] == [None, None, "tensor", None]
    assert split["layers.w_up"] == [None, None, "fsdp"]
    assert split["layers.w_down"] == [None, "fsdp", None]

    sample = "sample.py", run, "--prompt", "the ", "--max_new_tokens", 24, "--json"
    one = workshop.finish(workshop.start(*sample, devices=4))
    four = workshop.finish(workshop.start(*sample, "--mesh.tensor", 4, devices=4))
    assert one.code == four.code == 0, one.err + four.err
    assert json.loads(one.out) == json.loads(four.out)
    more = ("--training.steps", 3, "--resume", "auto", "--resume_with_changes", "true")
    done = workshop.finish(workshop.train(run, *TINY, *PADDED, *more))
    assert done.code == 0, done.err
    assert [*read_run.losses(run)] == [1, 2, 3]


@pytest.mark.slow
def test_what_does_not_divide_is_refused_with_what_would(workshop, tmp_path):
    """All in one process that has three devices."""
    options = workshop.options(tmp_path / "run", *TINY, *PADDED)
    code = f"""
from jllama.commands import cli
for option in {[option for option, _ in REFUSED]}:
    assert cli.run("train", [*{options}, option]) == 2
"""
    done = workshop.finish(workshop.start("-c", code, devices=3))
    assert done.code == 0, done.err
    for line, (_, problem) in zip(done.err.splitlines(), REFUSED, strict=True):
        assert problem in line
    assert not (tmp_path / "run").exists()
