"""jllama: the Llama family in JAX and Flax.

Load a model, generate text, chat::

    model = jllama.load("runs/quickstart")  # or a Hugging Face, Meta, GGUF or llama2.c checkpoint
    print(jllama.generate(model, "Once upon", max_new_tokens=50, temperature=0.8)[0].text)
    for piece in jllama.stream(model, "Once upon", max_new_tokens=50):
        print(piece, end="", flush=True)
    print(jllama.chat(model, [{"role": "user", "content": "Hello!"}]).text)
    logits = model([[1, 15, 8]])  # [batch, seq, vocab]

``help(jllama.generate)`` explains the settings; a ``Grammar`` is what a text must match.
``Conversation`` stores a chat, ``warm_up`` compiles ahead, ``Engine`` is the batch that requests
enter and leave. ``save``, ``convert`` and ``load_tokenizer`` work on files. ``LlamaConfig``
describes a model, ``Llama`` is its Flax module, ``train`` trains one, ``compile_training`` is for
your own training loop. The pure functions are in ``jllama.functional``, the same in NumPy in
``jllama.oracle``; ``jllama.check`` compares your functions with them. Errors are a ``JllamaError``;
for a wrong argument it is a ``UsageError``.
"""

import ast
import difflib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jllama.models.rope_scaling  # noqa: F401 - its classes are known to LlamaConfig

# For editors and type checkers; at run time a name is imported when it is first used.
if TYPE_CHECKING:
    from jllama.lab import check as check
    from jllama import functional as functional
    from jllama.models import oracle as oracle
    from jllama.formats.registry import (
        FORMATS as FORMATS,
        Format as Format,
        convert as convert,
        load as load,
        load_tokenizer as load_tokenizer,
        save as save,
    )
    from jllama.core.config import LlamaConfig as LlamaConfig
    from jllama.generation.conversation import Conversation as Conversation, chat as chat
    from jllama.core.step import Batch as Batch
    from jllama.data.batches import text_batch as text_batch, training_batches as training_batches
    from jllama.data.config import DataConfig as DataConfig
    from jllama.data.datasets import BatchSource as BatchSource
    from jllama.data.tokens import prepare_data as prepare_data
    from jllama.models.decode_params import (
        DecodeParams as DecodeParams,
        decode_layout as decode_layout,
    )
    from jllama.core import JllamaError as JllamaError, UsageError as UsageError
    from jllama.score.scoring import perplexity as perplexity
    from jllama.generation.engine import Engine as Engine
    from jllama.generation.generate import generate as generate, stream as stream
    from jllama.generation.warm_up import warm_up as warm_up
    from jllama.generation.sampling_params import Prompt as Prompt, SamplingParams as SamplingParams
    from jllama.generation.text import Completion as Completion
    from jllama.generation.grammar import Grammar as Grammar
    from jllama.models.language_model import LanguageModel as LanguageModel
    from jllama.core.model import (
        KVCache as KVCache,
        Llama as Llama,
        initial_params as initial_params,
    )
    from jllama.models.build import build_model as build_model
    from jllama.models.config import LoraConfig as LoraConfig
    from jllama.models.presets import PRESETS as PRESETS, preset as preset
    from jllama.rl import REWARDS as REWARDS, Scorer as Scorer
    from jllama.models.rope_scaling import (
        DynamicScaling as DynamicScaling,
        LinearScaling as LinearScaling,
        Llama3Scaling as Llama3Scaling,
        YarnScaling as YarnScaling,
    )
    from jllama.core.config import RopeScaling as RopeScaling
    from jllama.parallel.config import MeshConfig as MeshConfig
    from jllama.parallel.sharding import make_mesh as make_mesh
    from jllama.training.config import (
        GrpoConfig as GrpoConfig,
        LoopConfig as LoopConfig,
        OptimizerConfig as OptimizerConfig,
        TrainConfig as TrainConfig,
    )
    from jllama.training.run import train as train
    from jllama.training.objectives import OBJECTIVES as OBJECTIVES
    from jllama.training.optimizer import OPTIMIZERS as OPTIMIZERS
    from jllama.core.step import TrainState as TrainState
    from jllama.training.compiling import compile_training as compile_training
    from jllama.lab.peers import check_model as check_model

__version__ = "0.2.0"

_HOMES = {
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname
}
"""The module of each public name, read from the imports above, so that there is one list."""

_MODULES = ("check", "functional", "oracle")
"""The public names that are modules."""

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__", "__doc__"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; ``import jllama.functional`` needs only jax."""
    if name not in _HOMES:
        nearest = difflib.get_close_matches(name, _HOMES, 1)
        advice = f"; did you mean {nearest[0]}?" if nearest else ""
        raise AttributeError(f"module 'jllama' has no attribute {name!r}{advice}")
    if name in _MODULES:
        return importlib.import_module(f"{_HOMES[name]}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)
