"""What a run takes and what is measured of it: memory, speed, and the evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jllama.data.batches import validation_batches
from jllama.data.tokens import Dataset
from jllama.errors import UsageError
from jllama.parameters import Params, count_parameters, training_flops_per_token
from jllama.sharding import describe_devices, device_memory_bytes
from jllama.training.config import TrainConfig
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

_STATE_BYTES = 16  # a parameter, its gradient and Adam's two moments, in float32


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Validation loss in nats a token; its exponential; and the loss over the bytes of the text, in bits."""

    validation_loss: float
    perplexity: float
    bits_per_byte: float


def make_evaluator(
    config: TrainConfig, data: Dataset, training: Training, stop: Sequence[int] = ()
) -> Callable[[Params, int], Evaluation | None]:
    """A function ``(params, max_tokens)`` that evaluates on that many evenly spaced validation tokens; 0 for all.

    It gives up, with None, as soon as there is something in ``stop``.
    """
    size = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len}
    token_bytes = data.tokenizer.token_bytes()

    def evaluate(params: Params, max_tokens: int) -> Evaluation | None:
        sums = []
        for windows, mask in validation_batches(data.validation, **size, max_tokens=max_tokens):
            if stop:
                return None
            batch = jax.device_put((windows, mask), training.batch_sharding)
            nats, tokens = jax.device_get(training.evaluate(params, *batch))
            sums.append((nats, tokens, token_bytes[windows[:, 1:][mask]].sum()))
        nats, tokens, text_bytes = (math.fsum(map(float, column)) for column in zip(*sums, strict=True))
        loss = nats / tokens
        return Evaluation(loss, math.exp(min(loss, 700.0)), nats / math.log(2) / text_bytes)

    return evaluate


def summarize(steps: Sequence[StepMetrics], elapsed_s: float, config: TrainConfig, num_devices: int) -> dict[str, Any]:
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
        "mfu": flops_per_s / (peak * num_devices) if peak else None,
    }


def check_memory(config: TrainConfig, mesh: Mesh, host_bytes: int | None = None) -> None:
    """Refuse what cannot fit: what is counted is the least that any program needs, before activations.

    ``16 bytes * parameters`` over the devices that split them, and each device's logits, float32, of one part of a
    batch.

    Raises:
        UsageError: a device (or a machine whose CPUs share its memory) has less, or a batch does not divide over them.
    """
    training, rows_ways = config.training, mesh.shape["data"] * mesh.shape["fsdp"]
    if training.batch_size % (rows_ways * training.accumulation):
        raise UsageError(
            f"training.batch_size {training.batch_size} does not divide into {training.accumulation} part(s) over "
            f"{rows_ways} device(s)"
        )
    state = _STATE_BYTES * count_parameters(config.model) / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    tokens = training.batch_size * training.seq_len / rows_ways / training.accumulation
    logits = 4 * tokens * config.model.vocab_size / mesh.shape["tensor"]
    device = mesh.devices.flat[0]
    sharing = len(mesh.local_devices) if device.platform == "cpu" else 1
    have = host_bytes or device_memory_bytes(device)
    if have and sharing * (state + logits) > have:
        raise UsageError(
            f"the model and its optimizer take {_gib(sharing * state)} and the logits of a batch "
            f"{_gib(sharing * logits)}, which {describe_devices(mesh)} with {_gib(have)} cannot hold: take a smaller "
            f"model, training.batch_size or training.seq_len, or more devices"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
