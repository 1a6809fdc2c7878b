"""Where a run's batches come from: what the loop asks of data, whatever they are.

A ``DataSource`` reads texts, chats and pairs, and the ``BatchSource`` that users give.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jllama.core import JllamaError
from jllama.core.step import Batch, TrainState
from jllama.data.batches import chat_validation_batches
from jllama.data.datasets import ChatDataset
from jllama.data.tokens import SPLITS
from jllama.parallel import distributed
from jllama.score.scoring import TextScore
from jllama.system.files import atomic_write, errors_as
from jllama.system.progress import progress
from jllama.system.stop import exit_now
from jllama.training.compiling import Training, put_on_devices
from jllama.training.metrics import Evaluation, add_exactly
from jllama.training.plan import Plan

REFERENCE = "reference.npz"
Figures = tuple[dict[str, Any], Sequence[str]]
"""What is logged of steps, and warnings."""


class Source:
    """Batches, and what a state is evaluated with.

    A source is made before weights are loaded, so that mistakes in it show early.

    Attributes:
        plan: the run's.
        data: the plan's; of pairs, after ``begin``, with the reference's log-probabilities.
        training: the programs that the batches are for, after ``begin``.
        stream: the iterator over the data; ``get_state`` returns its position, as JSON can hold
            it, and ``set_state`` goes on from there.
        samples: lines for ``samples.jsonl`` of the last evaluation.
        advice: what to do if steps were skipped for a reason that ``why_skipped`` gives.
    """

    training: Training
    stream: Any = None
    samples: Sequence[dict[str, Any]] = ()
    advice: str = ""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.data = plan.data

    def begin(self, training: Training, initial: TrainState | None) -> None:
        """Get the programs, and the state before training; None where that is not needed."""
        self.training = training

    def next(self, step: int, state: TrainState) -> Any:
        """Return the batch of the update after ``step``, which ``state`` gets.

        A user's own may be anything, which the loop checks.

        Raises:
            StopIteration: there are no more.
        """
        try:
            return next(self.stream)
        except JllamaError as error:
            if self.is_stream and jax.process_count() > 1:
                # The others do not know of it, and wait in the step.
                exit_now(f"error: {error}", 1)
            raise

    @property
    def is_stream(self) -> bool:
        """Whether the data are a ``StreamDataset``, whose module is imported only for one."""
        return getattr(self.data, "is_stream", False)

    @property
    def is_between(self) -> bool:
        """Whether a run may pause now, as no batch is half used."""
        return True

    def evaluate(
        self, state: TrainState, max_tokens: int, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Evaluate on about ``max_tokens`` held-out tokens, 0 for all; None if a stop came first.

        ``should_stop`` is asked before each batch.
        """
        raise NotImplementedError

    def figures(self, batches: Sequence[Batch], elapsed_s: float) -> Figures:
        """Return what is logged of the steps with these batches, and warnings; each only once."""
        return {}, ()

    def why_skipped(self, step: int) -> str:
        """Return why a step has nothing to learn from, if the source knows it."""
        return ""

    def close(self) -> None:
        """End what the source has started."""


class DataSource(Source):
    """A text, chats, pairs of answers or one's own batches; each process reads its own rows."""

    def begin(self, training: Training, initial: TrainState | None) -> None:
        """Get the programs, and for pairs what the model before training thinks of them."""
        super().begin(training, initial)
        plan = self.plan
        options = plan.options
        if isinstance(self.data, ChatDataset) and self.data.rows_per_example > 1:
            self.data = add_reference_log_probs(self.data, training, initial)
        num_rows = options.batch_size * self.data.rows_per_example
        parts = training.batch_sharding.addressable_devices_indices_map((num_rows,)).values()
        rows = np.unique([np.arange(num_rows)[part] for part in parts]).tolist()
        sizes: Any = {"batch_size": options.batch_size, "seq_len": options.seq_len, "rows": rows}
        self.stream = self.data.training_batches(**sizes, seed=plan.seed, packing=plan.packing)

    def evaluate(
        self, state: TrainState, max_tokens: int, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Evaluate on the validation split."""
        training = self.training
        options = self.plan.options
        batches = self.data.validation_batches(
            batch_size=options.batch_size, seq_len=options.seq_len, max_tokens=max_tokens
        )
        token_bytes = self.data.tokenizer.token_bytes()
        params = training.weights(state)
        sums = []
        for batch in batches:
            if should_stop():
                return None
            on_devices = put_on_devices(batch, training.batch_sharding)
            text_bytes = token_bytes[batch.tokens[:, 1:][batch.counted[:, 1:]]].sum()
            results = jax.device_get(training.evaluate(params, on_devices, state.base))
            sums.append((*results, text_bytes))
        if not sums:
            raise JllamaError(
                "the data gave no batch to evaluate with: its validation needs at least one"
            )
        nats, count, figures, text_bytes = add_exactly(sums)
        score = TextScore(nats, round(count), round(text_bytes))
        means = {name: total / count for name, total in figures.items()}
        is_likelihood = not means and options.objective in ("auto", "next_token")
        if is_likelihood:
            return Evaluation(score.loss, score.perplexity, score.bits_per_byte)
        return Evaluation(score.loss, None, None, means or None)

    def figures(self, batches: Sequence[Batch], elapsed_s: float) -> Figures:
        """Return the share of padding in chats."""
        if self.data.is_chat:
            return {"padding": share_of_padding(batches)}, ()
        return self.stream.figures() if self.is_stream else ({}, ())

    def close(self) -> None:
        """End the processes that read a stream."""
        if self.is_stream and self.stream:
            self.stream.close()


def share_of_padding(batches: Sequence[Batch]) -> float:
    """Return the share of tokens that are padding; only the rows of this process are filled."""
    segments = [batch.segments[batch.segments.any(axis=1)].ravel() for batch in batches]
    return float(np.mean(np.concatenate(segments) == 0))


def add_reference_log_probs(
    data: ChatDataset, training: Training, state: TrainState | None
) -> ChatDataset:
    """Return pairs with their answers' log-probabilities under the model before training.

    They are computed by ``state`` and stored in the run's folder. A resumed run reads them there.
    """
    plan = training.plan
    path = plan.folder / REFERENCE
    references: dict[str, Any] = {}
    if plan.resumes:
        with errors_as(f"{path} is part of this run: put it back", OSError, ValueError, KeyError):
            stored = np.load(path)
            references = {split: stored[split] for split in SPLITS}
    else:
        assert state is not None
        sizes: Any = {"batch_size": plan.options.batch_size, "seq_len": plan.options.seq_len}
        total = sum(data.counts[split]["conversations"] for split in SPLITS)
        with progress("reading the answers before training", total) as move:
            for split in SPLITS:
                pairs = getattr(data, split)
                parts = []
                for batch in chat_validation_batches(pairs, **sizes):
                    on_devices = put_on_devices(batch, training.batch_sharding)
                    sums = training.log_probs(state.params, on_devices, state.base)
                    parts.append(np.asarray(process_allgather(sums, tiled=True)))
                    move(len(sums))
                references[split] = np.concatenate(parts)[: len(pairs.sizes)]
        if distributed.process_index() == 0:
            plan.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial, partial.open("wb") as file:
                np.savez(file, **references)
    train, validation = (
        dataclasses.replace(getattr(data, split), reference=references[split]) for split in SPLITS
    )
    return dataclasses.replace(data, train=train, validation=validation)
