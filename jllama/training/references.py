"""The log-probabilities of answers before training, which preference training compares with."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jllama import distributed
from jllama.data.batches import chat_validation_batches
from jllama.data.datasets import ChatDataset
from jllama.data.tokens import SPLITS
from jllama.files import fault_of, written_whole
from jllama.progress import progress
from jllama.training.config import TrainConfig
from jllama.training.step import Training, TrainState, on_devices

REFERENCE = "reference.npz"


def with_references(
    data: ChatDataset,
    folder: Path,
    config: TrainConfig,
    training: Training,
    state: TrainState | None,
) -> ChatDataset:
    """Pairs with the log-probabilities of their answers by a state before training, which the run's folder keeps; of a
    run that goes on, without a state, they are read there.
    """
    references: dict[str, Any] = {}
    if state is None:
        with fault_of(
            f"{folder / REFERENCE} is part of this run: put it back", OSError, ValueError, KeyError
        ):
            stored = np.load(folder / REFERENCE)
            references = {split: stored[split] for split in SPLITS}
    else:
        size: Any = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len}
        total = sum(data.counts[split]["conversations"] for split in SPLITS)
        with progress("reading the answers before training", total) as move:
            for split in SPLITS:
                pairs, found = getattr(data, split), []
                for rows in chat_validation_batches(pairs, **size):
                    sums = training.log_probs(
                        state.params, on_devices(rows, training.batch_sharding), state.base
                    )
                    found.append(np.asarray(multihost_utils.process_allgather(sums, tiled=True)))
                    move(len(sums))
                references[split] = np.concatenate(found)[: len(pairs.sizes)]
        if distributed.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with written_whole(folder / REFERENCE) as partial, partial.open("wb") as file:
                np.savez(file, **references)
    splits = {
        split: dataclasses.replace(getattr(data, split), reference=references[split])
        for split in SPLITS
    }
    return dataclasses.replace(data, **splits)
