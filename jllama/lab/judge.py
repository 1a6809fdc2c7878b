"""What another program predicts, compared with the oracle; its mistake is named."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jllama.core.parameters import Params
from jllama.lab.mistakes import known_mistakes
from jllama.lab.mutations import Mistake
from jllama.lab.precisions import PRECISIONS, WITHOUT_QUANTIZATION
from jllama.lab.probes import Behavior
from jllama.lab.rows import Observed, differences, predict, split_places
from jllama.models.language_model import LanguageModel

SLACK = 4.0
"""How many times the error of the rounded oracle is allowed: programs add in other orders."""
FLOOR = 2e-4
"""Nats that are always allowed: what float32 and the digits of JSON may lose."""
EXPLAINS = 0.5
"""A mistake explains a difference if it leaves less than this part of it."""
EQUAL = 1.5
"""Mistakes that leave no more than this many times what the best one leaves are its equals."""
_CLIP = 10.0  # nats
_STARTS = (0, 16, 128, 512, 1500, 6000, 24_000, 75_000)  # of ranges of positions
_LONG = 512  # tokens
_EXACT = ("float32", "float16-cache")  # so fine that no mistake hides in what they allow
_SHOWN = 8  # mistakes in a report
_FITS = 0.1  # the part of a difference that remains if a change of the logits explains it

Group = tuple[str, int]
"""The kind of a prompt, and the first position of a range."""
Errors = dict[Group, float]
"""Root mean squares of differences of log-probabilities, in nats."""
OnProgress = Callable[..., object]
"""Receives ``description``, a text, or ``completed`` and ``total``, numbers of requests."""


class Explained(NamedTuple):
    """What a mistake leaves of the differences."""

    about: str
    error: float  # in nats
    score: float  # in what is allowed
    precision: str  # with which it is no mistake


class Evidence(NamedTuple):
    """What a peer answered to all prompts.

    Attributes:
        peer: the program.
        method: how it was asked.
        observed: the answers.
        behaviors: what changes them.
        remarks: a sentence for each other fact.
        is_split: whether it read each prompt only up to the place that it was asked for.
    """

    peer: str
    method: str
    observed: list[Observed]
    behaviors: Sequence[Behavior] = ()
    remarks: Sequence[str] = ()
    is_split: bool = False


@dataclasses.dataclass(frozen=True)
class Judgment:
    """What is known of a peer, as plain data; true if it computes the checkpoint.

    Errors are root mean squares of differences of log-probabilities, in nats.

    Attributes:
        peer: the program.
        method: how it was asked.
        verdict: one sentence.
        passed: whether it computes the checkpoint.
        precision: how it rounds, a name of ``PRECISIONS``.
        error: of all log-probabilities.
        kl: the mean Kullback-Leibler divergence of its predictions from the oracle's; None if it
            gives no probabilities.
        groups: kind of prompt, first position, error, and what is allowed.
        mistakes: the nearest known mistakes.
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
    mistakes: list[Explained]
    behaviors: Sequence[Behavior]
    remarks: Sequence[str]

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.verdict

    def as_json(self) -> dict[str, Any]:
        """Return all fields but ``passed`` as JSON has them."""
        fields = {name: value for name, value in vars(self).items() if name != "passed"}
        fields["mistakes"] = [mistake._asdict() for mistake in self.mistakes]
        fields["behaviors"] = [behavior._asdict() for behavior in self.behaviors]
        return fields


def judge(
    evidence: Evidence,
    model: LanguageModel,
    precision: str = "auto",
    on_progress: OnProgress = lambda **_: None,
) -> Judgment:
    """Compare what a peer answered with the oracle, and name its mistake if it is wrong.

    Args:
        evidence: what it answered.
        model: the checkpoint in float32, in the training layout.
        precision: a name of ``PRECISIONS``, or ``auto`` for float32, the dtype of the checkpoint or
            of the logits, or, of a quantized checkpoint, products of 8-bit activations.
        on_progress: called with the name of each stage.
    """
    params = jax.tree.map(np.asarray, model.params)
    observed = evidence.observed
    rows = [one.row for one in observed]

    # 1) The oracle.
    on_progress(description="computing the oracle")
    exact = predict(model.config, params, rows, observed, with_oracle=True)
    gaps = differences(observed, exact)
    errors = group_errors(observed, gaps)
    error = _rms(gaps)

    # 2) What rounding allows: by the precision that fits best, of those that allow the most.
    fits: list[tuple[int, float, str, Errors]] = []
    names = [precision]
    if precision == "auto":
        # What neither the checkpoint nor the program declares is no excuse.
        declared = {*_EXACT, model.stored, *(one.dtype for one in observed)}
        if model.stored not in WITHOUT_QUANTIZATION:
            declared.add("int8-products")
        names = [name for name in WITHOUT_QUANTIZATION if name in declared]
    for name in names:
        on_progress(description=f"rounding as {name}")
        rounding = PRECISIONS[name]
        rounded_params = rounding.round_params(model.config, params)
        rounded = predict(model.config, rounded_params, rows, observed, rounding.model)
        pairs = zip(rounded, exact, strict=True)
        rounding_errors = group_errors(observed, [left - right for left, right in pairs])
        allowed = _allowed(rounding_errors)
        num_over = sum(not errors[group] <= allowed[group] for group in errors)
        sizes = np.array([[errors[group], rounding_errors[group]] for group in errors]) + FLOOR
        misfit = float(np.abs(np.diff(np.log(sizes))).mean())
        fits.append((num_over, misfit, name, allowed))
        if not num_over and name in _EXACT:
            break
    _, _, name, allowed = min(fits, key=operator.itemgetter(0, 1))
    over = [group for group in errors if not errors[group] <= allowed[group]]

    # 3) The mistakes, unless the differences are as small as they can be.
    mistakes: list[Explained] = []
    if over or name not in _EXACT:
        for mistake in known_mistakes(model, max(len(row.ids) for row in rows)):
            on_progress(description=f"trying {mistake.about}")
            explained = _try(mistake, model, params, evidence, errors, allowed)
            if explained:
                mistakes.append(explained)
        for about, share in changed_logits(observed, exact, gaps):
            score = share * _score(errors, allowed)
            mistakes.append(Explained(about, share * error, score, ""))
        mistakes.sort(key=operator.attrgetter("score"))
    named = [one for one in mistakes if one.score < EXPLAINS * _score(errors, allowed)]
    named = [one for one in named if one.score <= EQUAL * named[0].score]

    # 4) The verdict.
    passed = not over and all(one.precision == name for one in named[:1])
    if passed:
        last = max(max(row.places) for row in rows)
        verdict = f"PASS: {evidence.peer} computes this checkpoint as {PRECISIONS[name].about} does"
        verdict += f" ({error:.1e} nats, positions 0 to {last:,} of {model.config.max_seq_len:,})"
        if name != names[0]:
            verdict += f"; as {names[0]} it would fail"
    else:
        verdict = f"FAIL: {evidence.peer} differs by {error:.1e} nats{_places(over)}"
        verdict += f", held against {' and '.join(names)} (--precision takes another)"
        verdict += _explanation(named, len(mistakes))
    return Judgment(
        peer=evidence.peer,
        method=evidence.method,
        verdict=verdict,
        passed=passed,
        precision=name,
        error=error,
        kl=_mean_kl(observed, exact),
        groups=[(*group, error, allowed[group]) for group, error in errors.items()],
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
    answers = evidence.observed
    if mistake.sees_ahead and evidence.is_split:
        answers = split_places(answers)
    rights = [one.row for one in answers]
    wrongs = [mistake.change(row) for row in rights] if mistake.change else rights
    if mistake.change and wrongs == rights:
        return None
    config, wrong_params = mistake.misread(model.config, params)
    observed: list[Observed] = []
    gaps: list[np.ndarray] = []
    for is_long in (False, True):
        indices = [index for index, row in enumerate(rights) if (len(row.ids) > _LONG) == is_long]
        part = [answers[index] for index in indices]
        rows = [wrongs[index] for index in indices]
        observed += part
        gaps += differences(part, predict(config, wrong_params, rows, part, mistake.model))
        left = group_errors(observed, gaps)
        before = {group: errors[group] for group in left}
        if _score(left, allowed) > EQUAL * max(_score(before, allowed), 1.0):
            break
    return Explained(mistake.about, _rms(gaps), _score(left, allowed), mistake.precision)


def changed_logits(
    observed: Sequence[Observed], exact: Sequence[np.ndarray], gaps: Sequence[np.ndarray]
) -> Iterator[tuple[str, float]]:
    """Yield the simplest change of right logits that explains the differences, if one does.

    With it comes the part of the differences that remains after a fit by least squares. A change of
    all logits of a place by the same number changes no probability, so means are subtracted first.
    """
    # 1) The place, whether the token stands before it, its log-probability, and the difference.
    parts = []
    for one, rights, values in zip(observed, exact, gaps, strict=True):
        columns = zip(one.row.places, one.ids, rights, values, strict=True)
        for place, ids, log_p, gap in columns:
            is_seen = np.isin(ids, one.row.ids[: place + 1])
            number = np.full(len(ids), len(parts))
            parts.append(np.stack([number, is_seen, log_p, log_p * log_p.max(), gap]))
    table = np.concatenate(parts, axis=1)
    number, is_seen, log_p, product, gap = table[:, np.abs(table[-1]) < _CLIP]

    # 2) Each change: what shares a mean, and what the difference is a sum of.
    changes = {
        "only the likeliest tokens kept (top-k or top-p)": (number, []),
        "a temperature": (number, [log_p]),
        "a soft cap of the logits": (number, [log_p, log_p**2, product]),
        "a penalty of tokens seen before": (2 * number + is_seen, [is_seen * log_p]),
    }
    for about, (groups, features) in changes.items():
        _, groups, counts = np.unique(groups, return_inverse=True, return_counts=True)
        centered = [
            values - (np.bincount(groups, values) / counts)[groups] for values in (*features, gap)
        ]
        matrix = np.stack([*centered[:-1], 0 * gap], axis=1)
        left = centered[-1] - matrix @ np.linalg.lstsq(matrix, centered[-1])[0]
        is_judged = counts[groups] > 1  # a mean of one explains it by itself
        if is_judged.any():
            share = _rms([left[is_judged]]) / _rms([gap[is_judged]])
            if share < _FITS:
                yield about, share
                return


def group_errors(observed: Sequence[Observed], gaps: Sequence[np.ndarray]) -> Errors:
    """Compute the error by kind of prompt and range of positions."""
    values: dict[Group, list[np.ndarray]] = {}
    for one, gap in zip(observed, gaps, strict=True):
        for place, row in zip(one.row.places, gap, strict=True):
            start = max(start for start in _STARTS if start <= place)
            values.setdefault((one.row.kind, start), []).append(row)
    return {group: _rms(parts) for group, parts in values.items()}


def _rms(gaps: Sequence[np.ndarray]) -> float:
    values = np.concatenate([gap.ravel() for gap in gaps])
    clipped = np.clip(values[~np.isnan(values)], -_CLIP, _CLIP)
    return float(np.sqrt(np.mean(clipped**2)))


def _allowed(rounding: Errors) -> Errors:
    """Return what is allowed, from the errors of the rounded oracle.

    A group with few tokens may be lucky, so that it is allowed what all are on average.
    """
    mean = float(np.sqrt(np.mean(np.square([*rounding.values()]))))
    return {group: SLACK * max(error, mean) + FLOOR for group, error in rounding.items()}


def _score(errors: Errors, allowed: Errors) -> float:
    """Return the root mean square of errors in units of what is allowed, each group once."""
    return float(np.sqrt(np.mean([(errors[group] / allowed[group]) ** 2 for group in errors])))


def _places(over: Sequence[Group]) -> str:
    """Name the prompts, and their first positions, in which more differs than is allowed."""
    first: dict[str, int] = {}
    for kind, start in over:
        first[kind] = min(start, first.get(kind, start))
    if not first:
        return ", within what rounding allows"
    return " in " + ", ".join(f"{kind} (from position {at:,})" for kind, at in first.items())


def _explanation(named: Sequence[Explained], num_mistakes: int) -> str:
    """Name the mistake, and its equals."""
    if not named:
        return f", and none of {num_mistakes} known mistakes explains it"
    first, *equals = named
    text = f"; with {first.about} our logits agree with it to {first.error:.0e}"
    if equals:
        text += "; as well by " + ", or ".join(one.about for one in equals)
    return text


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
