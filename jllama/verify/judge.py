"""Another program's Llama held against the oracle, and its mistake by name."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jllama.checkpoints.registry import load
from jllama.errors import JllamaError, no_tokenizer, unknown_name
from jllama.language_model import LanguageModel
from jllama.parameters import Params
from jllama.tokenizers import Tokenizer
from jllama.verify.mistakes import Mistake, known_mistakes
from jllama.verify.precisions import PRECISIONS, WITHOUT_QUANTIZATION
from jllama.verify.probes import (
    Behavior,
    behaviors,
    decoded,
    make_rows,
    observe_function,
)
from jllama.verify.rows import Observed, differences, predict, split_places
from jllama.verify.server import Server, connect, find_method, observe

SLACK = 4.0
"""How many times the error of the rounded oracle is allowed: programs add in other orders."""
FLOOR = 2e-4
"""Nats that are always allowed: what float32 and the digits of JSON may lose."""
EXPLAINS = 0.5
"""A mistake explains a difference if it leaves less than this part of it."""
EQUAL = 1.5
"""Mistakes that leave no more than this many times what the best leaves are equals."""
_TOP = 20  # log-probabilities of each token of a function that gives all
_CLIP = 10.0  # nats
_EDGES = (0, 16, 128, 512, 2048, 8192, 32_768, 1 << 31)
_EXACT = ("float32", "float16-cache")  # so fine that no mistake hides in what they allow
_LONG = 512  # tokens
_SHOWN = 8  # mistakes in a report

Group = tuple[str, int]
"""The kind of a prompt, and the first position of a range."""
Errors = dict[Group, float]
OnStage = Callable[[str], object]


class Explained(NamedTuple):
    """What a mistake leaves of the differences."""

    about: str
    error: float  # in nats
    score: float  # in what is allowed
    precision: str  # with which it is no mistake


@dataclasses.dataclass(frozen=True)
class Judgment:
    """What was found of a peer, as plain data; true if it computes the checkpoint.

    Errors are root mean squares of differences of log-probabilities, in nats.

    Attributes:
        peer: what was judged.
        method: how it was asked.
        verdict: one sentence.
        passed: whether it computes the checkpoint.
        precision: the finest way of rounding that allows the differences, or which was declared.
        error: of all log-probabilities.
        kl: the mean Kullback-Leibler divergence of its predictions from the oracle's; None if it
            gives no probabilities.
        groups: for each kind of prompt and range of positions the first position, error and what
            is allowed.
        classes: the error by class of the predicted token.
        mistakes: the nearest known mistakes, with what each leaves.
        behaviors: what changes its answers.
        remarks: a sentence for each other fact.
    """

    peer: str
    method: str
    verdict: str
    passed: bool
    precision: str
    error: float
    kl: float | None
    groups: list[tuple[str, int, float, float]]
    classes: dict[str, float]
    mistakes: list[Explained]
    behaviors: list[Behavior]
    remarks: list[str]

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.verdict

    def as_json(self) -> dict[str, Any]:
        """Return all fields but ``passed`` as JSON has them."""
        fields = {name: value for name, value in vars(self).items() if name != "passed"}
        tables = {"mistakes": self.mistakes, "behaviors": self.behaviors}
        return fields | {name: [one._asdict() for one in rows] for name, rows in tables.items()}


class Evidence(NamedTuple):
    """What a peer answered to all prompts.

    ``is_split`` says whether it read each prompt only up to the place that it was asked for.
    """

    peer: str
    method: str
    observed: list[Observed]
    behaviors: list[Behavior]
    remarks: list[str]
    is_split: bool = False


def check_model(
    function: Callable[[np.ndarray], Any],
    checkpoint: str | Path,
    precision: str = "auto",
    *,
    max_tokens: int = 2048,
) -> Judgment:
    """Compare a function of yours, ``tokens -> logits``, with the float64 oracle of a checkpoint.

    Args:
        function: takes the tokens of a prompt, ``[seq]``, and returns logits ``[seq, vocab]`` or
            ``[1, seq, vocab]``, of NumPy, JAX, PyTorch or MLX.
        checkpoint: as in ``jllama.load``.
        precision: how the function rounds, a name of ``jllama verify --precision``.
        max_tokens: the longest prompt.

    Raises:
        JllamaError: the checkpoint cannot be opened, or the function returns no logits.
        UsageError: there is no such precision.

    Examples:
        >>> model = jllama.load("smollm2/", layout="training")
        >>> llama = jllama.build_model(model.config, model.params)
        >>> jllama.check_model(lambda tokens: llama(tokens[None]), "smollm2/")
        PASS: the function computes this checkpoint, as float32 does (largest error 0.0 nats)
    """
    return judge_function(function, "the function", checkpoint, precision, max_tokens=max_tokens)


def judge_function(
    function: Callable[[np.ndarray], Any],
    name: str,
    checkpoint: str | Path,
    precision: str,
    *,
    max_tokens: int,
    on_stage: OnStage = lambda _: None,
) -> Judgment:
    """Compare a function as ``check_model`` does; ``name`` says in messages what it is."""
    check_precision(precision)
    on_stage("opening")
    model = load(checkpoint, layout="training", dtype="float32")
    rows = make_rows(model, max_tokens)
    rows = [row for row in rows if not (row.is_text or row.messages)]
    on_stage(f"asking {name}")
    observed = [*observe_function(function, rows, _TOP)]
    return judge(Evidence(name, "all logits", observed, [], []), model, precision, on_stage)


def check_server(
    url: str,
    checkpoint: str | Path,
    precision: str = "auto",
    *,
    max_tokens: int = 2048,
    served_name: str = "",
    api_key: str = "",
    parallel: int = 4,
    timeout_s: float = 120.0,
    on_stage: OnStage = lambda _: None,
    on_done: Callable[[int], object] = lambda _: None,
) -> Judgment:
    """Compare a server with OpenAI's API with the oracle of the checkpoint that it serves.

    Raises:
        JllamaError: the server cannot be asked, or the checkpoint cannot be opened.
    """
    check_precision(precision)
    on_stage("opening")
    model = load(checkpoint, layout="training", dtype="float32")
    if model.tokenizer is None:
        raise no_tokenizer(checkpoint)
    address = url.rstrip("/").removesuffix("/v1")
    server = connect(Server(address, model.tokenizer, served_name, api_key, timeout_s, parallel))
    rows = make_rows(model, max_tokens)
    asking = find_method(server, rows[0].ids[:16])
    on_stage(f"asking {server.model} by {asking.method.about}")
    observed = observe(server, asking, rows, on_done)
    kinds = {one.row.kind for one in observed}
    if "text" not in kinds:
        raise JllamaError(f"{server.url} answers no prompt of {len(rows[0].ids)} tokens")
    remarks = list(dict.fromkeys(asking.remarks))
    missing = dict.fromkeys(row.kind for row in rows if row.kind not in kinds)
    if missing:
        remarks.append(f"not observed: {', '.join(missing)}")
    observed += decoded(server, asking, rows)
    on_stage("asking again")
    changes = [*behaviors(server, asking, rows, observed)]
    sent = "token ids" if asking.takes_ids else "text"
    method = f"{asking.method.about} on {asking.method.path}, prompts as {sent}"
    evidence = Evidence(server.url, method, observed, changes, remarks, not asking.method.is_whole)
    return judge(evidence, model, precision, on_stage)


def check_precision(precision: str) -> None:
    """Raise ``UsageError`` unless there is a precision of this name."""
    if precision not in ("auto", *PRECISIONS):
        raise unknown_name("precision", precision, ["auto", *PRECISIONS])


def judge(
    evidence: Evidence,
    model: LanguageModel,
    precision: str = "auto",
    on_stage: OnStage = lambda _: None,
) -> Judgment:
    """Compare what a peer answered with the oracle, and name the mistake if it is wrong.

    Args:
        evidence: what it answered.
        model: the checkpoint in float32, in the training layout.
        precision: a name of ``PRECISIONS``, or ``auto``: the finest that leaves the weights as
            they are and allows the differences.
        on_stage: called with the name of each stage.
    """
    config = model.config
    params = jax.tree.map(np.asarray, model.params)
    observed = evidence.observed
    rows = [one.row for one in observed]

    # 1) The oracle.
    on_stage("computing the oracle")
    exact = predict(config, params, rows, observed, with_oracle=True)
    found = differences(observed, exact)
    errors = group_errors(observed, found)

    # 2) What rounding allows: by the precision that fits best, of those that allow the most.
    names = WITHOUT_QUANTIZATION if precision == "auto" else (precision,)
    fits: list[tuple[int, float, str, Errors]] = []
    for name in names:
        on_stage(f"rounding as {name}")
        rounding = PRECISIONS[name]
        rounded_params = rounding.round_params(config, params)
        rounded = predict(config, rounded_params, rows, observed, rounding.model)
        gaps = [one - other for one, other in zip(rounded, exact, strict=True)]
        rounding_errors = group_errors(observed, gaps)
        allowed = _allowed(rounding_errors)
        num_over = sum(errors[group] > allowed[group] for group in errors)
        sizes = np.array([[errors[group], rounding_errors[group]] for group in errors]) + FLOOR
        misfit = float(np.abs(np.diff(np.log(sizes))).mean())
        fits.append((num_over, misfit, name, allowed))
        if not num_over and name in _EXACT:
            break
    num_over, _, name, allowed = min(fits, key=operator.itemgetter(0, 1))

    # 3) The mistakes, unless the differences are as small as they can be.
    mistakes: list[Explained] = []
    if num_over or name not in _EXACT:
        for mistake in known_mistakes(model, max(len(row.ids) for row in rows)):
            on_stage(f"trying {mistake.about}")
            tried = _try(mistake, model, params, evidence, errors, allowed)
            if tried:
                mistakes.append(tried)
        mistakes.sort(key=operator.attrgetter("score"))
    score = _score(errors, allowed)
    named = [one for one in mistakes if one.score < EXPLAINS * score]
    named = [one for one in named if one.score <= EQUAL * named[0].score]
    return Judgment(
        peer=evidence.peer,
        method=evidence.method,
        verdict=_verdict(evidence, name, num_over, named, len(mistakes), found, errors, allowed),
        passed=not num_over and all(one.precision == name for one in named[:1]),
        precision=name,
        error=_rms(found),
        kl=_mean_kl(observed, exact),
        groups=[(*group, error, allowed[group]) for group, error in errors.items()],
        classes=_class_errors(observed, found, model.tokenizer),
        mistakes=mistakes[:_SHOWN],
        behaviors=evidence.behaviors,
        remarks=evidence.remarks,
    )


def _try(
    mistake: Mistake,
    model: LanguageModel,
    params: Params,
    evidence: Evidence,
    errors: Errors,
    allowed: Errors,
) -> Explained | None:
    """Compute what a mistake leaves of the differences; None if it changes no prompt of these.

    Long prompts, which take longest, are left out if short ones rule it out.
    """
    config, wrong_params = mistake.misread(model.config, params)
    is_split = mistake.sees_ahead and evidence.is_split
    changes_nothing = mistake.change is not None
    seen: list[Observed] = []
    left: list[np.ndarray] = []
    for is_long in (False, True):
        part = [one for one in evidence.observed if (len(one.row.ids) > _LONG) == is_long]
        part = split_places(part) if is_split else part
        rows = [one.row for one in part]
        if mistake.change:
            rows = [mistake.change(row) for row in rows]
            changes_nothing = changes_nothing and rows == [one.row for one in part]
        seen += part
        left += differences(part, predict(config, wrong_params, rows, part, mistake.model))
        found = group_errors(seen, left)
        before = {group: errors[group] for group in found}
        if _score(found, allowed) > EQUAL * max(_score(before, allowed), 1.0):
            break
    if changes_nothing:
        return None
    return Explained(mistake.about, _rms(left), _score(found, allowed), mistake.precision)


def _groups(one: Observed) -> Int[np.ndarray, "places"]:
    """Return the first position of the range of each place."""
    edges = np.array(_EDGES)
    return edges[np.searchsorted(edges, one.row.places, side="right") - 1]


def group_errors(observed: Sequence[Observed], gaps: Sequence[np.ndarray]) -> Errors:
    """Compute the root mean square of differences by kind of prompt and range of positions."""
    values: dict[Group, list[np.ndarray]] = {}
    for one, gap in zip(observed, gaps, strict=True):
        starts = _groups(one)
        for start in np.unique(starts):
            values.setdefault((one.row.kind, int(start)), []).append(gap[starts == start].ravel())
    return {group: _rms(parts) for group, parts in values.items()}


def _rms(gaps: Sequence[np.ndarray]) -> float:
    values = np.concatenate([gap.ravel() for gap in gaps])
    clipped = np.clip(values[~np.isnan(values)], -_CLIP, _CLIP)
    return float(np.sqrt(np.mean(clipped**2)))


def _allowed(rounding: Errors) -> Errors:
    """Return what is allowed, from the errors of the rounded oracle.

    A group with few tokens may be lucky, so that it is allowed what all are on average.
    """
    mean = float(np.sqrt(np.mean([error**2 for error in rounding.values()])))
    return {group: SLACK * max(error, mean) + FLOOR for group, error in rounding.items()}


def _score(errors: Errors, allowed: Errors) -> float:
    """Return the root mean square of errors in units of what is allowed, each group once."""
    return float(np.sqrt(np.mean([(errors[group] / allowed[group]) ** 2 for group in errors])))


def _verdict(
    evidence: Evidence,
    precision: str,
    num_over: int,
    named: Sequence[Explained],
    num_mistakes: int,
    found: Sequence[np.ndarray],
    errors: Errors,
    allowed: Errors,
) -> str:
    """Say in one sentence whether the peer computes the checkpoint, and what its mistake is."""
    about = PRECISIONS[precision].about
    size = f"{_rms(found):.1e} nats"
    if not num_over and all(one.precision == precision for one in named[:1]):
        return f"PASS: {evidence.peer} computes this checkpoint as {about} does ({size})"
    others = "; no less by " + ", or ".join(one.about for one in named[1:]) if named[1:] else ""
    where = _where(evidence.observed, found, errors, allowed)
    if not named:
        return (
            f"FAIL: {evidence.peer} differs by {size}{where}, and none of {num_mistakes} known "
            "mistakes explains it"
        )
    return (
        f"FAIL: {evidence.peer} differs by {size}{where}; with {named[0].about} our logits agree "
        f"with it to {named[0].error:.0e}{others}"
    )


def _where(
    observed: Sequence[Observed], found: Sequence[np.ndarray], errors: Errors, allowed: Errors
) -> str:
    """Say in which prompts, and from which position on, differences are over what is allowed."""
    over = [group for group in errors if errors[group] > allowed[group]]
    if not over:
        return ", within what rounding allows"
    first: dict[str, int] = {}
    for one, gap in zip(observed, found, strict=True):
        kind = one.row.kind
        starts = _groups(one)
        for place, start, values in zip(one.row.places, starts, gap, strict=True):
            group = (kind, int(start))
            is_large = np.nanmax(np.abs(values)) > allowed[group] and group in over
            if is_large and place < first.get(kind, 1 << 31):
                first[kind] = place
    return " in " + ", ".join(f"{kind} (from position {at:,})" for kind, at in first.items())


def _mean_kl(observed: Sequence[Observed], exact: Sequence[np.ndarray]) -> float | None:
    """Compute the mean divergence of predictions, all other tokens taken as one.

    ``sum(p * log(p / q))``, with ``p`` the oracle's probabilities and ``q`` the peer's.
    """
    values = []
    for one, right in zip(observed, exact, strict=True):
        for ids, log_q, log_p in zip(one.ids, one.log_probs, right, strict=True):
            is_known = (ids >= 0) & ~np.isnan(log_q)
            if is_known.any():
                p, q = (np.exp(logs[is_known]) for logs in (log_p, log_q))
                p, q = (np.append(part, max(1 - part.sum(), 1e-9)) for part in (p, q))
                values.append(float(np.sum(p * np.log(p / q))))
    return float(np.mean(values)) if values else None


def _class_errors(
    observed: Sequence[Observed], found: Sequence[np.ndarray], tokenizer: Tokenizer | None
) -> dict[str, float]:
    """Compute the error by the class of the likeliest token in each place."""
    by_class: dict[str, list[np.ndarray]] = {}
    if tokenizer is None:
        return {}
    special = set(tokenizer.special_tokens.values())
    for one, gap in zip(observed, found, strict=True):
        for ids, values in zip(one.ids, gap, strict=True):
            name = "special"
            if ids[0] not in special:
                name = _class_of(tokenizer.pieces[ids[0]].decode(errors="replace"))
            by_class.setdefault(name, []).append(values)
    return {name: _rms(parts) for name, parts in sorted(by_class.items())}


def _class_of(text: str) -> str:
    stripped = text.strip()
    if stripped.isdecimal():
        return "digits"
    if stripped.isalpha():
        return "word" if text[0].isspace() else "part of a word"
    return "other"
