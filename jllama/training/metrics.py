"""What a run takes and what is measured of it: memory, speed, and the evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jllama.data.batches import validation_batches
from jllama.data.tokens import Dataset
from jllama.devices import describe_devices, device_memory_bytes
from jllama.errors import UsageError
from jllama.evaluation.scoring import TextScore
from jllama.parameters import Params, training_flops_per_token
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.step import StepMetrics, Training

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 operations per second by the start of ``jax.Device.device_kind``, from the vendors' data sheets."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Validation loss in nats a token; its exponential; and the loss over the bytes of the text, in bits."""

    validation_loss: float
    perplexity: float
    bits_per_byte: float


def evaluate(
    training: Training, data: Dataset, params: Params, options: LoopConfig, tokens: int = 0, stop: Sequence[int] = ()
) -> Evaluation | None:
    """The loss on ``tokens`` evenly spaced validation tokens, 0 for all; None as soon as ``stop`` is not empty."""
    sums, token_bytes = [], data.tokenizer.token_bytes()
    size = {"batch_size": options.batch_size, "seq_len": options.seq_len, "max_tokens": tokens}
    for windows, mask in validation_batches(data.validation, **size):
        if stop:
            return None
        batch = jax.device_put((windows, mask), training.batch_sharding)
        nats, count = jax.device_get(training.evaluate(params, *batch))
        sums.append((float(nats), int(count), int(token_bytes[windows[:, 1:][mask]].sum())))
    nats, counts, text_bytes = zip(*sums, strict=True)
    score = TextScore(math.fsum(nats), sum(counts), sum(text_bytes))
    return Evaluation(score.loss, score.perplexity, score.bits_per_byte)


def summarize(steps: Sequence[StepMetrics], elapsed_s: float, config: TrainConfig) -> dict[str, Any]:
    """Means over some steps, and their speed. ``mfu`` is the share of the devices' peak, where that is known."""
    tokens_per_s = math.fsum(float(step.tokens) for step in steps) / elapsed_s
    flops_per_s = tokens_per_s * training_flops_per_token(config.model, config.training.seq_len)
    kind = jax.devices()[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if kind.startswith(name)), None)
    return {
        "loss": float(np.mean([float(step.loss) for step in steps])),
        "grad_norm": float(np.mean([float(step.grad_norm) for step in steps])),
        "tokens_per_s": tokens_per_s,
        "step_s": elapsed_s / len(steps),
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / (peak * jax.device_count()) if peak else None,
    }


def check_memory(config: TrainConfig, training: Training, available_bytes: int | None = None) -> None:
    """Refuse what cannot fit: counted is the least that any program needs on a device.

    That is its share of the training state and of the gradients, and, of one part of a batch, each layer's input, from
    which the backward pass begins.

    Raises:
        UsageError: a device (or a machine whose CPUs share its memory) has less, or a batch does not divide over them.
    """
    options, mesh = config.training, training.mesh
    rows_ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if options.batch_size % (rows_ways * options.accumulation):
        raise UsageError(
            f"training.batch_size {options.batch_size} does not divide into {options.accumulation} part(s) over "
            f"{rows_ways} device(s)"
        )
    state = jax.eval_shape(training.init, jax.random.key(0))
    leaves = jax.tree.leaves((state, state.params))  # there is a gradient for each parameter
    state_bytes = sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    tokens = options.batch_size * options.seq_len / rows_ways / options.accumulation
    activation_bytes = 2 * tokens * config.model.embed_dim * config.model.num_layers
    device = mesh.devices.flat[0]
    sharing = len(mesh.local_devices) if device.platform == "cpu" else 1
    have = available_bytes or device_memory_bytes(device)
    if have and sharing * (state_bytes + activation_bytes) > have:
        raise UsageError(
            f"the model and its optimizer take {sharing * state_bytes / 2**30:,.1f} GiB and a batch "
            f"{sharing * activation_bytes / 2**30:,.1f} GiB, which {describe_devices(mesh)} with {have / 2**30:,.1f} "
            f"GiB cannot hold: take a smaller model, training.batch_size or training.seq_len, or more devices"
        )
