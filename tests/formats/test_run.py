"""Saved and restored bit for bit; the best is kept; what is not whole is not there; what differs is
listed.
"""

import dataclasses
import functools
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same_bits
from helpers_checkpoints import change, message, opened

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.formats import run_checkpoints, tensors
from jllama.formats.run import read_config
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.formats.tensors import Checkpoint, load_decode_params, load_params
from jllama.lab.checks import random_params
from jllama.training.optimizer import OptimizerConfig, make_optimizer

CONFIG = LlamaConfig(
    vocab_size=11, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=12
)
META = {"batches": {"next_index": 7}, "seconds": 1.5, "text": "é"}


@functools.cache
def numbers(seed):
    """Parameters and the rest of a training state, with values that no rounding survives."""
    params = random_params(CONFIG, seed)
    optimizer = make_optimizer(OptimizerConfig(), 10)
    rng = np.random.default_rng(seed)
    moments = jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) * 1e-30).astype(leaf.dtype),
        jax.eval_shape(optimizer.init, params),
    )
    key = np.array([0, seed], np.uint32)
    return params, {"opt_state": moments, "step": np.int32(seed), "key": key}


def contents(seed):
    return jax.tree.map(jnp.asarray, numbers(seed))


def save(checkpoints, step, loss=None, **meta):
    checkpoints.save(step, *contents(step), META | {"step": step} | meta, loss)
    checkpoints.wait()


def save_params(checkpoints, step, loss=None, **meta):
    """A model alone, which is quicker."""
    checkpoints.save(step, contents(step)[0], None, meta, loss)
    checkpoints.wait()


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def assert_whole(checkpoints, step):
    params, state = contents(step)
    *restored, meta = checkpoints.restore(step, abstract(params), abstract(state))
    assert_same_bits(restored, [params, state])
    assert meta == META | {"step": step}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with steps 10 and 20, never written to again."""
    folder = tmp_path_factory.mktemp("finished") / "checkpoints"
    checkpoints = RunCheckpoints(folder, keep_last=2)
    save(checkpoints, 10, 2.0)
    save(checkpoints, 20, 3.0)
    return folder


def test_every_bit_comes_back_without_a_warning(finished, caplog):
    checkpoints = RunCheckpoints(finished, read_only=True)
    assert checkpoints.steps() == [10, 20]
    assert_whole(checkpoints, 10)
    assert_whole(checkpoints, 20)
    params = contents(20)[0]
    assert_same_bits(load_params(Checkpoint(CONFIG, checkpoints.tensors(20, CONFIG))), params)
    assert not caplog.records


@pytest.mark.parametrize("name", ["x%41", "x%2Fy", "a b", "x?y", "x#y", "x|y", "%"])
def test_a_name_is_no_url(finished, tmp_path, name):
    for folder, step in {"xA": "10", "x/y": "10", name: "20"}.items():
        shutil.copytree(finished / step, tmp_path / folder / "20")
    checkpoints = RunCheckpoints(tmp_path / name, read_only=name != "x%2Fy")
    params = load_params(Checkpoint(CONFIG, checkpoints.tensors(20, CONFIG)))
    assert_same_bits(params, contents(20)[0])
    if name == "x%2Fy":
        save_params(checkpoints, 30)
        assert (tmp_path / name / "30").is_dir()


def test_a_backslash_in_a_name_is_refused(tmp_path):
    assert "has a backslash in its name" in message(RunCheckpoints, tmp_path / "x\\y")
    assert not [*tmp_path.iterdir()]


def test_the_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    params, state = contents(1)
    checkpoints.save(1, params, state, META | {"step": 1}, None)
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf * 0 + 3, tree), donate_argnums=0
    )
    jax.block_until_ready(overwrite((params, state)))
    checkpoints.wait()
    assert_whole(checkpoints, 1)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep_last=2)
    for step, loss in [(1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0), (5, 2.0)]:
        save_params(checkpoints, step, loss)
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.best_step() == 2
    save_params(checkpoints, 6, 3.5, data_since=6)  # losses on other data do not compare
    again = RunCheckpoints(tmp_path, read_only=True)
    assert (again.steps(), again.best_step()) == ([5, 6], 6)


def test_a_step_without_validation_loss_is_kept_as_last_and_never_as_best(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep_last=1)
    assert (checkpoints.steps(), checkpoints.best_step()) == ([], None)
    save_params(checkpoints, 1)
    assert (checkpoints.steps(), checkpoints.best_step()) == ([1], 1)
    save_params(checkpoints, 2, 4.0)
    save(checkpoints, 3)
    assert (checkpoints.steps(), checkpoints.best_step()) == ([2, 3], 2)
    assert_whole(RunCheckpoints(tmp_path, read_only=True), 3)


def test_every_difference_is_listed(finished):
    checkpoints = RunCheckpoints(finished, read_only=True)
    params, state = map(abstract, contents(20))
    params["extra"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    del params["lm_head"]
    params["final_norm"] = jax.ShapeDtypeStruct((9,), jnp.float32)
    params["layers"]["wq"] = jax.ShapeDtypeStruct(params["layers"]["wq"].shape, jnp.bfloat16)
    state["step"] = jax.ShapeDtypeStruct((), jnp.int16)
    text = message(checkpoints.restore, 20, params, state)
    assert str(finished / "20") in text
    for difference in (
        "extra is absent, expected float32[3]",
        "lm_head is float32[8, 11], expected none",
        "final_norm is float32[8], expected float32[9]",
        "layers/wq is float32[2, 8, 2, 4], expected bfloat16[2, 8, 2, 4]",
        "step is int32[], expected int16[]",
    ):
        assert difference in text
    assert text.count(", expected ") == 5
    text = message(checkpoints.tensors, 20, dataclasses.replace(CONFIG, embed_dim=16))
    assert "final_norm is [8], expected [16]" in text


def test_a_state_of_the_optimizer_in_another_form_is_told_from_another_model(finished):
    """Adafactor's moments had other shapes in 0.1.0: the weights are as good as ever."""
    checkpoints = RunCheckpoints(finished, read_only=True)
    params, state = map(abstract, contents(20))
    embed = state["opt_state"][1][0].mu["embed"]
    state["opt_state"][1][0].mu["embed"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert message(checkpoints.restore, 20, params, state) == (
        f"the checkpoint {finished.resolve() / '20'} is of another version, whose "
        "optimizer has another state: begin a new run from its weights, with init_from "
        f"(state/opt_state/1/0/mu/embed is float32{[*embed.shape]}, expected float32[3])"
    )


def test_a_state_with_other_nodes_without_arrays_comes_back(tmp_path):
    """0.1.0 decayed weights behind every optimizer, whose masked state has a node more."""
    params, state = contents(10)
    clip, (direction, _, rate) = state["opt_state"]
    before = state | {"opt_state": (clip, (direction, optax.MaskedState(optax.EmptyState()), rate))}
    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    checkpoints.save(10, params, before, META, None)
    checkpoints.wait()
    *restored, _ = checkpoints.restore(10, abstract(params), abstract(state))
    assert_same_bits(restored, [params, state])


@pytest.mark.parametrize("chunk_bytes", [16, 64, 200])
def test_arrays_in_many_chunks(tmp_path, monkeypatch, chunk_bytes):
    """Whichever axes orbax cuts, either layout is read with the same bits, a few rows at a time."""
    monkeypatch.setattr(run_checkpoints, "_CHUNKED", ocp.SaveArgs(chunk_byte_size=chunk_bytes))
    monkeypatch.setattr(
        run_checkpoints, "_BY_LAYER", ocp.SaveArgs(chunk_byte_size=chunk_bytes, shard_axes=(0,))
    )
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 40)
    checkpoints = RunCheckpoints(tmp_path)
    save_params(checkpoints, 1)
    params, saved = numbers(1)[0], Checkpoint(CONFIG, checkpoints.tensors(1, CONFIG))
    assert_same_bits(load_params(saved), params)
    for quantize in (None, "int8"):
        actual, expected = (
            load_decode_params(checkpoint, quantize=quantize)
            for checkpoint in (saved, opened(CONFIG, params))
        )
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("read_only", [False, True])
def test_half_written_steps_are_not_there(finished, tmp_path, read_only):
    """A kill in the middle of a save leaves a folder under its temporary name, whole or not."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(finished, folder)
    shutil.copytree(folder / "20", folder / "30.orbax-checkpoint-tmp-7")
    (folder / "40.orbax-checkpoint-tmp-8" / "params").mkdir(parents=True)
    checkpoints = RunCheckpoints(folder, keep_last=2, read_only=read_only)
    assert checkpoints.steps() == [10, 20]
    assert_whole(checkpoints, 20)
    assert len([path for path in folder.iterdir() if "tmp" in path.name]) == (2 if read_only else 0)
    if not read_only:
        save_params(checkpoints, 30, 1.0)
        assert checkpoints.steps() == [20, 30]


def test_what_is_no_longer_wanted_is_never_half_there(tmp_path, monkeypatch):
    """A kill while an old checkpoint is deleted: it has lost its name before it loses its first
    file.
    """
    folder = tmp_path / "checkpoints"
    with monkeypatch.context() as killed:
        killed.setattr(RunCheckpoints, "_sweep", lambda self: None)
        checkpoints = RunCheckpoints(folder)
        save_params(checkpoints, 1)
        save_params(checkpoints, 2)
        assert sorted(path.name for path in folder.iterdir()) == ["2", "unwanted"]
    (folder / "unwanted" / "1" / "params" / "manifest.ocdbt").unlink()
    assert RunCheckpoints(folder, read_only=True).steps() == [2]
    save_params(RunCheckpoints(folder), 3)
    assert sorted(path.name for path in folder.iterdir()) == ["3"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 700, "recursion"),
        ("model: 0001-99-99", "month must be in 1..12"),
        ("model: {vocab_size: " + "9" * 6000 + "}", "digits"),
        ("model: text", "not a mapping"),
        ("", "not a mapping"),
    ],
)
def test_a_configuration_that_is_none(tmp_path, content, problem):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(JllamaError, match=rf"config.yaml does not describe a model: .*{problem}"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("custom_metadata", [1]), ("item_handlers", 3), ("item_handlers", "x")]
)
def test_metadata_of_another_type(finished, tmp_path, key, value):
    folder = tmp_path / "checkpoints"
    shutil.copytree(finished, folder)
    change(folder / "20", "_CHECKPOINT_METADATA", **{key: value})
    with pytest.raises(JllamaError, match=r"cannot be read \("):
        RunCheckpoints(folder, read_only=True).tensors(20, CONFIG)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = RunCheckpoints(Path("runs/x/checkpoints"))
    os.chdir("/")
    save(checkpoints, 5, 1.0)
    assert (tmp_path / "runs/x/checkpoints/5").is_dir()
    monkeypatch.chdir(tmp_path / "runs")
    assert_whole(RunCheckpoints(Path("x/checkpoints"), read_only=True), 5)


def test_a_failed_save_is_one_sentence_and_leaves_the_earlier_steps(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep_last=2)
    save(checkpoints, 1, 1.0)
    params, state = contents(2)
    # It goes on, and fails, in the background.
    checkpoints.save(2, params, state, {"not JSON": object()}, None)
    with pytest.raises(
        JllamaError, match=r"could not save a checkpoint in .*; the last good checkpoint is step 1$"
    ):
        checkpoints.wait()
    again = RunCheckpoints(tmp_path, read_only=True)
    assert again.steps() == [1]
    assert_whole(again, 1)
