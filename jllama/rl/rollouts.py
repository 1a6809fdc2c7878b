"""Batches for training from rewards: the current model answers prompts, and rewards score them.

One batch, from top to bottom::

    Rollouts.next              prompts of the data, in random order
        Sampler.answer         the engine answers each ``group_size`` times, with the step's weights
        Scorer.score           rewards of the answers, and from them advantages within a group
        Training.drawn_log_probs   the trainer's log-probabilities, compared with the sampler's
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jllama.core import UsageError
from jllama.core.parameters import Params
from jllama.core.step import Batch, Sampled, TrainState
from jllama.data.prompts import PromptRow
from jllama.functional import TRUNCATIONS
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request, Row
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.kernels.shapes import power_of_two_at_least
from jllama.models.decode_params import DecodeParams, decode_layout
from jllama.models.language_model import LanguageModel
from jllama.rl import RewardError, Scorer, Scores
from jllama.training.compiling import Training, put_on_devices
from jllama.training.metrics import Evaluation
from jllama.training.plan import Plan
from jllama.training.sources import Figures, Source, share_of_padding

MIN_WIDTH = 32  # tokens of the narrowest batch; others are powers of two
_PREFIX_TOKENS = 8192  # of prompts, cached for others with the same beginning
_Rewards = Float[np.ndarray, "prompts answers"]


class Sample(NamedTuple):
    """An answer of the current model."""

    prompt: PromptRow
    ids: list[int]  # of its tokens, the stop id included
    log_probs: list[float]  # in the distribution that they were drawn from
    text: str  # without the stop
    is_overlong: bool  # whether ``max_answer_tokens`` cut it off


@dataclasses.dataclass
class Sampler:
    """The engine that answers prompts with the weights of the current step.

    Args:
        model: the tokenizer, chat template and stop ids, with any weights of the architecture.
        training: the trainer; the engine's weights are on its devices, in its dtype.
    """

    model: LanguageModel
    training: Training

    def __post_init__(self) -> None:
        self.engine: Engine | None = None
        convert = functools.partial(decoding_weights, self.training)
        # One program is faster than one a weight. Over several devices, the weights stay split.
        self.convert = jax.jit(convert) if self.training.mesh.size == 1 else convert

    def load(self, params: Params, base: Params | None) -> None:
        """Give the engine the weights of a step."""
        options = self.training.plan.options
        model = dataclasses.replace(self.model, params=self.convert(params, base))
        if self.engine:
            self.engine.replace_weights(model)
        else:
            sizes: Any = {"context": options.seq_len + 1, "prefix_tokens": _PREFIX_TOKENS}
            self.engine = Engine(model, options.batch_size, **sizes)

    def answer(self, prompts: Sequence[PromptRow], seeds: Sequence[int]) -> list[Sample]:
        """Return an answer to each prompt, drawn by its seed."""
        assert self.engine is not None
        plan = self.training.plan
        stop_ids = self.model.text_tokenizer.stops_or_eos(self.model.stop_ids)
        rows = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            sampling = dataclasses.replace(plan.sampling, seed=seed)
            request = Prompt(
                prompt.ids,
                sampling,
                plan.options.grpo.max_answer_tokens,
                stop_ids=stop_ids,
                drawn_log_probs=True,
            )
            rows.append(self.engine.submit(Request(request)))
        answers = finished_rows(self.engine)
        samples = []
        for prompt, row in zip(prompts, rows, strict=True):
            completion = answers[row].completion
            ids = [token.id for token in row.tokens]
            log_probs = [token.log_prob or 0.0 for token in row.tokens]
            is_overlong = completion.finish_reason in ("length", "context")
            samples.append(Sample(prompt, ids, log_probs, completion.text, is_overlong))
        return samples


def finished_rows(engine: Engine) -> dict[Row, Answer]:
    """Return the answers to all requests of an engine."""
    answers = []
    try:
        while engine.busy:
            events = engine.step()
            answers += [(row, event) for row, event in events if isinstance(event, Answer)]
    except BaseException:
        engine.reset()
        raise
    return dict(answers)


def decoding_weights(training: Training, params: Params, base: Params | None) -> DecodeParams:
    """Return the weights of a step, adapters merged, in the layout and dtype that decode."""
    weights = training.trainable.merge(params, base)
    dtype = training.plan.dtype
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
    return decode_layout(weights, training.plan.model, joins=training.mesh.size == 1)


SHOWN_ANSWERS = 8
"""How many answers to held-out prompts are shown side by side over time."""


class Rollouts(Source):
    """Batches of the current model's answers.

    Attributes:
        scorer: rewards the answers.
        sampler: answers the prompts of the run's data.
        reference: weights of the model before training, over the same ``base``.
    """

    advice = "mend the reward, and resume the run"
    sampler: Sampler
    reference: Params | None = None

    def __init__(self, plan: Plan) -> None:
        """Start the rewards, and try them once, so that a mistake in them costs no weights to load.

        Raises:
            JllamaError: a reward fails for an answer to the first prompt.
        """
        super().__init__(plan)
        grpo = plan.options.grpo
        limits: Any = {"limit_s": grpo.reward_limit_s, "num_processes": grpo.reward_processes}
        self.scorer = Scorer(plan.config.rewards, **limits)
        row = self.data.train[0]
        answers = ["An answer to try the reward."] * grpo.group_size
        try:
            self.scorer.score([row.prompt], [answers], [row.fields], [row.place])
        except RewardError:
            self.close()
            raise
        # The figures of each batch that the log has not taken, oldest first; and why batches, or
        # some of their answers, have no rewards, by the steps that they were for.
        self.records: list[dict[str, Any]] = []
        self.problems: dict[int, str] = {}
        self._batch: Batch | None = None
        self._num_used = 0  # updates from the last batch

    def begin(self, training: Training, initial: TrainState | None) -> None:
        """Get the programs, and with ``grpo.kl`` the model before training.

        Raises:
            UsageError: there are several processes, or an option of sampling does not fit.
        """
        super().begin(training, initial)
        plan = self.plan
        options = plan.options
        if jax.process_count() > 1:
            raise UsageError(
                f"reward is {plan.config.reward}; it must be left out with several processes"
            )
        drawn_settings(plan.sampling, 1, self.data.tokenizer.vocab_size)  # raises if one is wrong
        if options.grpo.kl and initial:
            # The step donates its state, so that the reference needs parameters of its own.
            self.reference = jax.tree.map(jnp.copy, initial.params)
        self.sampler = Sampler(plan.language_model, training)
        num_prompts = options.batch_size // options.grpo.group_size
        self.stream = self.data.training_prompts(num_prompts, plan.seed)

    @property
    def is_between(self) -> bool:
        """Whether all updates from the last batch were taken."""
        return self._num_used % self.plan.options.grpo.updates == 0

    def next(self, step: int, state: TrainState) -> Batch:
        """Return the batch of the next update: new answers, or the last batch once more."""
        if self.is_between:
            self._batch = self._new_batch(step, state)
            self._num_used = 0
        self._num_used += 1
        assert self._batch is not None
        return self._batch

    def _new_batch(self, step: int, state: TrainState) -> Batch:
        training = self.training
        grpo = self.plan.options.grpo

        # 1) Answers.
        start_s = time.perf_counter()
        rows = next(self.stream)
        prompts = [row for row in rows for _ in range(grpo.group_size)]
        seeds = np.random.default_rng((self.plan.seed, step)).integers(2**32, size=len(prompts))
        self.sampler.load(state.params, state.base)
        samples = self.sampler.answer(prompts, seeds.tolist())
        sampled_s = time.perf_counter()

        # 2) Rewards and advantages; without rewards they are NaN, and the step is left out.
        figures: dict[str, Any] = {}
        advantages = np.full(len(samples), np.nan, np.float32)
        has_reward = np.ones(len(samples), bool)
        try:
            scores = score_samples(self.scorer, rows, samples)
            rewards = scores.total
            advantages = group_advantages(rewards, grpo.advantage).ravel()
            has_reward = np.isfinite(rewards).ravel()
            figures["reward"] = float(np.nanmean(rewards))
            figures["reward_std"] = float(np.nanstd(rewards))
            figures["no_signal"] = float(np.mean(~have_signal(rewards)))
            figures["no_reward"] = float(np.mean(~has_reward))
            figures["reward_parts"] = mean_parts(scores)
            if scores.problems:
                self.problems[step + 1] = scores.problems[0]
        except RewardError as error:
            updates = range(step + 1, step + 1 + grpo.updates)
            self.problems |= dict.fromkeys(updates, str(error))
        rewarded_s = time.perf_counter()

        # 3) Log-probabilities by the trainer.
        num_ids = self.data.tokenizer.vocab_size
        batch = assemble(samples, advantages, self.plan, num_ids)
        is_token = batch.counted
        on_devices = put_on_devices(batch, training.batch_sharding)
        score = functools.partial(sampled_log_probs, training, on_devices, state.base)
        old = score(state.params)
        assert batch.sampled is not None
        sampled = batch.sampled._replace(old=old)
        if self.reference:
            sampled = sampled._replace(reference=score(self.reference))
        scored_s = time.perf_counter()

        # 4) Figures.
        num_tokens = int(is_token.sum())
        is_overlong = np.array([sample.is_overlong for sample in samples])
        figures |= {
            "answer_tokens": num_tokens / len(samples),
            "overlong": float(np.mean(is_overlong)),
            **mismatch(sampled.sampler[is_token], old[is_token]),
            "sampling_s": sampled_s - start_s,
            "reward_s": rewarded_s - sampled_s,
            "scoring_s": scored_s - rewarded_s,
            "sampled_tokens": num_tokens,
        }
        self.records.append(figures)
        is_learned = has_reward & ~(is_overlong & grpo.mask_overlong)
        return batch._replace(counted=is_token & is_learned[:, None], sampled=sampled)

    def figures(self, batches: Sequence[Batch], elapsed_s: float) -> Figures:
        """Return the means of rewards and others, and which answers had no reward."""
        record = rollout_record(self.records, elapsed_s)
        if self.data.is_chat:
            record["padding"] = share_of_padding(batches)
        warnings = [
            f"step {step}: some answers have no reward: {problem}"
            for step, problem in self.problems.items()
        ]
        self.records = []
        self.problems = {}
        return record, warnings

    def why_skipped(self, step: int) -> str:
        """Return why no answer of a step has a reward."""
        return self.problems.pop(step, "")

    def close(self) -> None:
        """End the processes that compute rewards."""
        self.scorer.close()

    def evaluate(
        self, state: TrainState, max_tokens: int, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Evaluate by one answer to each of ``eval_prompts`` held-out prompts, or to all.

        What checkpoints are compared by is minus the mean reward. The seeds are the same at each
        evaluation.

        Raises:
            RewardError: no answer has a reward.
        """
        if should_stop():
            return None
        num_prompts = self.plan.options.grpo.eval_prompts if max_tokens else 0
        rows = self.data.validation[: num_prompts or None]
        self.sampler.load(self.training.weights(state), state.base)
        samples = self.sampler.answer(rows, range(len(rows)))
        scores = score_samples(self.scorer, rows, samples)
        means = {"reward": float(np.nanmean(scores.total))}
        if len(scores.parts) > 1:
            means |= mean_parts(scores)
        no_reward = float(np.mean(np.isnan(scores.total)))
        if no_reward:
            means["no_reward"] = no_reward
        means["answer_tokens"] = float(np.mean([len(sample.ids) for sample in samples]))
        self.samples = []
        num_shown = SHOWN_ANSWERS if max_tokens else 0
        for sample in samples[:num_shown]:
            prompt = self.data.tokenizer.decode(sample.prompt.ids)
            self.samples.append({"prompt": prompt, "text": sample.text, "is_question": True})
        return Evaluation(-means["reward"], None, None, means)


def score_samples(scorer: Scorer, rows: Sequence[PromptRow], samples: Sequence[Sample]) -> Scores:
    """Return the rewards of samples, which follow each other by prompt."""
    size = len(samples) // len(rows)
    answers = [
        [sample.text for sample in samples[start : start + size]]
        for start in range(0, len(samples), size)
    ]
    return scorer.score(
        [row.prompt for row in rows],
        answers,
        [row.fields for row in rows],
        [row.place for row in rows],
    )


def mean_parts(scores: Scores) -> dict[str, float]:
    """Return the mean of each reward."""
    return {name: float(np.nanmean(part)) for name, part in scores.parts.items()}


def sampled_log_probs(
    training: Training, batch: Batch, base: Params | None, params: Params
) -> Float[np.ndarray, "rows window"]:
    """Return the trainer's log-probabilities of the tokens of answers, and zeros elsewhere."""
    log_probs = np.asarray(training.drawn_log_probs(params, batch, base))
    columns = np.pad(log_probs, ((0, 0), (1, 0)))
    return np.where(batch.counted, columns, 0).astype(np.float32)


def group_advantages(rewards: _Rewards, kind: str) -> _Rewards:
    """Compute how much better each answer is than its group, see ``GrpoConfig.advantage``.

    With a group's rewards ``r`` of ``G`` answers: ``(r - mean) / (std + 1e-4)`` with the standard
    deviation of a sample (``group``), ``r - mean`` (``centered``), or ``r`` minus the mean of the
    other answers, ``(r - mean) G / (G - 1)`` (``rloo``). Answers whose reward is NaN are not in the
    group; they have 0.
    """
    has_reward = np.isfinite(rewards)
    # Rounding must not give a group of equal rewards a direction.
    has_signal = have_signal(rewards)[:, None]
    rewards = np.where(has_signal, rewards, 0.0)
    centered = rewards - np.nanmean(rewards, axis=1, keepdims=True)
    size = np.maximum(has_reward.sum(axis=1, keepdims=True), 2)
    if kind == "group":
        centered = centered / (np.nanstd(rewards, axis=1, ddof=1, keepdims=True) + 1e-4)
    if kind == "rloo":
        centered = centered * (size / (size - 1))
    return np.where(has_signal & has_reward, centered, 0.0).astype(np.float32)


def have_signal(rewards: _Rewards) -> Bool[np.ndarray, "prompts"]:
    """Return for which prompts two answers have different rewards."""
    first = np.where(np.isnan(rewards), np.inf, rewards).min(axis=1)
    last = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
    return first < last


def assemble(
    samples: Sequence[Sample],
    advantages: Float[np.ndarray, "rows"],
    plan: Plan,
    num_ids: int,
) -> Batch:
    """Return the batch of prompts with their answers, whose tokens count.

    ``num_ids`` is the number of the tokenizer's tokens. ``old`` is zero.
    """
    lengths = [len(sample.prompt.ids) + len(sample.ids) for sample in samples]
    window = min(power_of_two_at_least(max(lengths) - 1, MIN_WIDTH), plan.options.seq_len) + 1
    shape = len(samples), window
    tokens = np.zeros(shape, np.int32)
    segments = np.zeros(shape, np.int32)
    counted = np.zeros(shape, bool)
    sampler = np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        start = len(sample.prompt.ids)
        end = start + len(sample.ids)
        tokens[row, :start] = sample.prompt.ids
        tokens[row, start:end] = sample.ids
        segments[row, :end] = 1
        sampler[row, start:end] = sample.log_probs
        counted[row, start:end] = True
    settings = drawn_settings(plan.sampling, len(samples), num_ids)
    sampled = Sampled(advantages, sampler, np.zeros_like(sampler), settings)
    return Batch(tokens, segments, counted, sampled=sampled)


def drawn_settings(sampling: SamplingParams, rows: int, num_ids: int) -> dict[str, Any]:
    """Return the settings ``[rows]`` that tokens are drawn by; those that change nothing are not.

    Raises:
        UsageError: a setting is one that only the sampler would apply, or is greedy.
    """
    neutral = SamplingParams()
    settings: dict[str, Any] = {"num_ids": np.full(rows, num_ids, np.int32)}
    for name, value in vars(sampling).items():
        dtype = np.float32 if isinstance(value, float) else np.int32
        if name == "temperature":
            if not value:
                raise UsageError(
                    "sampling.temperature is 0; it must be positive, as equal answers teach nothing"
                )
            settings[name] = np.full(rows, value, dtype)
        elif name in TRUNCATIONS and value != getattr(neutral, name):
            settings[name] = np.full(rows, value, dtype)
        elif name != "seed" and value != getattr(neutral, name):
            raise UsageError(
                f"sampling.{name} is {value}; it must be left out with rewards, as the trainer "
                "does not apply it"
            )
    return settings


def mismatch(sampler: Any, trainer: Any) -> dict[str, float]:
    """Return how the log-probabilities of sampled tokens differ between sampler and trainer.

    Their mean and largest absolute difference in nats, and the share of ratios of probabilities
    outside 0.99 to 1.01.
    """
    difference = np.abs(np.float64(trainer) - np.float64(sampler))
    ratio = np.exp(np.float64(trainer) - np.float64(sampler))
    return {
        "mismatch_mean": float(difference.mean()),
        "mismatch_max": float(difference.max()),
        "mismatch_outside": float(np.mean((ratio < 0.99) | (ratio > 1.01))),
    }


def rollout_record(records: Sequence[dict[str, Any]], elapsed_s: float) -> dict[str, Any]:
    """Return the means of ``Rollouts.records``, and the speed of each phase, for ``metrics.jsonl``.

    ``elapsed_s`` is the time of all steps.
    """
    if not records:
        return {}
    names = dict.fromkeys(name for record in records for name in record)
    means = {name: _mean([record[name] for record in records if name in record]) for name in names}
    means["mismatch_max"] = max(record["mismatch_max"] for record in records)
    phases = {name: means[f"{name}_s"] for name in ("sampling", "reward", "scoring")}
    means["training_s"] = elapsed_s / len(records) - sum(phases.values())
    for name in ("sampling", "scoring", "training"):
        means[f"{name}_tokens_per_s"] = means["sampled_tokens"] / max(means[f"{name}_s"], 1e-9)
    return means


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of dictionaries of numbers."""
    if isinstance(values[0], dict):
        return {name: _mean([value[name] for value in values]) for name in values[0]}
    return float(np.mean(values))
