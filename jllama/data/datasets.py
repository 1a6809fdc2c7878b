"""What training reads batches from: a tokenized corpus, conversations, or batches of one's own."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import numpy as np
from jaxtyping import Integer

from jllama.data.batches import (
    Batch,
    Conversations,
    chat_batches,
    chat_validation_batches,
    training_batches,
    validation_batches,
)
from jllama.tokenizers import Tokenizer

GZIP = "bits per byte of gzip -9"
TITLES = {"train": "training", "validation": "validation"}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A tokenized corpus. ``fingerprint`` names its files, its split, its tokenizer and what else has a say.

    A split is each document as BOS, its tokens, EOS, one after the other in a memory-mapped array, and ``counts`` what
    ``counts.json`` holds: of each split the ``tokens`` with BOS and EOS, ``documents`` and ``bytes`` of UTF-8 text, and
    ``gzip_bytes``, what ``gzip -9`` makes of the first ``gzip_of_bytes`` bytes of the validation text.
    """

    tokenizer: Tokenizer
    train: Integer[np.ndarray, "train_tokens"]
    validation: Integer[np.ndarray, "validation_tokens"]
    fingerprint: str
    counts: dict[str, Any]
    notes: tuple[str, ...] = ()  # what was seen in the data that may not be meant, a line each
    is_chat = False  # whether samples are asked through the chat template
    rows_each = 1  # see ``Conversations``

    def training_batches(
        self, *, packing: bool = True, **sizes: Any
    ) -> grain.DatasetIterator[Batch]:
        """Batches forever, see ``batches.training_batches``."""
        return training_batches(self.train, bos_id=self.tokenizer.bos_id, **sizes)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """What is held out, once, see ``batches.validation_batches``."""
        return validation_batches(self.validation, bos_id=self.tokenizer.bos_id, **sizes)

    def size(self) -> str:
        """How much there is to train on."""
        return f"{self.counts['train']['tokens']:,} training tokens"

    def facts(self) -> dict[str, str]:
        """What a run's page says of the data; a model should need less for a byte of text than ``gzip -9`` does."""
        told = {}
        for split, title in TITLES.items():
            told[f"{title} text"] = "{bytes:,} bytes, {tokens:,} tokens".format(
                **self.counts[split]
            )
        bits = 8 * self.counts["gzip_bytes"] / self.counts["gzip_of_bytes"]
        return {**told, GZIP: f"{bits:.3f} (a model that beats gzip has learned something)"}


@dataclasses.dataclass(frozen=True)
class ChatDataset:
    """Tokenized conversations, or pairs of answers, as ``Dataset`` has a corpus.

    ``counts`` has of each split the ``conversations``, ``tokens``, ``counted_tokens``, and how many were too long and
    ``cut`` or ``dropped``.
    """

    tokenizer: Tokenizer
    train: Conversations
    validation: Conversations
    fingerprint: str
    counts: dict[str, Any]
    notes: tuple[str, ...] = ()
    is_chat = True
    rows_each = property(lambda self: self.train.rows_each)

    def training_batches(self, **sizes: Any) -> grain.DatasetIterator[Batch]:
        """Batches forever, see ``batches.chat_batches``."""
        return chat_batches(self.train, **sizes)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """What is held out, once, see ``batches.chat_validation_batches``."""
        return chat_validation_batches(self.validation, **sizes)

    def size(self) -> str:
        """As of ``Dataset``."""
        return self.facts()["training chats"]

    def facts(self) -> dict[str, str]:
        """What a run's page says of the data."""
        told = {}
        for split, title in TITLES.items():
            counts = self.counts[split]
            share = counts["counted_tokens"] / counts["tokens"]
            size = "{conversations:,} conversations of {tokens:,} tokens".format(**counts)
            told[f"{title} chats"] = (
                f"{size}, {share:.1%} count; {counts['cut']:,} cut, {counts['dropped']:,} left out"
            )
        return told

    def first_question(self) -> list[int]:
        """The ids before the first token that counts in the first conversation that is held out."""
        start = self.validation.starts[0]
        end = start + self.validation.sizes[0]
        question_tokens = self.validation.counted[start:end].argmax()
        return self.validation.tokens[start : start + question_tokens].tolist()


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """Batches of one's own, for ``jllama.train(config, data=...)``.

    Example::

        def batches():
            rng = np.random.default_rng(0)
            while True:
                yield jllama.text_batch(rng.integers(2, 259, (8, 65)), bos_id=1)

        source = jllama.BatchSource(tokenizer, batches, lambda: itertools.islice(batches(), 4))

    Args:
        tokenizer: of the run: its samples, its folder, and how many bytes of text a token stands for.
        training: gives an iterator from the first batch on, of ``training.batch_size`` rows of ``training.seq_len + 1``
            tokens each. A run that goes on reads again, and leaves out, the batches that it has had, unless the
            iterator has ``get_state()``, of what JSON can hold, and ``set_state(state)``, as those of ``grain`` have.
        validation: gives the batches of an evaluation.
        fingerprint: names what these are; a run goes on with the same alone.
    """

    tokenizer: Tokenizer
    training: Callable[[], Iterator[Batch]]
    validation: Callable[[], Iterable[Batch]]
    fingerprint: str = "batches of one's own"
    is_chat = False
    notes = ()
    rows_each = 1

    def training_batches(self, **sizes: Any) -> Any:
        """The iterator of ``training``, which can go on where it was."""
        batches = iter(self.training())
        return batches if hasattr(batches, "set_state") else CountedBatches(batches)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """The batches of ``validation``."""
        return iter(self.validation())

    def size(self) -> str:
        """As of ``Dataset``."""
        return self.fingerprint

    def facts(self) -> dict[str, str]:
        """What a run's page says of the data."""
        return {"data": self.fingerprint}


@dataclasses.dataclass
class CountedBatches:
    """An iterator whose state is the number of batches that have been read, which a step will check."""

    batches: Iterator[Any]
    count: int = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.count += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """The number of batches read so far."""
        return {"batches": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        """Read and leave out batches until ``state``'s number has been read."""
        while self.count < state["batches"] and next(self, None) is not None:
            pass


TrainingData = Dataset | ChatDataset | BatchSource
