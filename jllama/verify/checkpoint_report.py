"""What was found of a checkpoint, for a terminal, a browser and a program."""

from __future__ import annotations

import dataclasses
from typing import Any

from jllama.verify.checkpoint import CheckpointReport
from jllama.verify.report import error_cell, finite, html_page, machine

_LAYERS_IN_ROW = 10


def facts_of(found: CheckpointReport) -> dict[str, str]:
    """What a checkpoint is and how it did, each in a few words."""
    config, scaling = found.config, found.config.rope_scaling
    rope = f"theta {config.rope_theta:,.0f}" + (f", {scaling.type} x{scaling.factor:g}" if scaling else "")
    heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values"
    worst = max(found.layer_errors)
    facts = {
        "checkpoint": found.path,
        "nearest release": found.preset or "none of this shape",
        "parameters": f"{found.num_parameters:,}",
        "architecture": f"{config.num_layers} layers of width {config.embed_dim}, {heads}, MLP {config.mlp_dim}",
        "vocabulary": f"{config.vocab_size:,}, {'tied' if config.tie_embeddings else 'its own'} head",
        "RoPE": f"{rope}, context {config.max_seq_len:,}",
        "norm epsilon": f"{config.norm_eps:g}",
        "fingerprint": found.fingerprint,
        "text": f"{found.num_tokens} tokens",
        "layers": f"largest relative error {worst:.1e} (layer {found.layer_errors.index(worst)})",
        "logits": f"relative error {found.logits_error:.1e}; tolerance {found.tolerance:.0e}",
    }
    if found.transformers_error is not None:
        facts["transformers"] = (
            f"{found.transformers_error:.1e} from jllama, {found.transformers_oracle_error:.1e} from the oracle"
        )
    if found.perplexity is not None:
        facts["perplexity"] = (
            f"{found.perplexity:,.2f}; {found.bits_per_byte:.2f} bits per byte "
            f"({found.baseline_bits_per_byte:.2f} by the text's byte frequencies alone)"
        )
    return facts


def verdict(found: CheckpointReport) -> str:
    """One line: PASS or FAIL, and where the first layer diverges if one does."""
    if found.first_divergent_layer is not None:
        return f"FAIL: jllama and the oracle part at layer {found.first_divergent_layer}"
    return "PASS: jllama computes this checkpoint as the oracle does" if found.passed else "FAIL: see the problems"


def lines(found: CheckpointReport) -> list[str]:
    """The facts, what is out of the ordinary and what is wrong, for a terminal."""
    facts = facts_of(found)
    width = max(map(len, facts)) + 2
    return [
        *(f"{name:{width}}{fact}" for name, fact in facts.items()),
        *(f"note: {finding}" for finding in found.findings),
        *(f"problem: {problem}" for problem in found.problems),
    ]


def as_json(found: CheckpointReport) -> dict[str, Any]:
    """Everything, for a program; a number that is not finite is null."""
    return finite({"passed": found.passed, "machine": machine(), **dataclasses.asdict(found)})


def page(found: CheckpointReport, seconds: float) -> str:
    """The facts and each layer's error as one HTML page."""
    cells = [error_cell(error, found.tolerance, f"layer {i}") for i, error in enumerate(found.layer_errors)]
    rows = [(str(first), cells[first : first + _LAYERS_IN_ROW]) for first in range(0, len(cells), _LAYERS_IN_ROW)]
    layers = ("Layers: relative error of each against the float64 oracle", [""] * len(rows[0][1]), rows)
    facts = facts_of(found) | {"time": f"{seconds:.0f} s"}
    return html_page(verdict(found), found.problems + found.findings, [layers], facts)
