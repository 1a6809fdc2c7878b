"""What a run learns from and is measured on, whether that is text, chats, or pairs of answers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jaxtyping import Float32

from jllama import distributed
from jllama.data.batches import chat_batches, chat_validation_batches, training_batches, validation_batches
from jllama.data.chats import ChatDataset
from jllama.data.tokens import SPLITS, Dataset
from jllama.files import fault_of, written_whole
from jllama.progress import progress
from jllama.training.config import TrainConfig
from jllama.training.step import Training, TrainState

REFERENCE = "reference.npz"
References = Mapping[str, Float32[np.ndarray, "rows"]]
"""Of pairs of answers, each one's log-probability before training, by split: those of pair i at 2i and 2i + 1."""


def batches_of(data: Dataset | ChatDataset, config: TrainConfig, training: Training, references: References) -> Any:
    """Batches forever, as NumPy arrays, of which this process reads the rows of its own devices."""
    options = config.training
    num_rows = options.batch_size * (2 if isinstance(data, ChatDataset) and data.preference else 1)
    parts = training.batch_sharding.addressable_devices_indices_map((num_rows,)).values()
    rows = np.unique([np.arange(num_rows)[part] for part in parts]).tolist()
    size: Any = {"batch_size": options.batch_size, "seq_len": options.seq_len, "seed": config.seed, "rows": rows}
    if isinstance(data, Dataset):
        return training_batches(data.train, **size)
    return chat_batches(data.train, **size, packing=config.data.packing, reference=references.get("train"))


def validation_rows(
    data: Dataset | ChatDataset, config: TrainConfig, references: References, max_tokens: int = 0
) -> Iterator[tuple[Any, np.ndarray | None]]:
    """The validation split once, or about ``max_tokens`` of it: batches, and of text which targets count."""
    size = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len, "max_tokens": max_tokens}
    if isinstance(data, Dataset):
        yield from validation_batches(data.validation, **size)
    else:
        for rows in chat_validation_batches(data.validation, **size, reference=references.get("validation")):
            yield rows, None


def on_devices(batch: Any, sharding: NamedSharding) -> Any:
    """A batch's arrays, of whose rows each process has those of its own devices."""
    return jax.tree.map(lambda each: jax.make_array_from_callback(each.shape, sharding, each.__getitem__), batch)


def reference_log_probs(
    folder: Path, data: ChatDataset, config: TrainConfig, training: Training, state: TrainState | None
) -> References:
    """The references of all pairs: by a state before training, then kept in the run's folder, where they are read."""
    if state is None:
        with fault_of(f"{folder / REFERENCE} is part of this run: put it back", OSError, ValueError, KeyError):
            stored = np.load(folder / REFERENCE)
            return {split: stored[split] for split in SPLITS}
    references: dict[str, np.ndarray] = {}
    size: Any = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len}
    total = sum(data.counts[split]["conversations"] for split in SPLITS)
    with progress("reading the answers before training", total) as move:
        for split in SPLITS:
            conversations, found = getattr(data, split), []
            for rows in chat_validation_batches(conversations, **size):
                sums = training.log_probs(state.params, on_devices(rows, training.batch_sharding), None, state.base)
                found.append(np.asarray(multihost_utils.process_allgather(sums, tiled=True)))
                move(len(sums))
            references[split] = np.concatenate(found)[: len(conversations.sizes)]
    if distributed.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / REFERENCE) as partial, partial.open("wb") as file:
            np.savez(file, train=references["train"], validation=references["validation"])
    return references
