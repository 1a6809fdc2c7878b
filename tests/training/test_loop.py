"""The training loop's own bookkeeping; whole runs are in ``tests/commands/test_train.py``."""

import io
import types

import jax.numpy as jnp
from models import SMALL
from rich.console import Console

import jllama
from jllama.training import loop
from jllama.training.step import StepMetrics


def test_the_speed_logged_is_that_of_steps_that_are_done(monkeypatch):
    """A step is dispatched at once and done when it has said whether it was left out: that wait counts."""
    now_s, written = [100.0], {}

    def wait_for(value):
        now_s[0] = 104.0
        return value.item()

    monkeypatch.setattr(loop, "bool", wait_for, raising=False)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now_s[0])
    run = types.SimpleNamespace(
        step=2,
        config=jllama.TrainConfig(SMALL, training=jllama.LoopConfig(batch_size=2, seq_len=8, steps=10)),
        console=Console(file=io.StringIO()),
        training=types.SimpleNamespace(mesh=types.SimpleNamespace(local_devices=[])),
        programs={},
        skipped=0,
        data=None,
        seconds=lambda: 9.0,
        write=written.update,
        show=lambda: None,
    )
    step = StepMetrics(jnp.float32(2.5), jnp.float32(1.0), jnp.float32(16.0), jnp.bool_(False))
    loop._Run.log(run, [(step, None)] * 2, 100.0)
    assert (written["loss"], written["tokens_per_s"], written["step_s"]) == (2.5, 8.0, 2.0)
