"""Where two checkpoints, formats or runs that should agree begin to differ."""

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Float
from rich.tree import Tree

from jllama.core.config import LlamaConfig
from jllama.formats import run
from jllama.formats.receipt import RECEIPT, read_receipt
from jllama.formats.registry import local_copy, open_checkpoint
from jllama.formats.tensors import Checkpoint, TensorSpec, tensor_specs
from jllama.generation.text import prompt_ids
from jllama.lab.checkpoint import PROSE
from jllama.lab.checks import relative_error
from jllama.lab.layerwise import Reader, oracle_layer, update_error
from jllama.models import oracle
from jllama.system.files import METRICS, Json, read_lines
from jllama.system.places import is_url

FIGURES = ("loss", "grad_norm")
"""What a run logs that only its steps decide."""
_MAX_TOKENS = 64
_ROWS = 4096  # of a tensor that are compared at once


class Difference(NamedTuple):
    """One place in which the two were compared.

    Attributes:
        part: configuration, tokenizer, weights, activations, session or training.
        name: of the field, tensor, operation, step or figure.
        error: a relative difference; 1 for values that are no numbers.
        text: the two values, where they differ; empty for tensors.
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
        results = [one for one in self.compared if one.part != "session"]
        return next(filter(self.is_over, results), None)

    def is_over(self, one: Difference) -> bool:
        """Return whether a difference is larger than allowed; NaN is."""
        return not one.error <= self.tolerance

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.first is None:
            errors = [one.error for one in self.compared if one.part != "session"]
            largest = max(errors, default=0.0)
            if not largest:
                return f"PASS: the same in every bit, in {len(self.compared)} places"
            return (
                f"PASS: no difference in {len(self.compared)} places is over {self.tolerance:.0e} "
                f"(the largest is {largest:.1e})"
            )
        others = [one.name for one in self.compared if one.part == "session" and one.error]
        sessions = f"; their sessions differ in {', '.join(others)}" if others else ""
        first = f"{self.first.part}, {self.first.name}: {_figure(self.first)}"
        return f"FAIL: they differ first in {first}{sessions}"


def _figure(one: Difference) -> str:
    size = f"relative difference {one.error:.1e}"
    return f"{one.text} ({size})" if one.text else size


def bisection_tree(bisection: Bisection) -> Tree:
    """Return the differences by part, and how many places of each part have none."""
    root = Tree("compared")
    for part in dict.fromkeys(one.part for one in bisection.compared):
        members = [one for one in bisection.compared if one.part == part]
        different = list(filter(bisection.is_over, members))
        largest = np.max([one.error for one in members])
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
    left: str | Path,
    right: str | Path,
    tolerance: float = 1e-5,
    on_progress: Callable[..., object] = lambda **_: None,
) -> Bisection:
    """Compare two checkpoints of any formats, or two runs.

    Runs are compared by what they logged, too: their sessions, then each step. Of checkpoints the
    configuration, the tokenizer and the weights are compared, and then, if any of these differs,
    what each operation of each layer adds to the residual stream. Both then compute, by the float64
    oracle, from the same input, so that a difference is that of this layer alone.

    Raises:
        JllamaError: one of them cannot be opened.
    """
    on_progress(description="opening")
    paths = [local_copy(path) if is_url(path) else Path(path) for path in (left, right)]
    compared = []
    if all(run.recognizes(path) for path in paths):
        for name in (RECEIPT, METRICS):
            is_there = [{name: (path / name).is_file()} for path in paths]
            compared += compare_values("files that are there", *is_there)
        compared += compare_values("session", *map(run_session, paths))
        compared += compare_values("training", *map(run_history, paths))
    first, second = both = [open_checkpoint(path) for path in (left, right)]
    compared += compare_values("configuration", vars(first.config), vars(second.config))
    compared += compare_values("tokenizer", *map(_tokenizer, both))
    specs = tensor_specs(first.config)
    shapes = [[(spec.key, spec.shape) for spec in tensor_specs(one.config)] for one in both]
    if shapes[0] != shapes[1]:
        return Bisection(compared, tolerance)
    for spec in specs:
        on_progress(description=f"comparing {spec.key}")
        compared.append(Difference("weights", spec.key, _tensor_error(spec, first, second)))
    if any(one.error for one in compared if one.part in ("configuration", "weights")):
        compared += _compare_activations(first, second, on_progress)
    return Bisection(compared, tolerance)


def compare_values(part: str, left: Json, right: Json) -> Iterator[Difference]:
    """Yield each value that both have: numbers with a relative difference, others with 0 or 1."""
    for name in left:
        if name not in right:
            continue
        values = (left[name], right[name])
        error = float(values[0] != values[1])
        if error and all(type(value) is float for value in values):
            error = abs(values[0] - values[1]) / (abs(values[0]) or 1.0)
        text = " and ".join(map(_printable, values)) if error else ""
        yield Difference(part, _printable(name), error, text)


def _printable(value: object) -> str:
    """Return the begin of a value without characters that change what a terminal shows."""
    return "".join(c if c.isprintable() else "?" for c in f"{value!s:.60}")


def run_session(folder: Path) -> Json:
    """Return the options of a run, and what its last session ran on."""
    receipt = read_receipt(folder)
    last = next(reversed(receipt["sessions"].values()), {})
    fields = {"data fingerprint": receipt["data"]} | receipt["config"] | last
    fields = flatten_dict(fields, sep=".")
    return {name: value for name, value in fields.items() if name != "run_dir"}


def run_history(folder: Path) -> Json:
    """Return the figures that a run logged, and its weights' fingerprints, in order of steps."""
    figures = {
        (line["step"], name): line[name]
        for line in read_lines(folder / METRICS, "tokens_per_s")
        for name in FIGURES
        if name in line and type(line.get("step")) is int
    }
    for step, fingerprints in read_receipt(folder)["weights"].items():
        figures |= {(int(step), path): value for path, value in fingerprints.items()}
    steps = sorted(figures, key=operator.itemgetter(0))  # those of one step stay in order
    return {f"step {step}/{name}": figures[step, name] for step, name in steps}


def _tokenizer(checkpoint: Checkpoint) -> Json:
    tokenizer = checkpoint.tokenizer
    return {"vocabulary": tokenizer.pieces} if tokenizer else {}


def _tensor_error(spec: TensorSpec, first: Checkpoint, second: Checkpoint) -> float:
    """Compute the largest difference of a tensor over its largest value, some rows at a time."""
    differences = []
    sizes = []
    for start in range(0, spec.shape[0], _ROWS):
        rows = slice(start, min(start + _ROWS, spec.shape[0]))
        left, right = (
            checkpoint.tensors[spec.key][rows].astype(np.float64) for checkpoint in (first, second)
        )
        differences.append(np.max(np.abs(left - right)))
        sizes.append(np.max(np.abs(left)))
    return float(np.max(differences) / (np.max(sizes) or 1.0))


def _compare_activations(
    first: Checkpoint, second: Checkpoint, on_progress: Callable[..., object]
) -> Iterator[Difference]:
    """Yield how much each operation differs on the same input, and then the logits."""
    configs = [one.config for one in (first, second)]
    readers = [Reader(one) for one in (first, second)]
    ids = np.arange(_MAX_TOKENS) % first.config.vocab_size
    if first.tokenizer is not None:
        ids = np.array(prompt_ids(first.tokenizer, PROSE)[:_MAX_TOKENS])
    stream, other = (reader.embeddings(ids).astype(np.float64) for reader in readers)
    yield Difference("activations", "embedding", relative_error(other, stream))
    for layer in range(first.config.num_layers):
        on_progress(description=f"layer {layer + 1} of {first.config.num_layers}")
        weights = [reader.layer(layer) for reader in readers]
        # One half of a layer adds nothing if its output matrix is zeros.
        for operation, silent in (("attention", "_down"), ("feed_forward", "wo")):
            outputs = []
            for own, config in zip(weights, configs, strict=True):
                silenced = {name: np.zeros_like(own[name]) for name in own if name.endswith(silent)}
                outputs.append(oracle_layer(stream, own | silenced, config, layer))
            left, right = outputs
            error = update_error(right - stream, left - stream, stream)
            yield Difference("activations", f"layers/{layer}/{operation}", error)
            stream = left
    left, right = (
        _logits(reader, config, stream) for reader, config in zip(readers, configs, strict=True)
    )
    yield Difference("activations", "logits", relative_error(right, left))


def _logits(
    reader: Reader, config: LlamaConfig, stream: Float[np.ndarray, "seq embed"]
) -> Float[np.ndarray, "seq vocab"]:
    hidden = oracle.rms_norm(stream, reader.whole("final_norm"), config.norm_eps)
    head = reader.blocks("embed" if config.tie_embeddings else "lm_head")
    parts = [hidden / config.logits_scaling @ rows.astype(np.float64).T for _, rows in head]
    return np.concatenate(parts, axis=1)
