"""Attention and training steps, compiled for TPUs and GPUs without such a device."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import copies_of_state

from jllama.commands.cli import parse
from jllama.core.step import Batch
from jllama.functional import ATTENTION, Mask, attention
from jllama.lab.plan_devices import topology_devices
from jllama.lab.plan_program import ATTENTION_KERNELS
from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import make_mesh
from jllama.training.compiling import compile_training
from jllama.training.config import TrainConfig

TOKAMAX = importlib.util.find_spec("tokamax") is not None  # which Python 3.11 has none of
ON = {"tpu": "v5e:2x2", "gpu": "h100:4"}
PLATFORMS = [pytest.param(name, marks=getattr(pytest.mark, f"plan_{name}")) for name in ON]
SEQ = 640  # no other size is one or a multiple of it
TINY = f"""
--model.vocab_size 4096 --model.num_layers 2 --model.embed_dim 512 --model.num_heads 8
--model.num_kv_heads 4 --model.head_dim 64 --model.mlp_dim 1536 --model.max_seq_len {SEQ}
--training.batch_size 4 --json
"""
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
}


def plan(arguments, code=0):
    run = [sys.executable, "-m", "jllama", "plan", *arguments.split()]
    done = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code != 2 else done.stderr


def compiled(name, platform):
    """Return what one of the functions below returns in a process of its own, as a user's is."""
    paths = os.pathsep.join(filter(None, sys.path))
    environment = ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, __file__, name, platform], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_attention_is_a_kernel_both_ways_and_no_dense_scores(platform):
    lowered = compiled("attention_programs", platform)
    assert len(lowered) >= 3
    for case, text in lowered.items():
        name = case.split()[0]
        assert text.count(ATTENTION_KERNELS[name]) >= 2, case  # forward and backward
        assert not re.search(r"\[(\d+,)*(640|768|1024),(640|768|1024)\]", text), case


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_step_copies_nothing_of_the_state(platform):
    assert compiled("step_copies", platform) == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_under_fsdp_weights_alone_are_exchanged(platform):
    result = plan(f"{TINY} --topology {ON[platform]}")
    keys = "fits device devices arguments_bytes temporaries_bytes device_memory_bytes compile_s"
    assert {*keys.split(), "attention", "collectives"} <= {*result}
    assert (result["fits"], result["devices"]) == (True, 4)
    on_gpu = "tokamax" if TOKAMAX else "triton"
    assert result["attention"] == {"tpu": "splash", "gpu": on_gpu}[platform]
    received = dict.fromkeys(("all-gather", "reduce-scatter"), 0.0)
    for row in result["collectives"]:
        sides = re.findall(r"\d+", re.sub(r"[a-z]+\d+\[", "[", row["shape"]))
        assert not any(int(side) % SEQ == 0 for side in sides), row  # none is of tokens
        received_bytes = row["times"] * row["bytes_each"]
        if row["kind"] in received:
            received[row["kind"]] += received_bytes
        else:  # losses, norms, and what has one axis
            assert received_bytes < 1e5, row
    layers, ends = 2 * 512 * (2 * 512 + 2 * 256 + 3 * 1536), 2 * 4096 * 512
    # In bfloat16; layers backward, too.
    assert received["all-gather"] == 3 / 4 * 2 * (2 * layers + ends)
    assert received["reduce-scatter"] == pytest.approx(3 / 4 * 4 * (layers + ends), rel=0.1)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_does_not_fit_names_what_fills_the_memory(platform):
    result = plan(
        f"{TINY} --topology {ON[platform]} --batch_size 8192 --training.remat none", code=1
    )
    assert not result["fits"]
    assert len(result["largest"]) == 10
    assert result["largest"][0][0] > 2**30
    assert result["advice"][0] == "--training.remat block"


@pytest.mark.plan_gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_a_step_of_decoding_is_few_launches_and_reads_little_more_than_it_must(rows):
    words = TINY.replace("--training.batch_size 4", f"--batch_size {rows} --seq_len 1024")
    result = plan(f"{words} --topology h100:1 --decode")
    assert result["launches"] < 25 * 2 + 25  # layers, and what is around them
    assert result["traffic_bytes"] < 1.25 * result["least_bytes"]


@pytest.mark.plan_tpu
def test_a_step_of_decoding_reads_pages_where_the_kernel_can():
    words = TINY.replace("--training.batch_size 4", "--batch_size 2 --seq_len 1024")
    for head_dim, kernel in (("128", "paged"), ("64", "")):
        result = plan(f"{words} --model.head_dim {head_dim} --topology v5e:1 --decode")
        assert result["attention"] == kernel


@pytest.mark.plan_gpu
def test_no_step_adds_up_in_an_open_order():
    result = compiled("open_scatters", "gpu")
    assert not any(result.values()), result
    scatter = re.search(r".* scatter\(.*", compiled("plain_look_up", "gpu"))[0]
    assert "unique_indices=true" not in scatter


@pytest.mark.plan_gpu
def test_adapters_of_8b_in_four_bits_start_and_run_on_24_gib():
    pytest.importorskip("qwix")
    words = "--preset llama3.1-8b --init_from x --lora.rank 16 --lora.base nf4 --seq_len 2048"
    result = plan(f"{words} --training.remat block --topology rtx4090:1 --json")
    assert result["fits"]
    assert result["parameters_bytes"] < result["starting_bytes"] < 8 * 2**30


@pytest.mark.plan_gpu
def test_what_the_kernel_cannot_serve():
    message = plan(f"{TINY} --topology h100:4 --training.attention cudnn", code=2)
    assert message.count("\n") == 1
    assert message.endswith(": take another training.attention, or mesh.sequence\n")
    # Rows that are split over GPUs are attended to in blocks.
    assert plan(f"{TINY} --topology h100:4 --mesh.sequence 2")["attention"] == ""


@pytest.mark.plan_gpu
def test_a_search_is_as_fast_as_what_it_could_have_taken():
    result, usual = (
        plan(f"{TINY} --topology h100:1 {option}")
        for option in ("--search", "--training.remat none")
    )
    assert result["fits"]
    assert result["tokens_per_s"] >= usual["tokens_per_s"]


@pytest.mark.plan_tpu
def test_topologies_and_meshes_on_them():
    for topology, count in {"v4:2x2x1": 4, "v5e:1x1": 1, "v5p:4x4x4": 64, "v6e:4x4": 16}.items():
        assert len(topology_devices(topology)[1]) == count
    parts_of_sides = MeshConfig(data=2, fsdp=-1, tensor=2)
    mesh = make_mesh(parts_of_sides, topology_devices("v5p:4x4x4")[1])
    assert mesh.shape["fsdp"] == 16
    message = plan(f"{TINY} --topology v5e:3x3", code=2)
    assert "v5e:3x3 cannot be planned for, so give another topology: " in message
    message = plan(f"{TINY} --topology v5e:4x4 --mesh.tensor 16", code=2)
    assert "does not divide 16 ways: the nearest mesh.tensor that does is" in message


def attention_programs(platform):
    """Compile attention for one device of a platform."""
    device, result = topology_devices(ON[platform])[1][0], {}
    sharding = jax.sharding.SingleDeviceSharding(device)
    names = [name for name, row in ATTENTION.items() if row.platform == platform and row.backward]
    if not TOKAMAX and "tokamax" in names:
        names.remove("tokamax")
    cases = [
        *itertools.product(names, (64, 128, 100), (False, True), (None,)),
        *itertools.product(names, (64,), (False, True), (100,)),
    ]
    for name, head_dim, packed, window in cases:
        query, key = (
            jax.ShapeDtypeStruct((2, heads, SEQ, head_dim), jnp.bfloat16, sharding=sharding)
            for heads in (8, 2)
        )
        segments = jax.ShapeDtypeStruct((2, SEQ), jnp.int32, sharding=sharding)

        def mask_of(segments, packed=packed, window=window):
            documents = segments if packed else None
            return Mask(query_segments=documents, key_segments=documents, window=window)

        def loss(query, key, value, segments, name=name, mask_of=mask_of):
            mask = mask_of(segments)
            return jnp.sum(attention(query, key, value, mask, name).astype(jnp.float32) ** 2)

        if not ATTENTION[name].refuses(query, key, mask_of(segments)):
            with jax.default_device(device):
                program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, key, segments)
            result[f"{name} {head_dim} {packed} {window}"] = program.compile().as_text()
    return result


def abstract_batch(training, rows):
    ids, counted = (
        jax.ShapeDtypeStruct((rows, SEQ + 1), dtype, sharding=training.batch_sharding)
        for dtype in (jnp.int32, bool)
    )
    return Batch(ids, ids, counted)


def open_scatters(platform):
    """Compile training steps; return the scatters whose order of additions is open."""
    result = {}
    devices = topology_devices("h100:4")[1]
    for words in (
        "--model.tie_embeddings true --training.z_loss 1e-4",
        "--optimizer.name muon --training.ema 0.9 --training.spike_factor 4 "
        "--training.accumulation 2",
        "--optimizer.name adafactor --training.objective preference",
        "--init_from x --lora.rank 4 --lora.dora true --training.objective preference",
        "--optimizer.name lion --mesh.fsdp 2 --mesh.tensor 2 --training.attention blocked",
        "--model.num_experts 8 --mesh.expert 2 --mesh.fsdp 2",
    ):
        arguments = [*TINY.replace("--json", "").split(), *words.split()]
        config = parse(TrainConfig, arguments, "", ("config",))
        mesh = make_mesh(config.mesh, devices if "mesh" in words else devices[:1])
        training = compile_training(config, mesh)
        is_pair = config.training.objective == "preference"
        rows = config.training.batch_size * (2 if is_pair else 1)
        batch = abstract_batch(training, rows)
        if is_pair:
            reference = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=training.batch_sharding)
            batch = batch._replace(reference=reference)
        lowered = training.step.lower(jax.eval_shape(training.init, jax.random.key(0)), batch)
        scatters = re.findall(r".* (?:select-and-)?scatter\(.*", lowered.compile().as_text())
        result[words] = [line.strip() for line in scatters if "unique_indices=true" not in line]
    return result


def plain_look_up(platform):
    """Compile the gradient of a table's rows as JAX makes it."""
    where = jax.sharding.SingleDeviceSharding(topology_devices(ON[platform])[1][0])
    table = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16, sharding=where)
    tokens = jax.ShapeDtypeStruct((2, SEQ), jnp.int32, sharding=where)
    gradient = jax.jit(jax.grad(lambda table, tokens: jnp.sum(jnp.sin(table[tokens]))))
    return gradient.lower(table, tokens).compile().as_text()


def step_copies(platform):
    """Compile a training step for the devices of a platform: what it copies of the state."""
    config = parse(TrainConfig, TINY.replace("--json", "").split(), "", ("config",))
    training = compile_training(config, make_mesh(config.mesh, topology_devices(ON[platform])[1]))
    batch = abstract_batch(training, config.training.batch_size)
    return copies_of_state(training.step, jax.eval_shape(training.init, jax.random.key(0)), batch)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
