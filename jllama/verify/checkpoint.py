"""A user's own checkpoint, in any format: its weights examined, its logits compared with the float64 oracle."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllama import oracle
from jllama.checkpoints.registry import open_checkpoint
from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.evaluation.scoring import TextScore
from jllama.generation.text import prompt_ids
from jllama.parameters import count_parameters
from jllama.presets import OTHERS, PRESETS, differing, nearest_preset
from jllama.rope_scaling import RopeScaling
from jllama.tokenizers import Tokenizer
from jllama.verify.checks import worst_error
from jllama.verify.layerwise import run_layerwise

TOLERANCE = 1e-4
"""Relative error of float32 against float64: of each layer (``update_error``) and of the logits (``worst_error``).

Measured on SmolLM2-135M and on random models of every variant: layers are at most 9e-6 off, logits 1.6e-5. Doubling
RoPE's base puts SmolLM2's layers 4e-2 to 2e-1 off, one per cent more 7e-4 to 3e-3. Deeper models amplify rounding more,
so the logits need the room; damaged weights may amplify it past the tolerance though every layer by itself is right.
"""
MAX_TOKENS = (
    256  # a longer text is cut: enough for what is to be seen, and a 7B model takes minutes
)
PROSE = " ".join(Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").split())
"""In plain words, so that a model trained on nothing but children's stories, too, should find it easy."""
HARD = "Füße, naïve — 北京で、안녕 мир 👩‍👩‍👧 x²\tdef f(x):\n    return  {x: [1,  23]}\r\n\n   <s> e\u0301 \u00a0 end  "
"""What tokenizers get wrong: accents, scripts, emoji, code, runs of spaces, the names of control tokens."""


@dataclasses.dataclass(frozen=True)
class CheckpointResult:
    """What a checkpoint holds, and how far jllama's computation of it is from the oracle's. All of it is plain data."""

    path: str
    config: LlamaConfig
    preset: str  # the released Llama of this shape, or empty
    findings: list[str]  # what is unusual, a sentence each
    problems: list[str]  # what is wrong
    fingerprint: str  # SHA-256 of every tensor's key, shape and float32 values in the order of ``tensor_specs``
    num_parameters: int
    num_tokens: int  # of the text that was run
    layer_errors: list[
        float
    ]  # each layer's by itself, given the oracle's input, see ``update_error``
    first_divergent_layer: int | None  # from 0, whose error is not below the tolerance
    logits_error: float  # the largest of the whole model's logits at any position (``worst_error``)
    tolerance: float
    perplexity: float | None = (
        None  # the text's by the oracle's logits; None if none of its bytes is predicted
    )
    bits_per_byte: float | None = None

    passed = property(lambda self: not self.problems, doc="Whether there is no problem.")


def verify_checkpoint(
    path: str | Path,
    text: str | None = None,
    *,
    rope_factor: float | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> CheckpointResult:
    """Examine a checkpoint of any format, and compare jllama's computation of it with the float64 oracle.

    Layers, logits, tokenizer and configuration are judged; perplexity is reported. Memory, besides the logits: one
    layer, at 12 bytes a parameter (a run's own checkpoint is loaded whole). ``path`` and ``rope_factor`` are as in
    ``jllama.load``; ``text`` (None: the built-in ``PROSE``) is cut to ``MAX_TOKENS`` tokens or the model's context;
    ``on_stage`` is called with each stage's name, such as ``layer 3 of 30``.

    Raises ``JllamaError``: the checkpoint cannot be opened; ``UsageError``: an empty text, a wrong ``rope_factor``.
    """
    if text is not None and not text.strip():
        raise UsageError(
            "the text is empty: give some of the kind that the model was trained on, or leave it out"
        )
    on_stage("opening")
    checkpoint = open_checkpoint(path, rope_factor)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    findings, problems = config_findings(config), []

    limit = min(MAX_TOKENS, config.max_seq_len)
    if tokenizer is None:
        findings.append(
            "there is no tokenizer: random tokens were run, and perplexity cannot be told"
        )
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, limit).tolist()
    else:
        tokens = prompt_ids(tokenizer, PROSE if text is None else text)[:limit]
        if unused := config.vocab_size - tokenizer.vocab_size:
            rows = f"the embedding has {config.vocab_size:,} rows for the tokenizer's {tokenizer.vocab_size:,} tokens"
            findings.append(f"{rows}: the last {unused:,} belong to none")
        if changed := tokenizer_change(tokenizer, HARD):  # one that normalizes may be meant to
            findings.append(f"the tokenizer changes some text: {changed}")
        if changed := tokenizer_change(tokenizer, PROSE):
            problems.append(f"the tokenizer does not give back plain English: {changed}")

    with jax.default_matmul_precision("highest"):
        run = run_layerwise(checkpoint, tokens, on_stage)
    logits_error = worst_error(run.own_logits, run.logits)
    divergent = [index for index, error in enumerate(run.layer_errors) if not error < TOLERANCE]
    problems += run.damage
    first = divergent[0] if divergent else None
    if first is not None:
        layers = f"{len(divergent)} of {config.num_layers} layers is not the float64 oracle's, first of layers/{first}"
        error = run.layer_errors[first]
        problems.append(
            f"the output of {layers}: relative error {error:.1e}, tolerance {TOLERANCE:.0e}"
        )
    if not logits_error < TOLERANCE:
        alone = (
            ""
            if divergent
            else "; every layer by itself is right, so these weights amplify float32's rounding"
        )
        error = f"relative error {logits_error:.1e}, tolerance {TOLERANCE:.0e}"
        problems.append(f"the logits are not the float64 oracle's: {error}{alone}")

    perplexity = bits_per_byte = None
    targets = np.asarray(tokens[1:], np.int64)
    if tokenizer and (text_bytes := int(tokenizer.token_bytes()[targets].sum())):
        score = TextScore(
            *oracle.cross_entropy(run.logits[:-1], targets, np.ones(len(targets), bool)), text_bytes
        )
        perplexity, bits_per_byte = score.perplexity, score.bits_per_byte
    elif tokenizer:
        findings.append(
            f"of the text's {len(tokens)} tokens none can be predicted: give a longer text"
        )
    return CheckpointResult(
        str(path),
        config,
        nearest_preset(config),
        findings,
        problems,
        run.fingerprint,
        count_parameters(config),
        len(tokens),
        run.layer_errors,
        first,
        logits_error,
        TOLERANCE,
        perplexity,
        bits_per_byte,
    )


def checkpoint_lines(result: CheckpointResult, seconds: float) -> Iterator[str]:
    """The facts, notes on what is unusual, what is wrong, and PASS or FAIL."""
    errors = result.layer_errors
    facts = {
        "checkpoint": result.path,
        "nearest release": result.preset or "none of this shape",
        "parameters": f"{result.num_parameters:,}",
        **{
            field.name: shown(getattr(result.config, field.name))
            for field in dataclasses.fields(result.config)
        },
        "fingerprint": result.fingerprint,
        "text": f"{result.num_tokens} tokens",
        "layers": f"largest relative error {max(errors):.1e} (layer {errors.index(max(errors))})",
        "logits": f"relative error {result.logits_error:.1e}; tolerance {result.tolerance:.0e}",
    }
    if result.perplexity is not None:
        facts["perplexity"] = (
            f"{result.perplexity:,.2f}" if result.perplexity < 1e9 else f"{result.perplexity:.0e}"
        )
        facts["bits per byte"] = f"{result.bits_per_byte:.2f}"
    yield from (f"{name:17}{fact}" for name, fact in facts.items())
    yield from (f"note: {finding}" for finding in result.findings)
    yield from (f"problem: {problem}" for problem in result.problems)
    verdict = (
        "PASS: jllama computes this checkpoint as the oracle does"
        if result.passed
        else "FAIL: see the problems"
    )
    if result.first_divergent_layer is not None:
        verdict = f"FAIL: jllama and the oracle differ from layer {result.first_divergent_layer} on"
    yield f"{verdict} ({seconds:.0f} s)"


def config_findings(config: LlamaConfig) -> list[str]:
    """A sentence for each field that differs from the nearest released Llama or, without one, is unusual."""
    if name := nearest_preset(config):
        said, released = f"{name}, of the same shape, has", PRESETS[name]
        usual = {
            field: (getattr(released, field),) for field in differing(OTHERS, config, released)
        }
    else:
        said, thetas = (
            "released Llamas have",
            sorted({released.rope_theta for released in PRESETS.values()}),
        )
        usual = {
            "norm_eps": (1e-5, 1e-6),
            "rope_theta": thetas,
            "head_dim": (config.embed_dim / config.num_heads,),
        }
    return [
        f"{field} is {shown(getattr(config, field))}; {said} {', '.join(map(shown, values))}"
        for field, values in usual.items()
        if getattr(config, field) not in values
    ]


def shown(value: Any) -> str:
    """A field of a configuration in a few words."""
    if isinstance(value, RopeScaling):
        original = vars(value).get("original_max_seq_len")
        return f"{value.type}, factor {value.factor:g}" + (
            f", from {original:,} tokens" if original else ""
        )
    if value is None or isinstance(value, bool):
        return {None: "absent", True: "true", False: "false"}[value]
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1 else f"{value:g}"
    )


def tokenizer_change(tokenizer: Tokenizer, text: str) -> str:
    """Where ``decode(encode(text))`` first differs from ``text``, and how; empty if it does not."""
    decoded = tokenizer.decode(tokenizer.encode(text))
    start = next(
        (i for i, (one, two) in enumerate(zip(decoded, text, strict=False)) if one != two),
        len(decoded),
    )
    return (
        ""
        if decoded == text
        else f"{text[start : start + 12]!r} came back as {decoded[start : start + 12]!r}"
    )
