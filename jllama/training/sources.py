"""Where a run's batches come from: what the loop asks of data, whatever they are.

A ``DataSource`` reads texts, chats and pairs, and the ``BatchSource`` that users give.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jllama.core import JllamaError
from jllama.core.step import Batch, TrainState
from jllama.data.datasets import TrainingData
from jllama.score.scoring import TextScore
from jllama.training.compiling import Training, put_on_devices
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, add_exactly

Samples = list[dict[str, Any]]
"""Lines for ``samples.jsonl``."""


class Source:
    """Batches, and what a state is evaluated with.

    Attributes:
        training: the programs that the batches are for.
        advice: what to do if steps were skipped for a reason that ``why_skipped`` gives.
    """

    training: Training
    advice: str = ""

    def next(self, step: int, state: TrainState) -> Batch:
        """Return the batch of the update after ``step``, which ``state`` gets.

        Raises:
            StopIteration: there are no more.
        """
        raise NotImplementedError

    @property
    def is_between(self) -> bool:
        """Whether a run may pause now, as no batch is half used."""
        return True

    def evaluate(
        self, state: TrainState, max_tokens: int, should_stop: Callable[[], bool]
    ) -> tuple[Evaluation, Samples] | None:
        """Evaluate on about ``max_tokens`` held-out tokens, 0 for all; None if a stop came first.

        Return texts that the evaluation has made, too.
        """
        raise NotImplementedError

    def figures(
        self, batches: Sequence[Batch], elapsed_s: float
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """Return what is logged of the steps with these batches, and warnings; each only once."""
        return {}, ()

    def why_skipped(self, step: int) -> str:
        """Return why a step has nothing to learn from, if the source knows it."""
        return ""

    def get_state(self) -> Any:
        """Return the position in the data, as JSON can hold it."""
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        """Go on from a position."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the source has started."""


class DataSource(Source):
    """A text, chats, pairs of answers or one's own batches; each process reads its own rows."""

    def __init__(self, data: TrainingData, config: TrainConfig, training: Training) -> None:
        self.data = data
        self.config = config
        self.training = training
        options = config.training
        num_rows = options.batch_size * data.rows_per_example
        parts = training.batch_sharding.addressable_devices_indices_map((num_rows,)).values()
        rows = np.unique([np.arange(num_rows)[part] for part in parts]).tolist()
        sizes: Any = {"batch_size": options.batch_size, "seq_len": options.seq_len, "rows": rows}
        self.batches: Any = data.training_batches(
            **sizes, seed=config.seed, packing=config.data.packing
        )

    def next(self, step: int, state: TrainState) -> Any:
        """Return the next batch; one's own may be anything, which the loop checks."""
        return next(self.batches)

    def evaluate(
        self, state: TrainState, max_tokens: int, should_stop: Callable[[], bool]
    ) -> tuple[Evaluation, Samples] | None:
        """Evaluate on the validation split."""
        evaluation = evaluate(self.training, self.data, self.config, state, max_tokens, should_stop)
        return evaluation and (evaluation, [])

    def figures(
        self, batches: Sequence[Batch], elapsed_s: float
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the share of padding in chats."""
        return ({"padding": share_of_padding(batches)} if self.data.is_chat else {}), ()

    def get_state(self) -> Any:
        """Return the position in the data."""
        return self.batches.get_state()

    def set_state(self, state: Any) -> None:
        """Go on from a position."""
        self.batches.set_state(state)


def share_of_padding(batches: Sequence[Batch]) -> float:
    """Return the share of tokens that are padding; only the rows of this process are filled."""
    segments = [batch.segments[batch.segments.any(axis=1)].ravel() for batch in batches]
    return float(np.mean(np.concatenate(segments) == 0))


def evaluate(
    training: Training,
    data: TrainingData,
    config: TrainConfig,
    state: TrainState,
    max_tokens: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate on about ``max_tokens`` tokens of the validation split; 0 means all of it.

    Returns None as soon as ``should_stop()`` is true, which is asked before each batch.
    """
    options = config.training
    batches = data.validation_batches(
        batch_size=options.batch_size, seq_len=options.seq_len, max_tokens=max_tokens
    )
    token_bytes = data.tokenizer.token_bytes()
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
