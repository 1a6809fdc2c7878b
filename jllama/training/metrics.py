"""What a run takes and what is measured of it: memory, speed, and the evaluation."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jllama.data.datasets import TrainingData
from jllama.devices import (
    describe_devices,
    device_bytes,
    device_memory_bytes,
    loss_chunk_tokens,
    peak_flops,
)
from jllama.errors import JllamaError, UsageError
from jllama.evaluation.scoring import TextScore
from jllama.training.config import TrainConfig
from jllama.training.step import StepMetrics, Training, TrainState, check_batch, on_devices


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Validation loss in nats a token (or a pair of answers), and of tokens its exponential and, in bits, the loss over
    the bytes of the text; and the means of the objective's further figures, if it has any.
    """

    validation_loss: float
    perplexity: float | None
    bits_per_byte: float | None
    validation_figures: dict[str, float] | None = None

    def __str__(self) -> str:
        text = f"validation loss {self.validation_loss:.4f}"
        if self.perplexity is not None:
            text += f", perplexity {self.perplexity:.2f}, {self.bits_per_byte:.3f} bits per byte"
        return text + figures_text(self.validation_figures)


def figures_text(means: dict[str, float] | None) -> str:
    """Means of an objective's figures for people; nothing if there are none."""
    return "".join(
        f", {name.replace('_', ' ')} {value:.3f}" for name, value in (means or {}).items()
    )


def evaluate(
    training: Training,
    data: TrainingData,
    config: TrainConfig,
    state: TrainState,
    max_tokens: int,
    stop: Any,
) -> Evaluation | None:
    """The loss on the validation split, or (over 0) about ``max_tokens`` of it; None as soon as ``stop()`` is true."""
    options = config.training
    batches = data.validation_batches(
        batch_size=options.batch_size, seq_len=options.seq_len, max_tokens=max_tokens
    )
    sums, token_bytes = [], data.tokenizer.token_bytes()
    params = training.weights(state)
    for batch in batches:
        if stop():
            return None
        on_device = on_devices(batch, training.batch_sharding)
        text_bytes = token_bytes[batch.tokens[:, 1:][batch.counted[:, 1:]]].sum()
        sums.append((*jax.device_get(training.evaluate(params, on_device, state.base)), text_bytes))
    if not sums:
        raise JllamaError(
            "the data gave no batch to evaluate with: its validation needs at least one"
        )
    nats, count, figures, text_bytes = add_up(sums)
    score = TextScore(nats, round(count), round(text_bytes))
    means = {name: total / count for name, total in figures.items()}
    if means or options.objective not in ("auto", "next_token"):  # no likelihood of a text
        return Evaluation(score.loss, None, None, means or None)
    return Evaluation(score.loss, score.perplexity, score.bits_per_byte)


def add_up(sums: Sequence[Any]) -> Any:
    """The sums of several batches, trees of numbers that are alike, added leaf by leaf without rounding between."""
    return jax.tree.map(lambda *each: math.fsum(map(float, each)), *sums)


def mean_figures(sums: Sequence[dict[str, Any]], counts: Sequence[Any]) -> dict[str, float]:
    """The means of an objective's figures, from their sums over several batches and what each is divided by."""
    total = add_up(counts)
    return {name: figure / total for name, figure in add_up(sums).items()}


def summarize(
    steps: Sequence[StepMetrics], elapsed_s: float, flops_per_token: float
) -> dict[str, Any]:
    """Means over some steps, and their speed. ``mfu`` is the share of the devices' peak, where that is known."""
    tokens_per_s = math.fsum(float(step.tokens) for step in steps) / elapsed_s
    flops_per_s = tokens_per_s * flops_per_token
    peak = peak_flops(jax.devices()[0].device_kind)
    figures = mean_figures([step.figures for step in steps], [step.num_counted for step in steps])
    return {
        **{
            name: float(np.mean([float(getattr(step, name)) for step in steps]))
            for name in ("loss", "grad_norm")
        },
        "tokens_per_s": tokens_per_s,
        "step_s": elapsed_s / len(steps),
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / (peak * jax.device_count()) if peak else None,
        **({"figures": figures} if figures else {}),
    }


def check_memory(
    config: TrainConfig, training: Training, available_bytes: int | None = None
) -> None:
    """Raise ``UsageError`` for a batch that does not divide over the devices, and for what cannot fit on one.

    Counted is the least that any program needs: its share of the state and the gradients, and each layer's input for
    one part of a batch. CPUs share the memory of the machine.
    """
    options, mesh, device = config.training, training.mesh, training.mesh.local_devices[0]
    check_batch(config, mesh)
    state = jax.eval_shape(training.init, jax.random.key(0))
    tokens = (
        options.batch_size
        * options.seq_len
        / options.accumulation
        / (mesh.size / mesh.shape["tensor"])
    )
    vocab_size = config.model.vocab_size
    logits_bytes = 4 * vocab_size * min(loss_chunk_tokens(device, vocab_size), tokens)
    # There is a gradient for each trained parameter; before the layers' own, there are logits.
    state_bytes = device_bytes(state) + max(device_bytes(training.trained), logits_bytes)
    activation_bytes = 2 * tokens * config.model.embed_dim * config.model.num_layers
    needed = np.array([state_bytes, activation_bytes]) * (
        len(mesh.local_devices) if device.platform == "cpu" else 1
    )
    have = available_bytes or device_memory_bytes(device) or np.inf
    if needed.sum() > have:
        state, batch, memory = (f"{size / 2**30:,.1f} GiB" for size in (*needed, have))
        said = f"the model and its optimizer take {state} and a batch {batch}, over the {memory} of"
        advice = "take a smaller model, training.batch_size or training.seq_len, or more devices"
        raise UsageError(f"{said} {describe_devices(mesh)}: {advice}")
