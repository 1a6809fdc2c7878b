"""What is measured of a run: the means of its steps, their speed, and the evaluation."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jllama.data.datasets import TrainingData
from jllama.devices import peak_flops
from jllama.errors import JllamaError
from jllama.evaluation.scoring import TextScore
from jllama.training.config import TrainConfig
from jllama.training.step import StepMetrics, Training, TrainState, put_on_devices


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The validation loss in nats per token or per pair of answers, and what follows from it.

    ``perplexity`` and ``bits_per_byte`` are None unless the objective is a likelihood of text;
    ``validation_figures`` has the means of the objective's further figures.
    """

    validation_loss: float
    perplexity: float | None
    bits_per_byte: float | None
    validation_figures: dict[str, float] | None = None

    def __str__(self) -> str:
        figures = self.validation_figures or {}
        if "reward" in figures:
            return f"held-out prompts{figures_text(figures)[1:]}"
        text = f"validation loss {self.validation_loss:.4f}"
        if self.perplexity is not None:
            text += f", perplexity {self.perplexity:.2f}, {self.bits_per_byte:.3f} bits per byte"
        return text + figures_text(figures)


def figures_text(means: dict[str, float] | None) -> str:
    """Return the means of an objective's figures as text for people; empty if there are none."""
    figures = (means or {}).items()
    return "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in figures)


def evaluate(
    training: Training,
    data: TrainingData,
    config: TrainConfig,
    state: TrainState,
    max_tokens: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate on about ``max_tokens`` tokens of the validation split; 0 means all of it.

    Returns None as soon as ``should_stop()`` is true, which is asked before each batch.
    """
    options = config.training
    batches = data.validation_batches(
        batch_size=options.batch_size, seq_len=options.seq_len, max_tokens=max_tokens
    )
    token_bytes = data.tokenizer.token_bytes()
    params = training.weights(state)
    sums = []
    for batch in batches:
        if should_stop():
            return None
        on_devices = put_on_devices(batch, training.batch_sharding)
        text_bytes = token_bytes[batch.tokens[:, 1:][batch.counted[:, 1:]]].sum()
        results = jax.device_get(training.evaluate(params, on_devices, state.base))
        sums.append((*results, text_bytes))
    if not sums:
        raise JllamaError(
            "the data gave no batch to evaluate with: its validation needs at least one"
        )
    nats, count, figures, text_bytes = add_exactly(sums)
    score = TextScore(nats, round(count), round(text_bytes))
    means = {name: total / count for name, total in figures.items()}
    is_likelihood = not means and options.objective in ("auto", "next_token")
    if is_likelihood:
        return Evaluation(score.loss, score.perplexity, score.bits_per_byte)
    return Evaluation(score.loss, None, None, means or None)


def add_exactly(sums: Sequence[Any]) -> Any:
    """Add equal trees of numbers leaf by leaf, rounded once at the end."""
    return jax.tree.map(lambda *numbers: math.fsum(map(float, numbers)), *sums)


def mean_figures(sums: Sequence[dict[str, Any]], counts: Sequence[Any]) -> dict[str, float]:
    """Return the means of an objective's figures, from sums and counts of several batches."""
    total = add_exactly(counts)
    return {name: figure / total for name, figure in add_exactly(sums).items()}


def summarize(
    steps: Sequence[StepMetrics], elapsed_s: float, flops_per_token: float
) -> dict[str, Any]:
    """Return the means over some steps, and their speed.

    ``mfu`` is the share of the devices' peak FLOP/s, or None where that is not known.
    """
    tokens_per_s = math.fsum(float(step.tokens) for step in steps) / elapsed_s
    flops_per_s = tokens_per_s * flops_per_token
    peak = peak_flops(jax.devices()[0].device_kind)
    record = {
        "loss": float(np.mean([float(step.loss) for step in steps])),
        "grad_norm": float(np.mean([float(step.grad_norm) for step in steps])),
        "tokens_per_s": tokens_per_s,
        "step_s": elapsed_s / len(steps),
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / (peak * jax.device_count()) if peak else None,
    }
    figures = mean_figures([step.figures for step in steps], [step.num_counted for step in steps])
    if figures:
        record["figures"] = figures
    return record
