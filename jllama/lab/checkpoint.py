"""A user's own checkpoint: its weights examined, its logits compared with the float64 oracle."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jllama.core import UsageError
from jllama.core.config import LlamaConfig, RopeScaling
from jllama.core.parameters import count_parameters
from jllama.formats.registry import open_checkpoint
from jllama.generation.text import prompt_ids
from jllama.lab.checks import worst_error
from jllama.lab.layerwise import run_layerwise
from jllama.models import oracle
from jllama.models.presets import OTHER_FIELDS, PRESETS, differing_fields, nearest_preset
from jllama.score.scoring import TextScore
from jllama.tokenizers.base import Tokenizer

TOLERANCE = 1e-4
"""Relative error of float32 against float64, of each layer (``update_error``) and of the logits.

The error of the logits is their ``worst_error``. Measured on SmolLM2-135M and on random models of
every variant, layers are at most 9e-6 off, logits 1.6e-5. Doubling RoPE's base puts SmolLM2's
layers 4e-2 to 2e-1 off, one per cent more 7e-4 to 3e-3. Deeper models amplify rounding more, so the
logits need the room; damaged weights may amplify it past the tolerance though each layer by itself
is right.
"""
MAX_TOKENS = 256
"""A longer text is cut: this many tokens show what can be seen, and take minutes in a 7B model."""
PROSE = " ".join(Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").split())
"""A text in plain words, easy also for a model that is trained on children's stories alone."""
HARD = (
    "Füße, naïve — 北京で、안녕 мир 👩‍👩‍👧 x²\tdef f(x):\n"
    "    return  {x: [1,  23]}\r\n\n   <s> e\u0301 \u00a0 end  "
)
"""A text that tokenizers get wrong: accents, scripts, emoji, code, spaces, control tokens."""


@dataclasses.dataclass(frozen=True)
class CheckpointResult:
    """The contents of a checkpoint and the error of jllama's computation of it, as plain data.

    Attributes:
        path: where it is.
        config: its architecture.
        preset: the released Llama of this shape; empty if there is none.
        findings: a sentence for each unusual fact.
        problems: a sentence for each fault.
        fingerprint: the SHA-256 of every tensor's key, shape and float32 values, in the order of
            ``tensor_specs``.
        num_parameters: of the model.
        num_tokens: of the text that was run.
        layer_errors: the ``update_error`` of each layer alone, on the oracle's input.
        first_divergent_layer: the index, from 0, of the first layer whose error is not below the
            tolerance; None if there is none.
        logits_error: the ``worst_error`` of the whole model's logits over positions.
        tolerance: of the layers' errors and of the logits' error.
        perplexity: of the text, by the oracle's logits; None if no byte of it is predicted.
        bits_per_byte: the same in bits for each byte of the text.
    """

    path: str
    config: LlamaConfig
    preset: str
    findings: list[str]
    problems: list[str]
    fingerprint: str
    num_parameters: int
    num_tokens: int
    layer_errors: list[float]
    first_divergent_layer: int | None
    logits_error: float
    tolerance: float
    perplexity: float | None = None
    bits_per_byte: float | None = None

    @property
    def passed(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def verify_checkpoint(
    path: str | Path,
    text: str | None = None,
    *,
    rope_factor: float | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> CheckpointResult:
    """Examine a checkpoint of any format, and compare jllama's computation of it with the oracle.

    Layers, logits, tokenizer and configuration are judged; perplexity is only reported. Besides the
    logits, memory holds one layer at 12 bytes a parameter; a run's own checkpoint is loaded whole.

    Args:
        path: as in ``jllama.load``.
        text: what to run, cut to ``MAX_TOKENS`` tokens or the model's context; ``PROSE`` if None.
        rope_factor: as in ``jllama.load``.
        on_stage: called with the name of each stage, such as ``layer 3 of 30``.

    Raises:
        JllamaError: the checkpoint cannot be opened.
        UsageError: the text is empty, or ``rope_factor`` is wrong.
    """
    # The arguments, the checkpoint and its configuration.
    if text is not None and not text.strip():
        raise UsageError(
            "the text is empty: give some of the kind that the model was trained on, or none"
        )
    on_stage("opening")
    checkpoint = open_checkpoint(path, rope_factor)
    config = checkpoint.config
    tokenizer = checkpoint.tokenizer
    findings = config_findings(config)
    problems = []

    # The tokenizer, and the tokens to run.
    max_tokens = min(MAX_TOKENS, config.max_seq_len)
    if tokenizer is None:
        findings.append("there is no tokenizer: random tokens are run, and perplexity is unknown")
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, max_tokens).tolist()
    else:
        tokens = prompt_ids(tokenizer, PROSE if text is None else text)[:max_tokens]
        num_unused = config.vocab_size - tokenizer.vocab_size
        if num_unused:
            findings.append(
                f"the embedding has {config.vocab_size:,} rows for the tokenizer's "
                f"{tokenizer.vocab_size:,} tokens: the last {num_unused:,} belong to none"
            )
        change = tokenizer_change(tokenizer, HARD)
        if change:  # no problem: a tokenizer may be meant to normalize
            findings.append(f"the tokenizer changes some text: {change}")
        change = tokenizer_change(tokenizer, PROSE)
        if change:
            problems.append(f"the tokenizer does not give back plain English: {change}")

    # Weights, layers and logits.
    with jax.default_matmul_precision("highest"):
        run = run_layerwise(checkpoint, tokens, on_stage)
    problems += run.damage
    divergent = [index for index, error in enumerate(run.layer_errors) if not error < TOLERANCE]
    if divergent:
        problems.append(
            f"the output of {len(divergent)} of {config.num_layers} layers is not the float64 "
            f"oracle's, first of layers/{divergent[0]}: relative error "
            f"{run.layer_errors[divergent[0]]:.1e}, tolerance {TOLERANCE:.0e}"
        )
    logits_error = worst_error(run.jax_logits, run.oracle_logits)
    if not logits_error < TOLERANCE:
        problem = (
            "the logits are not the float64 oracle's: "
            f"relative error {logits_error:.1e}, tolerance {TOLERANCE:.0e}"
        )
        if not divergent:
            problem += "; each layer alone is right, so these weights amplify float32's rounding"
        problems.append(problem)

    # The perplexity, if there is a tokenizer.
    score = None
    if tokenizer is not None:
        score = _score(run.oracle_logits, tokens, tokenizer)
        if score is None:
            findings.append(
                f"none of the text's {len(tokens)} tokens can be predicted: give a longer text"
            )
    return CheckpointResult(
        path=str(path),
        config=config,
        preset=nearest_preset(config),
        findings=findings,
        problems=problems,
        fingerprint=run.fingerprint,
        num_parameters=count_parameters(config),
        num_tokens=len(tokens),
        layer_errors=run.layer_errors,
        first_divergent_layer=divergent[0] if divergent else None,
        logits_error=logits_error,
        tolerance=TOLERANCE,
        perplexity=score and score.perplexity,
        bits_per_byte=score and score.bits_per_byte,
    )


def _score(logits: np.ndarray, tokens: list[int], tokenizer: Tokenizer) -> TextScore | None:
    """Score all tokens but the first; None if they are no bytes of text."""
    targets = np.asarray(tokens[1:], np.int64)
    text_bytes = int(tokenizer.token_bytes()[targets].sum())
    if not text_bytes:
        return None
    nats, count = oracle.cross_entropy(logits[:-1], targets, np.ones(len(targets), bool))
    return TextScore(nats, count, text_bytes)


def checkpoint_lines(result: CheckpointResult, seconds: float) -> Iterator[str]:
    """Yield what ``jllama verify PATH`` prints: facts, notes, problems, and PASS or FAIL."""
    max_error = max(result.layer_errors)
    facts = {
        "checkpoint": result.path,
        "nearest release": result.preset or "none of this shape",
        "parameters": f"{result.num_parameters:,}",
    }
    facts |= {name: shown(value) for name, value in vars(result.config).items()}
    facts |= {
        "fingerprint": result.fingerprint,
        "text": f"{result.num_tokens} tokens",
        "layers": f"largest relative error {max_error:.1e} "
        f"(layer {result.layer_errors.index(max_error)})",
        "logits": f"relative error {result.logits_error:.1e}; tolerance {result.tolerance:.0e}",
    }
    if result.perplexity is not None:
        form = ",.2f" if result.perplexity < 1e9 else ".0e"
        facts["perplexity"] = format(result.perplexity, form)
        facts["bits per byte"] = f"{result.bits_per_byte:.2f}"
    yield from (f"{name:17}{fact}" for name, fact in facts.items())
    yield from (f"note: {finding}" for finding in result.findings)
    yield from (f"problem: {problem}" for problem in result.problems)
    verdict = "PASS: jllama computes this checkpoint as the oracle does"
    if result.first_divergent_layer is not None:
        verdict = f"FAIL: jllama and the oracle differ from layer {result.first_divergent_layer} on"
    elif not result.passed:
        verdict = "FAIL: see the problems"
    yield f"{verdict} ({seconds:.0f} s)"


def config_findings(config: LlamaConfig) -> list[str]:
    """Return a sentence for each field that differs from the nearest released Llama's.

    If no released Llama has the same shape, there is a sentence for each unusual field.

    Examples:
        >>> config_findings(dataclasses.replace(PRESETS["llama2-7b"], norm_eps=1e-6))
        ['norm_eps is 1e-06; llama2-7b, of the same shape, has 1e-05']
    """
    name = nearest_preset(config)
    if name:
        subject = f"{name}, of the same shape, has"
        released = PRESETS[name]
        fields = differing_fields(OTHER_FIELDS, config, released)
        usual = {field: [getattr(released, field)] for field in fields}
    else:
        subject = "released Llamas have"
        usual = {
            "norm_eps": [1e-5, 1e-6],
            "rope_theta": sorted({released.rope_theta for released in PRESETS.values()}),
            "head_dim": [config.embed_dim / config.num_heads],
        }
    sentences = []
    for field, values in usual.items():
        value = getattr(config, field)
        if value not in values:
            sentences.append(
                f"{field} is {shown(value)}; {subject} {', '.join(map(shown, values))}"
            )
    return sentences


def shown(value: Any) -> str:
    """Format a field of a configuration for a sentence.

    Examples:
        >>> shown(PRESETS["llama3.1-8b"].rope_scaling)
        'llama3, factor 8, from 8,192 tokens'
    """
    if isinstance(value, RopeScaling):
        original = vars(value).get("original_max_seq_len")
        text = f"{value.type}, factor {value.factor:g}"
        return f"{text}, from {original:,} tokens" if original else text
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | tuple):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def tokenizer_change(tokenizer: Tokenizer, text: str) -> str:
    """Describe where ``decode(encode(text))`` first differs from ``text``; empty if it does not."""
    decoded = tokenizer.decode(tokenizer.encode(text))
    if decoded == text:
        return ""
    start = 0
    while decoded[start : start + 1] == text[start : start + 1]:
        start += 1
    return f"{text[start : start + 12]!r} came back as {decoded[start : start + 12]!r}"
