"""Training states as checkpoints.

As the model a checkpoint holds ``training.weights(state)``: with ``training.ema`` the running mean,
and the weights that training continues with are then part of the saved state.
"""

from typing import Any

import jax

from jllama.core import JllamaError
from jllama.core.parameters import Params
from jllama.core.step import TrainState
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.system.files import Json
from jllama.training.compiling import Training


def save_state(
    checkpoints: RunCheckpoints,
    training: Training,
    step: int,
    state: TrainState,
    meta: Json,
    validation_loss: float | None,
) -> None:
    """Begin to save a state; ``JllamaError`` if this or the save before it failed."""
    trained = None if state.average is None else training.trainable.select(state.params)
    others = _other_arrays(state, jax.random.key_data(state.key), trained)
    checkpoints.save(step, training.weights(state), others, meta, validation_loss)


def restore_state(
    checkpoints: RunCheckpoints, training: Training, step: int, base: Params | None
) -> tuple[TrainState, Json]:
    """Return the state of a step on its devices, with the given ``base``, and its metadata.

    Raises ``JllamaError`` if the files are damaged.
    """
    abstract = jax.eval_shape(training.init, jax.random.key(0))
    as_numbers = jax.jit(jax.random.key_data, out_shardings=abstract.key.sharding)
    others = _other_arrays(abstract, jax.eval_shape(as_numbers, abstract.key), abstract.average)
    weights, others, meta = checkpoints.restore(step, abstract.params, others)
    others["key"] = jax.random.wrap_key_data(others["key"])
    trained = others.pop("trained", None)
    if trained is not None:
        others["average"] = training.trainable.select(weights)
        weights = training.trainable.with_trained(weights, trained)
    return TrainState(params=weights, base=base, **others), meta


def _other_arrays(state: TrainState, key: Any, trained: Params | None) -> dict[str, Any]:
    """Return what is saved besides the model, with the key as plain numbers."""
    others = {
        "opt_state": state.opt_state,
        "step": state.step,
        "key": key,
        "usual_norm": state.usual_norm,
        "trained": trained,
    }
    return {name: value for name, value in others.items() if value is not None}


def check_origin(
    meta: Json,
    corpus: str,
    origin_meta: Json,
    checkpoints: RunCheckpoints,
    step: int,
    *,
    may_change: bool,
) -> bool:
    """Return whether a checkpoint was trained on these data.

    Raises ``JllamaError`` if it was not and ``may_change`` is False, or if the run began from
    another model.
    """
    folder = checkpoints.folder
    problem = ""
    identity = meta.get("identity", {})  # version 0.1.0 wrote one
    is_same = corpus in (meta.get("corpus"), *identity.values())
    if not (is_same or may_change):
        problem = (
            f"the corpus or its tokenizer has changed since {folder / str(step)} was saved; go on "
            "with other texts, chats or prompts by resume_with_changes"
        )
    elif any(meta.get(name, value) != value for name, value in origin_meta.items()):
        problem = f"init_from is not the model that the run {folder.parent} began from"
    if problem:
        raise JllamaError(
            f"{problem}; restore what it was, or start a new run with another run_dir"
        )
    return is_same
