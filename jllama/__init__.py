"""jllama: the Llama family in JAX and Flax.

``load`` reads a model from files of any format and ``save`` writes one; ``LlamaConfig`` describes a model, ``Llama``
is its Flax module; ``generate`` and ``stream`` let it write, and ``train`` trains one. The pure functions are in
``jllama.functional``.
"""

import importlib
from typing import Any

_HOMES = {
    "KVCache": "jllama.model",
    "Llama": "jllama.model",
    "LlamaConfig": "jllama.config",
    "Model": "jllama.checkpoints.formats",
    "PRESETS": "jllama.presets",
    "PrefixCache": "jllama.generation.engine",
    "Prompt": "jllama.generation.text",
    "RopeScaling": "jllama.config",
    "SamplingConfig": "jllama.generation.settings",
    "TrainConfig": "jllama.training.config",
    "convert": "jllama.checkpoints.formats",
    "generate": "jllama.generation.text",
    "initial_params": "jllama.model",
    "load": "jllama.checkpoints.formats",
    "load_tokenizer": "jllama.checkpoints.formats",
    "merge": "jllama.model",
    "preset": "jllama.presets",
    "save": "jllama.checkpoints.formats",
    "stream": "jllama.generation.text",
    "train": "jllama.training.loop",
    "unstack_layers": "jllama.model",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import jllama.functional`` needs nothing but jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jllama' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
