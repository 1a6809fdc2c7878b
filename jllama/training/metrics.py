"""What a run takes and what is measured of it: memory, speed, and the evaluation."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jllama.data.batches import Rows, chat_validation_batches, validation_batches
from jllama.data.tokens import Dataset
from jllama.devices import describe_devices, device_bytes, device_memory_bytes, peak_flops
from jllama.errors import UsageError
from jllama.evaluation.scoring import TextScore
from jllama.parameters import training_flops_per_token
from jllama.training.config import TrainConfig
from jllama.training.step import StepMetrics, Training, TrainState, check_batch, on_devices


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Validation loss in nats a token, or of pairs of answers a pair; and unless those are pairs, its exponential, and
    the loss over the bytes of the text, in bits; of pairs ``preference_means``.
    """

    validation_loss: float
    perplexity: float | None
    bits_per_byte: float | None
    validation_preference: dict[str, float] | None = None

    def __str__(self) -> str:
        perplexity, bits = self.perplexity, self.bits_per_byte
        others = "" if perplexity is None else f", perplexity {perplexity:.2f}, {bits:.3f} bits per byte"
        return f"validation loss {self.validation_loss:.4f}{others}{preference_words(self.validation_preference)}"


def preference_means(sums: Sequence[Any]) -> dict[str, float]:
    """The means over pairs of answers, from sums as ``StepMetrics.preference`` has them.

    ``accuracy`` is the share of pairs whose chosen answer has the larger reward. A reward is ``dpo_beta`` times the
    answer's log-probability over that before training; ``margin`` is how much larger that of the chosen answer is.
    """
    pairs, right, chosen, rejected = np.sum(sums, axis=0).tolist()
    means = {"accuracy": right, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    return {name: value / pairs for name, value in means.items()}


def preference_words(means: dict[str, float] | None) -> str:
    """The means for people; nothing if there are none."""
    text = ", accuracy {accuracy:.1%}, margin {margin:.3f}, rewards {chosen_reward:.3f} and {rejected_reward:.3f}"
    return text.format(**means) if means else ""


def evaluate(
    training: Training, data: Dataset, config: TrainConfig, state: TrainState, max_tokens: int, stop: Any
) -> Evaluation | None:
    """The loss on the validation split, or (over 0) about ``max_tokens`` of it; None as soon as ``stop()`` is true."""
    size = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len, "max_tokens": max_tokens}
    if data.is_text:
        batches = validation_batches(data.validation, **size)
    else:
        batches = ((rows, None) for rows in chat_validation_batches(data.validation, **size))
    sums, pairs, token_bytes = [], [], data.tokenizer.token_bytes()
    for batch, mask in batches:
        if stop():
            return None
        on_device = on_devices((batch, mask), training.batch_sharding)
        nats, count = jax.device_get(training.evaluate(state.params, *on_device, state.base))
        if data.preference:
            pairs.append(count)
            count = count[0]
        targets = batch.tokens[batch.counted] if isinstance(batch, Rows) else batch[:, 1:][mask]
        sums.append((float(nats), int(count), int(token_bytes[targets].sum())))
    nats, counts, text_bytes = zip(*sums, strict=True)
    score = TextScore(math.fsum(nats), sum(counts), sum(text_bytes))
    if data.preference:
        return Evaluation(score.loss, None, None, preference_means(pairs))
    return Evaluation(score.loss, score.perplexity, score.bits_per_byte)


def summarize(steps: Sequence[StepMetrics], elapsed_s: float, config: TrainConfig) -> dict[str, Any]:
    """Means over some steps, and their speed. ``mfu`` is the share of the devices' peak, where that is known."""
    tokens_per_s = math.fsum(float(step.tokens) for step in steps) / elapsed_s
    flops_per_token = training_flops_per_token(config.model, config.training.seq_len, frozen=bool(config.lora.rank))
    flops_per_s = tokens_per_s * flops_per_token
    peak = peak_flops(jax.devices()[0].device_kind)
    pairs = [step.preference for step in steps if step.preference is not None]
    return {
        **{name: float(np.mean([float(getattr(step, name)) for step in steps])) for name in ("loss", "grad_norm")},
        "tokens_per_s": tokens_per_s,
        "step_s": elapsed_s / len(steps),
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / (peak * jax.device_count()) if peak else None,
        **({"preference": preference_means(pairs)} if pairs else {}),
    }


def check_memory(config: TrainConfig, training: Training, available_bytes: int | None = None) -> None:
    """Raise ``UsageError`` for a batch that does not divide over the devices, and for what cannot fit on one.

    Counted is the least that any program needs: its share of the state and the gradients, and each layer's input for
    one part of a batch. CPUs share the memory of the machine.
    """
    options, mesh, device = config.training, training.mesh, training.mesh.local_devices[0]
    check_batch(config, mesh)
    state = jax.eval_shape(training.init, jax.random.key(0))
    state_bytes = device_bytes((state, state.params))  # there is a gradient for each parameter
    tokens = options.batch_size * options.seq_len / options.accumulation / (mesh.size / mesh.shape["tensor"])
    activation_bytes = 2 * tokens * config.model.embed_dim * config.model.num_layers
    needed = np.array([state_bytes, activation_bytes]) * (len(mesh.local_devices) if device.platform == "cpu" else 1)
    have = available_bytes or device_memory_bytes(device) or np.inf
    if needed.sum() > have:
        state, batch, memory = (f"{size / 2**30:,.1f} GiB" for size in (*needed, have))
        said = f"the model and its optimizer take {state} and a batch {batch}, over the {memory} of"
        advice = "take a smaller model, training.batch_size or training.seq_len, or more devices"
        raise UsageError(f"{said} {describe_devices(mesh)}: {advice}")
