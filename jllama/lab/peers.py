"""Other programs that run a checkpoint: functions, libraries in this process, and servers."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jllama.core import JllamaError, UsageError
from jllama.formats.registry import load
from jllama.lab.checks import detached, relative_error
from jllama.lab.judge import Evidence, Judgment, OnProgress, judge
from jllama.lab.precisions import PRECISIONS
from jllama.lab.probes import make_rows, observe_behaviors, observe_decoding, observe_function
from jllama.lab.rows import Row
from jllama.lab.server import Server, connect, observe
from jllama.models.capture import activations
from jllama.models.language_model import LanguageModel
from jllama.system.errors import unknown_name

Function = Callable[[np.ndarray], Any]
"""Takes the tokens of a prompt, ``[seq]``, and returns logits ``[seq, vocab]``."""

_NUM_SHORT = 3
_SAME_STATE = 0.03  # the relative error that bfloat16 may have
_NUM_LIKELY = 20  # log-probabilities in each place, of a function that gives all


class Library(NamedTuple):
    """A program in this process: its package, what it opens, and how it is opened."""

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


LIBRARIES = {
    "transformers": Library(
        "transformers",
        "a folder in Hugging Face's format",
        lambda path: (path / "config.json").is_file(),
        _open_transformers,
    ),
    "llama.cpp": Library(
        "llama-cpp-python", "a GGUF file", lambda path: path.suffix == ".gguf", _open_llama_cpp
    ),
}
"""By the name that ``--against`` takes."""


def check_model(
    function: Function, checkpoint: str | Path, precision: str = "auto", max_tokens: int = 2048
) -> Judgment:
    """Compare a function of yours, of tokens to logits, with the float64 oracle of a checkpoint.

    Args:
        function: takes the tokens of a prompt, ``[seq]``, and returns logits ``[seq, vocab]`` or
            ``[1, seq, vocab]``, of NumPy, JAX, PyTorch or MLX. It may return a pair of logits and
            hidden states, ``[seq, embed]`` each: the embedding and the output of each layer. If no
            known mistake explains a difference, they tell in which layer it begins.
        checkpoint: as in ``jllama.load``.
        precision: how the function rounds, a name of ``jllama verify --precision``.
        max_tokens: the longest prompt.

    Raises:
        JllamaError: the checkpoint cannot be opened, or the function returns no logits.
        UsageError: there is no such precision.

    Examples:
        >>> model = jllama.load("smollm2/", layout="training")
        >>> llama = jllama.build_model(model.config, model.params)
        >>> forward = jax.jit(lambda tokens: llama(tokens[None]))
        >>> judgment = jllama.check_model(forward, "smollm2/")
        >>> judgment.passed, judgment.precision
        (True, 'float32')
    """
    model = open_exact(checkpoint, precision)
    return _judge_function(function, "the function", model, precision, max_tokens)


def open_exact(
    checkpoint: str | Path, precision: str = "auto", rope_factor: float | None = None
) -> LanguageModel:
    """Load a checkpoint in float32, in the training layout, and check the name of a precision."""
    if precision not in ("auto", *PRECISIONS):
        raise unknown_name("precision", precision, ["auto", *PRECISIONS])
    return load(checkpoint, layout="training", dtype="float32", rope_factor=rope_factor)


def check_library(
    name: str,
    checkpoint: str,
    model: LanguageModel,
    precision: str,
    max_tokens: int,
    on_progress: OnProgress,
) -> Judgment:
    """Compare a program of ``LIBRARIES``, which opens the checkpoint itself, with the oracle.

    Raises:
        UsageError: it does not open such a checkpoint.
        JllamaError: it is not installed, or cannot open this one.
    """
    library = LIBRARIES[name]
    if not library.is_right(Path(checkpoint)):
        raise UsageError(f"{name} opens {library.opens}, which {checkpoint} is not: convert it")
    on_progress(description=f"opening with {name}")
    try:
        function = library.open(checkpoint, max_tokens)
    except ImportError as error:
        raise JllamaError(
            f"{name} is not installed ({error}): pip install {library.package}"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise JllamaError(f"{name} does not open {checkpoint}: {reason}") from error
    return _judge_function(function, name, model, precision, max_tokens, on_progress)


def check_server(
    url: str,
    model: LanguageModel,
    precision: str = "auto",
    max_tokens: int = 2048,
    on_progress: OnProgress = lambda **_: None,
    **connection: Any,
) -> Judgment:
    """Compare a server with OpenAI's API with the oracle of the model that it serves.

    ``model`` is that of ``open_exact``, and ``connection`` has fields of ``Server``.

    Raises:
        JllamaError: the server cannot be asked, or the model has no tokenizer.
    """
    # 1) The server.
    rows = make_rows(model, max_tokens)
    address = url.rstrip("/").removesuffix("/v1")
    server = connect(
        Server(address, model.text_tokenizer, model.config.vocab_size, **connection),
        rows[0].ids[:16],
    )
    about = f"{server.method.about} on {server.method.path}"

    # 2) Its log-probabilities.
    on_progress(description=f"asking for {about}")
    observed = observe(server, rows, on_progress)
    kinds = [one.row.kind for one in observed]
    if rows[0].kind not in kinds:
        raise JllamaError(f"{server.url} answers no prompt of {len(rows[0].ids)} tokens")
    missing = dict.fromkeys(row.kind for row in rows if row.kind not in kinds)
    remarks = [*server.remarks]
    if missing:
        remarks.append(f"the server did not answer: {', '.join(missing)}")
    before = observed[0]
    observed += observe_decoding(server, rows[0])

    # 3) Whether they depend on anything else.
    on_progress(description="asking again")
    behaviors = [*observe_behaviors(server, rows, before)]
    method = f"{about}, prompts as {'token ids' if server.takes_ids else 'text'}"
    is_split = not server.method.is_whole
    evidence = Evidence(server.url, method, observed, behaviors, remarks, is_split)
    return judge(evidence, model, precision, on_progress)


def _judge_function(
    function: Function,
    name: str,
    model: LanguageModel,
    precision: str,
    max_tokens: int,
    on_progress: OnProgress = lambda **_: None,
) -> Judgment:
    on_progress(description=f"asking {name}")
    # Each length may be a program to compile, so few short prompts are enough.
    rows = [
        row
        for row in make_rows(model, max_tokens)
        if not (row.is_text or row.messages) and (row.kind != "short" or len(row.ids) <= _NUM_SHORT)
    ]
    states: list[Any] = []

    def logits_of(tokens: np.ndarray) -> Any:
        result = function(tokens)
        if not isinstance(result, tuple):
            return result
        if not states:  # those of the first row are enough
            states.append(result[1])
        return result[0]

    observed = [observe_function(logits_of, row, _NUM_LIKELY) for row in rows]
    judgment = judge(Evidence(name, "all logits", observed), model, precision, on_progress)
    if not judgment.verdict.endswith("mistakes explains it"):
        return judgment
    remark = "it may return hidden states, too: then the first wrong layer is named"
    if states:
        remark = _first_difference(states[0], model, rows[0])
    return dataclasses.replace(judgment, verdict=f"{judgment.verdict}; {remark}")


def _first_difference(states: Any, model: LanguageModel, row: Row) -> str:
    """Say which of a function's hidden states is the first that differs from jllama's."""
    layers = [f"layers/{index}" for index in range(model.config.num_layers)]
    names = ("embedding", *layers, "final_norm")
    with jax.default_matmul_precision("highest"):
        right = activations(model.config, model.params, np.array([row.ids]), names)
    for name, state in zip(names, states, strict=False):
        actual = np.asarray(detached(state), np.float64).squeeze()
        error = relative_error(actual, right[name][0])
        if name == layers[-1]:  # transformers gives it normalized
            error = min(error, relative_error(actual, right["final_norm"][0]))
        if not error < _SAME_STATE:
            return f"the first hidden state that differs is {name}"
    return "its hidden states are right, so look at the final norm and the head"
