"""The training loop's own bookkeeping; whole runs are in ``tests/commands/test_train.py``."""

import io
import json

from models import SMALL
from rich.console import Console

import jllama
from jllama.training import loop
from jllama.training.step import StepMetrics


def test_the_speed_logged_is_that_of_steps_that_are_done(tmp_path, monkeypatch):
    """A step is dispatched at once and done when its loss can be read: that wait counts."""
    now_s = [100.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now_s[0])

    class Loss:
        def __float__(self):
            now_s[0] = 104.0
            return 2.5

    config = jllama.TrainConfig(SMALL, training=jllama.LoopConfig(batch_size=2, seq_len=8, steps=10))
    run = loop._Run(config, tmp_path, Console(file=io.StringIO()), None, None, None, None)
    run.step = 2
    run.log([StepMetrics(Loss(), 1.0, 16.0)] * 2, start_s=100.0)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["loss"], line["tokens_per_s"], line["step_s"]) == (2.5, 8.0, 2.0)
