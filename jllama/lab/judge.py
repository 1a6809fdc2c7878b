"""What another program predicts, compared with the oracle; its mistake is named."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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


@dataclasses.dataclass(frozen=True)
class Explained:
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


class Comparison(NamedTuple):
    """What a peer answered beside what the oracle predicts.

    Attributes:
        evidence: the answers.
        model: the checkpoint.
        params: its parameters, as NumPy arrays.
        exact: the oracle's log-probabilities, by prompt.
        gaps: the differences, by prompt.
        errors: their sizes, by group.
    """

    evidence: Evidence
    model: LanguageModel
    params: Params
    exact: list[np.ndarray]
    gaps: list[np.ndarray]
    errors: Errors


class Fit(NamedTuple):
    """What a precision allows.

    Attributes:
        name: of ``PRECISIONS``.
        allowed: the largest errors.
        over: the groups whose errors are larger.
        misfit: the mean of ``abs(log(actual error / rounding error))`` over the groups.
    """

    name: str
    allowed: Errors
    over: list[Group]
    misfit: float


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
    on_progress(description="computing the oracle")
    compared = _compare(evidence, model)

    # What rounding allows: by the precision that fits best, of those that allow the most.
    names = [precision] if precision != "auto" else declared_precisions(evidence, model)
    fits: list[Fit] = []
    for name in names:
        on_progress(description=f"rounding as {name}")
        fits.append(_fit(name, compared))
        if name in _EXACT and not fits[-1].over:
            break
    fit = min(fits, key=lambda fit: (len(fit.over), fit.misfit))

    # The mistakes, unless the differences are as small as they can be.
    mistakes: list[Explained] = []
    if fit.over or fit.name not in _EXACT:
        mistakes = explanations(compared, fit.allowed, on_progress)
    max_score = EXPLAINS * _score(compared.errors, fit.allowed)
    named = [one for one in mistakes if one.score < max_score]
    named = [one for one in named if one.score <= EQUAL * named[0].score]

    passed = not fit.over and all(one.precision == fit.name for one in named[:1])
    verdict = _failure(compared, fit, names, named, len(mistakes))
    if passed:
        verdict = _success(compared, fit, names)
    return Judgment(
        peer=evidence.peer,
        method=evidence.method,
        verdict=verdict,
        passed=passed,
        precision=fit.name,
        error=_rms(compared.gaps),
        kl=_mean_kl(evidence.observed, compared.exact),
        groups=[(*group, error, fit.allowed[group]) for group, error in compared.errors.items()],
        mistakes=mistakes[:_SHOWN],
        behaviors=evidence.behaviors,
        remarks=evidence.remarks,
    )


def _compare(evidence: Evidence, model: LanguageModel) -> Comparison:
    """Compute the oracle, and how far the answers are from it."""
    params = jax.tree.map(np.asarray, model.params)
    observed = evidence.observed
    rows = [one.row for one in observed]
    exact = predict(model.config, params, rows, observed, with_oracle=True)
    gaps = differences(observed, exact)
    return Comparison(evidence, model, params, exact, gaps, group_errors(observed, gaps))


def declared_precisions(evidence: Evidence, model: LanguageModel) -> list[str]:
    """Return float32, and what the checkpoint or the program declares: no other is an excuse."""
    declared = {*_EXACT, model.stored, *(one.dtype for one in evidence.observed)}
    if model.stored not in WITHOUT_QUANTIZATION:
        declared.add("int8-products")
    return [name for name in WITHOUT_QUANTIZATION if name in declared]


def _fit(name: str, compared: Comparison) -> Fit:
    """Compute what a precision allows, from the errors of the oracle when it rounds like this.

    A group with few tokens may be lucky, so that it is allowed what all are on average.
    """
    observed = compared.evidence.observed
    rounding = PRECISIONS[name]
    config, params = rounding.misread(compared.model.config, compared.params)
    rows = [one.row for one in observed]
    rounded = predict(config, params, rows, observed, rounding.model)
    pairs = zip(rounded, compared.exact, strict=True)
    rounding_errors = group_errors(observed, [left - right for left, right in pairs])

    mean = float(np.sqrt(np.mean(np.square([*rounding_errors.values()]))))
    allowed = {group: SLACK * max(size, mean) + FLOOR for group, size in rounding_errors.items()}
    errors = compared.errors
    over = [group for group in errors if not errors[group] <= allowed[group]]
    sizes = np.array([[errors[group], rounding_errors[group]] for group in errors]) + FLOOR
    return Fit(name, allowed, over, float(np.abs(np.diff(np.log(sizes))).mean()))


def explanations(compared: Comparison, allowed: Errors, on_progress: OnProgress) -> list[Explained]:
    """Return what each known mistake leaves of the differences, the one that leaves least first."""
    observed = compared.evidence.observed
    mistakes = []
    for mistake in known_mistakes(compared.model, max(len(one.row.ids) for one in observed)):
        on_progress(description=f"trying {mistake.about}")
        explained = _try(mistake, compared, allowed)
        if explained:
            mistakes.append(explained)
    for about, share in changed_logits(observed, compared.exact, compared.gaps):
        score = share * _score(compared.errors, allowed)
        mistakes.append(Explained(about, share * _rms(compared.gaps), score, ""))
    return sorted(mistakes, key=operator.attrgetter("score"))


def _try(mistake: Mistake, compared: Comparison, allowed: Errors) -> Explained | None:
    """Compute what a mistake leaves of the differences; None if it changes no prompt of these.

    Long prompts, which take longest, are left out if short ones rule it out.
    """
    answers = compared.evidence.observed
    if mistake.sees_ahead and compared.evidence.is_split:
        answers = split_places(answers)
    rights = [one.row for one in answers]
    wrongs = [mistake.change(row) for row in rights] if mistake.change else rights
    if mistake.change and wrongs == rights:
        return None
    config, params = mistake.misread(compared.model.config, compared.params)
    observed: list[Observed] = []
    gaps: list[np.ndarray] = []
    for is_long in (False, True):
        indices = [index for index, row in enumerate(rights) if (len(row.ids) > _LONG) == is_long]
        part = [answers[index] for index in indices]
        rows = [wrongs[index] for index in indices]
        observed += part
        gaps += differences(part, predict(config, params, rows, part, mistake.model))
        left = group_errors(observed, gaps)
        before = {group: compared.errors[group] for group in left}
        if _score(left, allowed) > EQUAL * max(_score(before, allowed), 1.0):
            break
    return Explained(mistake.about, _rms(gaps), _score(left, allowed), mistake.precision)


def _success(compared: Comparison, fit: Fit, names: Sequence[str]) -> str:
    """Say that a program is right, with which precision and up to which position."""
    evidence = compared.evidence
    last = max(max(one.row.places) for one in evidence.observed)
    positions = f"positions 0 to {last:,} of {compared.model.config.max_seq_len:,}"
    about = PRECISIONS[fit.name].about
    verdict = f"PASS: {evidence.peer} computes this checkpoint as {about} does"
    verdict += f" ({_rms(compared.gaps):.1e} nats, {positions})"
    return verdict if fit.name == names[0] else f"{verdict}; as {names[0]} it would fail"


def _failure(
    compared: Comparison,
    fit: Fit,
    names: Sequence[str],
    named: Sequence[Explained],
    num_mistakes: int,
) -> str:
    """Say where a program is wrong, and name its mistake and those that explain it as well."""
    # 1) The kinds of prompts with differences, and the first position in each.
    first: dict[str, int] = {}
    for kind, start in fit.over:
        first[kind] = min(start, first.get(kind, start))
    places = ", ".join(f"{kind} (from position {start:,})" for kind, start in first.items())
    where = f" in {places}" if places else ", within what rounding allows"
    verdict = f"FAIL: {compared.evidence.peer} differs by {_rms(compared.gaps):.1e} nats{where}"
    verdict += f", held against {' and '.join(names)} (--precision takes another)"

    # 2) The mistake.
    if not named:
        return f"{verdict}, and none of {num_mistakes} known mistakes explains it"
    best, *equals = named
    verdict += f"; with {best.about} our logits agree with it to {best.error:.0e}"
    if equals:
        verdict += "; as well by " + ", or ".join(one.about for one in equals)
    return verdict


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


def _score(errors: Errors, allowed: Errors) -> float:
    """Return the root mean square of errors in units of what is allowed, each group once."""
    return float(np.sqrt(np.mean([(errors[group] / allowed[group]) ** 2 for group in errors])))


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
