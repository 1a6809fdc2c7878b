"""What is measured of a run: the means of its steps, their speed, and the evaluation."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_row, parameter_table
from jllama.core.step import StepMetrics
from jllama.system.devices import peak_flops
from jllama.system.files import METRICS, read_lines


def training_flops_per_token(
    config: LlamaConfig, seq_len: int, trained: Mapping[str, float] | None = None
) -> float:
    """Return the floating-point operations of one forward and backward pass, per token.

    ``6 * (matrix parameters) + 12 * num_layers * num_heads * head_dim * seq_len``: two for each
    multiply-add, three passes, and the attention products over ``seq_len`` keys, or as many as a
    layer's sliding window or chunk has. The embedding counts where it is used as the head. Frozen
    matrices have two passes, since they need no gradients. Adapters are not counted, nor are
    experts that a token did not choose.
    Source: Chowdhery et al. 2022, appendix B (arXiv:2204.02311).

    Args:
        config: the architecture.
        seq_len: tokens of a sequence.
        trained: the fraction of each parameter that is trained, by path; None: all.
    """
    flops = 12.0 * config.num_heads * config.head_dim * config.num_visible(seq_len)
    for path, row in parameter_table(config).items():
        is_used = config.tie_embeddings or path != "embed"
        if row.role == "matrix" and is_used:
            fraction = 1.0 if trained is None else trained.get(path, 0.0)
            flops += (4 + 2 * fraction) * count_row(row, config, active=True)
    return flops


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


def note_of(record: Mapping[str, Any]) -> str:
    """Return the line for people of a record of steps."""
    figures = figures_text(record.get("figures"))
    if "reward" not in record:
        return f"loss {record['loss']:.3f}{figures}  {record['tokens_per_s']:,.0f} tokens/s"
    tokens_per_s = record["sampled_tokens"] / record["step_s"]
    note = "reward {reward:.3f}, mismatch {mismatch_max:.1e}, ".format_map(record)
    return f"{note}{tokens_per_s:,.0f} answer tokens/s{figures}"


def is_out_of_patience(folder: Path, patience: int, data_since: int = 0) -> bool:
    """Return whether the lowest validation loss is ``patience`` evaluations old; 0 is never.

    Those up to step ``data_since`` were of other data.
    """
    if not patience:
        return False
    lines = read_lines(folder / METRICS, "validation_loss")
    losses = [line["validation_loss"] for line in lines if line["step"] > data_since]
    return bool(losses) and len(losses) - losses.index(min(losses)) > patience


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
