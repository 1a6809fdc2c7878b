"""Where two checkpoints, formats or runs that should agree begin to differ."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Float
from rich.tree import Tree

from jllama import oracle
from jllama.checkpoints import run
from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.tensors import Checkpoint, blocks
from jllama.config import LlamaConfig
from jllama.files import Json, read_lines
from jllama.generation.text import prompt_ids
from jllama.parameters import TensorSpec, as_matrix, shape_of, tensor_specs
from jllama.training.receipt import read_receipt
from jllama.verify.checkpoint import PROSE, shown
from jllama.verify.layerwise import update_error

_MAX_TOKENS = 64
_ROWS = 4096  # of a tensor that are compared at once


class Difference(NamedTuple):
    """One place in which the two were compared.

    Attributes:
        part: configuration, tokenizer, weights, activations, session or training.
        name: of the field, tensor, operation, step or figure.
        error: a relative difference; 1 for values that are no numbers.
        text: the two values, where they are short.
    """

    part: str
    name: str
    error: float
    text: str = ""


class Bisection(NamedTuple):
    """All places that were compared, in order, and what is allowed."""

    compared: list[Difference]
    tolerance: float

    @property
    def first(self) -> Difference | None:
        """The first difference that is larger than allowed, in what was computed."""
        results = (one for one in self.compared if one.part != "session")
        return next((one for one in results if not one.error <= self.tolerance), None)

    @property
    def verdict(self) -> str:
        """One sentence."""
        largest = max((one.error for one in self.compared if one.part != "session"), default=0.0)
        if self.first is None:
            return (
                f"PASS: no difference in {len(self.compared)} places is over {self.tolerance:.0e} "
                f"(the largest is {largest:.1e})"
            )
        others = [one.name for one in self.compared if one.part == "session" and one.error]
        sessions = f"; their sessions differ in {', '.join(others)}" if others else ""
        first = f"{self.first.part}, {self.first.name}: {_figure(self.first)}"
        return f"FAIL: they differ first in {first}{sessions}"


def _figure(one: Difference) -> str:
    return one.text or f"relative difference {one.error:.1e}"


def bisection_tree(bisection: Bisection) -> Tree:
    """Return the differences by part, and how many places of each part have none."""
    root = Tree("compared")
    for part in dict.fromkeys(one.part for one in bisection.compared):
        members = [one for one in bisection.compared if one.part == part]
        different = [one for one in members if one.error > bisection.tolerance]
        largest = max(one.error for one in members)
        summary = f"{part}: {len(members) - len(different)} of {len(members)} places agree"
        branch = root.add(f"{summary}, the largest difference is {largest:.1e}")
        # One branch for each layer or step.
        groups: dict[str, Tree] = {}
        for one in different:
            group, _, last = one.name.rpartition("/")
            if group and group not in groups:
                groups[group] = branch.add(group)
            mark = "  <- first" if one is bisection.first else ""
            groups.get(group, branch).add(f"{last}: {_figure(one)}{mark}")
    return root


def bisect(
    a: str | Path,
    b: str | Path,
    tolerance: float = 1e-5,
    on_stage: Callable[[str], object] = lambda _: None,
) -> Bisection:
    """Compare two checkpoints of any formats, or two runs.

    Runs are compared by what they logged, too: their sessions, then each step. Of checkpoints the
    configuration, the tokenizer and the weights are compared, and then, if any of these differs,
    what each operation of each layer adds to the residual stream. Both then compute, by the float64
    oracle, from the same input, so that a difference is that of this layer alone.

    Raises:
        JllamaError: one of them cannot be opened.
    """
    on_stage("opening")
    compared = []
    if run.recognizes(Path(a)) and run.recognizes(Path(b)):
        compared += _compare_runs(Path(a), Path(b))
    one, other = (open_checkpoint(path) for path in (a, b))
    compared += _compare_values("configuration", vars(one.config), vars(other.config))
    names = [each.tokenizer and each.tokenizer.fingerprint()[:12] for each in (one, other)]
    compared += _compare_values("tokenizer", {"file": names[0]}, {"file": names[1]})
    have_same_shapes = _shapes(one.config) == _shapes(other.config)
    weights = []
    if have_same_shapes:
        for spec in tensor_specs(one.config):
            on_stage(f"comparing {spec.key}")
            weights.append(Difference("weights", spec.key, _tensor_error(spec, one, other)))
    compared += weights
    is_same = not any(item.error for item in compared if item.part in ("configuration", "weights"))
    if have_same_shapes and not is_same:
        compared += _compare_activations(one, other, on_stage)
    return Bisection(compared, tolerance)


def _shapes(config: LlamaConfig) -> dict[str, Any]:
    return {spec.key: spec.shape for spec in tensor_specs(config)}


def _compare_values(part: str, before: Json, after: Json) -> Iterator[Difference]:
    """Yield each value that either has, with an error of 1 if they differ."""
    for name in {**before, **after}:
        values = [each.get(name) for each in (before, after)]
        if values[0] == values[1]:
            yield Difference(part, name, 0.0)
        else:
            yield Difference(part, name, 1.0, " and ".join(map(shown, values)))


def _compare_runs(a: Path, b: Path) -> Iterator[Difference]:
    """Yield the differences of what two runs wrote: sessions, steps, and weights when saved."""
    receipts = [read_receipt(folder) for folder in (a, b)]
    sessions = []
    for receipt in receipts:
        last = next(reversed(receipt["sessions"].values()), {})
        session = {"data": receipt["data"]} | receipt["config"] | last
        sessions.append({**flatten_dict(session, sep="."), "run_dir": ""})
    yield from _compare_values("session", *sessions)
    lines = [
        {line["step"]: line for line in read_lines(folder / run.METRICS, "tokens_per_s")}
        for folder in (a, b)
    ]
    saved = [receipt["weights"] for receipt in receipts]
    steps = {step for each in lines for step in each} | {int(step) for step in saved[0]}
    for step in sorted(steps):
        for figure in ("loss", "grad_norm"):
            values = [each[step][figure] for each in lines if step in each]
            if len(values) == 2:
                error = abs(values[0] - values[1]) / (abs(values[0]) or 1.0)
                yield Difference("training", f"step {step}/{figure}", error)
        weights = [each.get(str(step), {}) for each in saved]
        for path in weights[0]:
            if path in weights[1]:
                error = float(weights[0][path] != weights[1][path])
                yield Difference("training", f"step {step}/{path}", error, "other bits")


def _tensor_error(spec: TensorSpec, one: Checkpoint, other: Checkpoint) -> float:
    """Compute the largest difference of a tensor over its largest value, some rows at a time."""
    difference = largest = 0.0
    for start in range(0, spec.shape[0], _ROWS):
        rows = slice(start, min(start + _ROWS, spec.shape[0]))
        left, right = (each.tensors[spec.key][rows].astype(np.float64) for each in (one, other))
        difference = max(difference, float(np.max(np.abs(left - right))))
        largest = max(largest, float(np.max(np.abs(left))))
    return difference / (largest or 1.0)


def _layer_weights(checkpoint: Checkpoint, layer: int) -> dict[str, np.ndarray]:
    """Read a layer in float64."""
    weights = {}
    for spec in tensor_specs(checkpoint.config):
        if spec.layer != layer or spec.parameter.axes[0] != "layers":
            continue
        shape = shape_of(spec.parameter, checkpoint.config)[1:]
        array = np.empty(shape, np.float64)
        tensor = checkpoint.tensors[spec.key]
        as_matrix(spec.parameter, array)[...] = tensor[0 : tensor.shape[0]]
        weights[spec.path.removeprefix("layers/")] = array
    return weights


def _compare_activations(
    one: Checkpoint, other: Checkpoint, on_stage: Callable[[str], object]
) -> Iterator[Difference]:
    """Yield how much each operation differs on the same input, and then the logits."""
    ids = np.arange(_MAX_TOKENS) % one.config.vocab_size
    if one.tokenizer is not None:
        ids = np.array(prompt_ids(one.tokenizer, PROSE)[:_MAX_TOKENS])
    both = (one, other)
    streams = [
        each.config.embedding_multiplier * _rows(each, "embed", ids).astype(np.float64)
        for each in both
    ]
    yield Difference("activations", "embedding", _error(*streams))
    stream = streams[0]
    for layer in range(one.config.num_layers):
        on_stage(f"layer {layer + 1} of {one.config.num_layers}")
        weights = [_layer_weights(each, layer) for each in both]
        for operation in ("attention", "feed_forward"):
            left, right = (
                _operation(operation, stream, own, each.config, layer)
                for own, each in zip(weights, both, strict=True)
            )
            error = update_error(right - stream, left - stream, stream)
            yield Difference("activations", f"layers/{layer}/{operation}", error)
            stream = left
    heads = [_logits(each, stream) for each in both]
    yield Difference("activations", "logits", _error(*heads))


def _operation(
    name: str,
    stream: Float[np.ndarray, "seq embed"],
    weights: dict[str, np.ndarray],
    config: LlamaConfig,
    layer: int,
) -> Float[np.ndarray, "seq embed"]:
    """Run one of the two halves of a block: the other adds nothing with an output of zeros."""
    silent = "w_down" if name == "attention" else "wo"
    weights = weights | {silent: np.zeros_like(weights[silent])}
    seq = len(stream)
    frequencies = oracle.rope_frequencies(config, seq)
    mask = np.tri(seq, dtype=bool)
    return oracle.block(stream, weights, config, mask, np.arange(seq), frequencies, layer)


def _rows(checkpoint: Checkpoint, key: str, ids: np.ndarray) -> np.ndarray:
    tensor = checkpoint.tensors[key]
    return np.concatenate([tensor[int(id) : int(id) + 1] for id in ids])


def _logits(
    checkpoint: Checkpoint, stream: Float[np.ndarray, "seq embed"]
) -> Float[np.ndarray, "seq vocab"]:
    config = checkpoint.config
    norm = checkpoint.tensors["final_norm"]
    scale = norm[0 : norm.shape[0]].astype(np.float64)
    hidden = oracle.rms_norm(stream, scale, config.norm_eps) / config.logits_scaling
    head = checkpoint.tensors["embed" if config.tie_embeddings else "lm_head"]
    parts = [hidden @ block.astype(np.float64).T for block in blocks(head, np.float32)]
    return np.concatenate(parts, axis=1)


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(actual - expected)) / (np.max(np.abs(expected)) or 1.0))
