"""From a corpus to batches: ``corpus`` -> documents, ``tokens`` -> ids on disk, ``batches`` -> windows (Grain)."""

from jllama.data.batches import training_batches, validation_batches
from jllama.data.config import DataConfig
from jllama.data.tokens import Dataset, SplitCounts, prepare_data

__all__ = ["DataConfig", "Dataset", "SplitCounts", "prepare_data", "training_batches", "validation_batches"]
