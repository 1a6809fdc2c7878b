"""``jllama plan`` at the command line: a receipt, or one sentence and exit code 2."""

import json
import os
import re
import subprocess
import sys

import pytest
from helpers import pretend_devices, run_command

TINY = """
--model.vocab_size 256 --model.num_layers 1 --model.embed_dim 64 --model.num_heads 4
--model.num_kv_heads 2 --model.head_dim 16 --model.mlp_dim 128 --model.max_seq_len 32
--training.batch_size 8 --training.reduce_dtype float32
--training.attention reference --topology h100:8
"""
FAMILY = """
--model.num_layers 2 --model.attention_bias true --model.qk_norm whole --model.norm_placement after
--model.sliding_window 8 --model.full_attention_layers [1] --model.residual_multiplier 0.5
--mesh.data 1 --mesh.fsdp 4 --mesh.tensor 2
"""


REFUSED = {
    "": "topology is missing: give the devices, such as v5e:4x4 or h100:8",
    "--topology h101:8": "there is no accelerator h101; did you mean h100?",
    "--topology v5p:4x4": "v5p:4x4 is no topology: give the sides of the slice, such as v5p:4x4x4",
    "--topology h100:12": "h100:12 is no topology: give the number of GPUs, to 8 or a multiple of",
    "llama3.1-8b --topology h100:8": "the configuration llama3.1-8b cannot be read: No such file "
    "or directory; give --preset llama3.1-8b\n",
    "--topology h100:8 --quantize int8": "quantize int8 is for --decode alone",
    "--topology h100:8 --search --decode": "search is for training alone: leave out --search or",
    "--topology h100:8 --preset llama9-1b": "there is no preset llama9-1b; did you mean llama",
    "--topology h100:8 --batch_size -4": "batch_size is -4; it must be positive, or 0",
    "--topology h100:8 --tokens -1": "tokens is -1.0; it must be positive",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_planned(arguments):
    done = run_command("plan", "--preset", "llama3.2-1b", *arguments.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"error: {REFUSED[arguments]}")


@pytest.fixture(scope="module")
def planned():
    """Plan for eight devices of a CPU in place of GPUs; each command's exit code and output."""
    commands = {
        "mesh": ["--mesh.fsdp", "3"],
        "tensor": ["--mesh.tensor", "8"],
        "batch": ["--batch_size", "12"],
        "parts": ["--training.accumulation", "2"],
        "fits": [],
        "too large": ["--batch_size", "4096", "--seq_len", "4096", "--training.remat", "none"],
        "family": [*FAMILY.split(), "--json"],
        "decoding": [*FAMILY.split(), "--decode", "--quantize", "int8"],
    }
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | pretend_devices(8) | {"PYTHONPATH": path}
    words = json.dumps({name: [*TINY.split(), *others] for name, others in commands.items()})
    run = [sys.executable, __file__, words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_mesh_or_batch_that_does_not_divide(planned):
    multiple = "it must be a multiple of 8 device(s) times"
    for name, message in {
        "mesh": "fsdp=3 x expert=1 x sequence=1 x tensor=1 needs 3 devices, but there are 8",
        "tensor": "which does not divide 8 ways: the nearest mesh.tensor that does is 4",
        "batch": f"training.batch_size is 12; {multiple} 1 part(s)",
        "parts": f"training.batch_size is 8; {multiple} 2 part(s)",
    }.items():
        code, out, err = planned[name]
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_a_receipt_has_every_part(planned):
    code, out, err = planned["fits"]
    assert (code, err) == (0, "")
    assert out.startswith(
        "h100:8, fsdp=8, batch_size 8, accumulation 1, remat block, attention reference: fits, 79.1"
    )
    parts = "parameters,moments,gradients,activations,compute,interconnect,binds,MFU,tokens/s"
    parts += ",received in all-gather,attention kernel,1.5e13 tokens,compiled in"
    for part in parts.split(","):
        assert part in out


def test_json_is_alone_on_stdout(planned):
    code, out, err = planned["family"]
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["fits"], result["device"], result["devices"]) == (True, "h100:8", 8)
    assert result["mesh"] == {"data": 1, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 2}
    assert {row["kind"] for row in result["collectives"]} >= {"all-gather", "all-reduce"}
    assert result["device_memory_bytes"] == 84942979072
    settings = {"batch_size": 8, "accumulation": 1, "remat": "block", "attention": "reference"}
    assert result["settings"] == settings


def test_what_does_not_fit_has_code_1(planned):
    code, out, _ = planned["too large"]
    assert code == 1
    assert " GiB too much\n" in out
    assert out.count(" GiB  ") == 10
    assert "to make it fit: --training.remat block\n" in out
    assert "to make it fit: --training.accumulation 512, one row of each device at a time\n" in out


def test_decoding(planned):
    code, out, _ = planned["decoding"]
    assert code == 0
    assert ": fits, " in out
    assert "cache and tokens" in out
    assert "of the memory's" in out
    assert re.search(
        r"weights and keys alone +[\d.]+ [kM]B, \d+\.\d\d ms\n  launches in a step +\d+\n", out
    )


def test_a_model_with_biases_norms_and_windows_is_planned(planned):
    """Of each matrix a device has an eighth, of biases and norms all."""
    training = json.loads(planned["family"][1])
    biases, head_norms = (4 + 2 + 2) * 16, (4 + 2) * 16
    others = 2 * (biases + head_norms + 2 * 64) + 64
    matrices = 2 * (64 * 16 * (4 + 2 * 2 + 4) + 3 * 64 * 128) + 2 * 256 * 64
    assert training["parameters_bytes"] == 4 * (matrices // 8 + others)
    # A query of the first layer has at most 8 keys.
    assert training["attention_flops"] == pytest.approx(12 * 4 * 16 * (8 + 32) * 32)


def main():
    """Run the commands of ``planned``, with the devices that there are in place of a topology's."""
    import jax

    from jllama.lab import plan_devices as devices
    from jllama.lab import plan_receipt as receipt

    accelerator, result = devices.ACCELERATORS["h100"], {}
    devices.topology_devices = lambda topology: (accelerator, jax.devices())
    receipt.topology_devices = devices.topology_devices
    for name, words in json.loads(sys.argv[1]).items():
        result[name] = run_command("plan", *words)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
