"""Sources of training batches: a tokenized corpus, conversations, or the user's own batches."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Integer

from jllama.core.step import Batch
from jllama.data.batches import (
    ChatTokens,
    chat_batches,
    chat_validation_batches,
    training_batches,
    validation_batches,
)
from jllama.tokenizers.base import Tokenizer

GZIP = "bits per byte of gzip -9"
TITLES = {"train": "training", "validation": "validation"}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A tokenized corpus.

    A split is a memory-mapped array of documents, each as BOS, its tokens, EOS. ``fingerprint``
    is the SHA-256 of all of them, wherever the files are.

    ``counts`` is the content of ``counts.json``: for each split the ``tokens`` (with BOS and EOS),
    the ``documents`` and the ``bytes`` of UTF-8 text; and ``gzip_bytes``, to which ``gzip -9``
    compresses the first ``gzip_of_bytes`` bytes of the validation text.
    """

    tokenizer: Tokenizer
    train: Integer[np.ndarray, "train_tokens"]
    validation: Integer[np.ndarray, "validation_tokens"]
    fingerprint: str
    counts: dict[str, Any]
    notes: tuple[str, ...] = ()  # what in the data may be a mistake, one line each
    is_chat = False  # whether samples use the chat template
    rows_per_example = 1  # see ``ChatTokens``

    def training_batches(
        self, *, packing: bool = True, **sizes: Any
    ) -> grain.DatasetIterator[Batch]:
        """Return endless batches, see ``batches.training_batches``."""
        return training_batches(self.train, bos_id=self.tokenizer.bos_id, **sizes)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """Return batches of the held-out text, see ``batches.validation_batches``."""
        return validation_batches(self.validation, bos_id=self.tokenizer.bos_id, **sizes)

    def size(self) -> str:
        """Describe the amount of training data."""
        return f"{self.counts['train']['tokens']:,} training tokens"

    def facts(self) -> dict[str, str]:
        """Describe the data for the run's page.

        A model should need fewer bits for a byte of text than ``gzip -9`` does.
        """
        lines = {}
        for split, title in TITLES.items():
            counts = self.counts[split]
            lines[f"{title} text"] = "{bytes:,} bytes, {tokens:,} tokens".format(**counts)
        bits = 8 * self.counts["gzip_bytes"] / self.counts["gzip_of_bytes"]
        lines[GZIP] = f"{bits:.3f} (a model that beats gzip has learned something)"
        return lines


@dataclasses.dataclass(frozen=True)
class ChatDataset:
    """Tokenized conversations, or pairs of answers, with the methods of ``Dataset``.

    ``counts`` has for each split the ``conversations``, ``tokens`` and ``counted_tokens``, and how
    many conversations were too long and ``cut`` or ``dropped``.
    """

    tokenizer: Tokenizer
    train: ChatTokens
    validation: ChatTokens
    fingerprint: str
    counts: dict[str, Any]
    notes: tuple[str, ...] = ()
    is_chat = True

    @property
    def rows_per_example(self) -> int:
        """Return 2 for pairs of answers, else 1."""
        return self.train.rows_per_example

    def training_batches(self, **sizes: Any) -> grain.DatasetIterator[Batch]:
        """Return endless batches, see ``batches.chat_batches``."""
        return chat_batches(self.train, **sizes)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """Return batches of what is held out, see ``batches.chat_validation_batches``."""
        return chat_validation_batches(self.validation, **sizes)

    def size(self) -> str:
        """Describe the amount of training data."""
        return self.facts()["training chats"]

    def facts(self) -> dict[str, str]:
        """Describe the data for the run's page."""
        lines = {}
        for split, title in TITLES.items():
            counts = self.counts[split]
            share = counts["counted_tokens"] / counts["tokens"]
            size = "{conversations:,} conversations of {tokens:,} tokens".format(**counts)
            lines[f"{title} chats"] = (
                f"{size}, {share:.1%} count; {counts['cut']:,} cut, {counts['dropped']:,} left out"
            )
        return lines

    def first_question(self) -> list[int]:
        """Return the ids before the first counted token of the first held-out conversation."""
        start = self.validation.starts[0]
        end = start + self.validation.sizes[0]
        question_tokens = self.validation.counted[start:end].argmax()
        return self.validation.tokens[start : start + question_tokens].tolist()


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """The user's own batches, for ``jllama.train(config, data=...)``.

    Example::

        def batches():
            rng = np.random.default_rng(0)
            while True:
                yield jllama.text_batch(rng.integers(2, 259, (8, 65)), bos_id=1)

        source = jllama.BatchSource(tokenizer, batches, lambda: itertools.islice(batches(), 4))

    Args:
        tokenizer: the run's tokenizer, for its samples, its folder, and the bytes of text that a
            token stands for.
        training: returns an iterator from the first batch on. A batch has ``training.batch_size``
            rows of ``training.seq_len + 1`` tokens. A run that continues reads and drops the
            batches that it has had, unless the iterator has ``get_state()``, which returns what
            JSON can hold, and ``set_state(state)``, as the iterators of ``grain`` have.
        validation: returns the batches of one evaluation.
        fingerprint: identifies the data; a run continues only with the same fingerprint.
    """

    tokenizer: Tokenizer
    training: Callable[[], Iterator[Batch]]
    validation: Callable[[], Iterable[Batch]]
    fingerprint: str = "batches of one's own"
    is_chat = False
    notes = ()
    rows_per_example = 1

    def training_batches(self, **sizes: Any) -> Any:
        """Return the iterator of ``training``, made to store and restore its state."""
        batches = iter(self.training())
        return batches if hasattr(batches, "set_state") else CountedBatches(batches)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """Return the batches of ``validation``."""
        return iter(self.validation())

    def size(self) -> str:
        """Describe the amount of training data."""
        return self.fingerprint

    def facts(self) -> dict[str, str]:
        """Describe the data for the run's page."""
        return {"data": self.fingerprint}


@dataclasses.dataclass
class CountedBatches:
    """An iterator whose state is the number of batches read so far."""

    batches: Iterator[Any]
    count: int = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.count += 1
        return batch

    def give_back(self) -> None:
        """Do not count the last batch, which is wrong."""
        self.count -= 1

    def get_state(self) -> dict[str, int]:
        """Return the number of batches read so far."""
        return {"batches": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        """Drop batches until as many have been read as ``state`` says."""
        while self.count < state["batches"] and next(self, None) is not None:
            pass


TrainingData = Dataset | ChatDataset | BatchSource
