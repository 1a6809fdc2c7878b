"""From a corpus to batches: ``corpus`` -> documents, ``tokens`` -> ids on disk, ``batches`` -> windows (Grain)."""
