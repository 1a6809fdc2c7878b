"""Other programs that run a checkpoint in this process."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jllama.errors import JllamaError, UsageError
from jllama.verify.judge import Judgment, OnStage, judge_function

Function = Callable[[np.ndarray], Any]


class Peer(NamedTuple):
    """A program: its package, what it opens, and how it is opened as a function."""

    package: str
    opens: str
    is_right: Callable[[Path], bool]
    open: Callable[[str, int], Function]


def _open_transformers(checkpoint: str, max_tokens: int) -> Function:
    transformers = importlib.import_module("transformers")
    torch = importlib.import_module("torch")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def logits(tokens: np.ndarray) -> Any:
        with torch.no_grad():
            return model(torch.tensor(tokens[None].astype(np.int64))).logits

    return logits


def _open_llama_cpp(checkpoint: str, max_tokens: int) -> Function:
    llama_cpp = importlib.import_module("llama_cpp")
    model = llama_cpp.Llama(checkpoint, n_ctx=max_tokens, logits_all=True, verbose=False)

    def logits(tokens: np.ndarray) -> Any:
        model.reset()
        model.eval(tokens.tolist())
        return np.array(model.scores[: len(tokens)])

    return logits


PEERS = {
    "transformers": Peer(
        "transformers",
        "a folder in Hugging Face's format",
        lambda path: (path / "config.json").is_file() or not path.exists(),
        _open_transformers,
    ),
    "llama.cpp": Peer(
        "llama-cpp-python", "a GGUF file", lambda path: path.suffix == ".gguf", _open_llama_cpp
    ),
}
"""By the name that ``--against`` takes."""


def check_peer(
    name: str, checkpoint: str, precision: str, *, max_tokens: int, on_stage: OnStage
) -> Judgment:
    """Compare a program of ``PEERS`` with the oracle of a checkpoint.

    Raises:
        UsageError: it does not open such a checkpoint.
        JllamaError: it is not installed, or cannot open this one.
    """
    peer = PEERS[name]
    if not peer.is_right(Path(checkpoint)):
        raise UsageError(f"{name} opens {peer.opens}, which {checkpoint} is not: convert it first")
    on_stage(f"opening with {name}")
    try:
        function = peer.open(checkpoint, max_tokens)
    except ImportError as error:
        raise JllamaError(
            f"{name} is not installed ({error}): pip install {peer.package}"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise JllamaError(f"{name} does not open {checkpoint}: {reason}") from error
    return judge_function(
        function, name, checkpoint, precision, max_tokens=max_tokens, on_stage=on_stage
    )
