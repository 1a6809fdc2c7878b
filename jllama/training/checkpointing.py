"""Training states as checkpoints, and the receipt of their weights.

As the model a checkpoint holds ``training.weights(state)``: with ``training.ema`` the running mean,
and the weights that training continues with are then part of the saved state.
"""

import dataclasses
from typing import Any

import jax

from jllama.core.parameters import Params
from jllama.core.step import TrainState
from jllama.formats.receipt import describe_weights
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.system.files import Json
from jllama.training.compiling import Training
from jllama.training.loop import Run
from jllama.training.receipt import write_receipt


@dataclasses.dataclass
class Keeper:
    """What saves the states of a run.

    Attributes:
        checkpoints: those of the run.
        meta: what each checkpoint says of the run: fingerprints of the model that adapters or
            rewards need again, and ``data_since``, the step after which the data are those of now.
        receipt: see ``jllama.training.receipt``.
    """

    checkpoints: RunCheckpoints
    meta: Json
    receipt: Json = dataclasses.field(default_factory=dict)

    def save(self, run: Run, validation_loss: float | None) -> None:
        """Begin to save the state of a run, and what it needs to know to go on.

        Raises ``JllamaError`` if this or the save before it failed.
        """
        training = run.training
        state = run.state
        weights = training.weights(state)
        self.receipt["weights"][str(run.step)] = describe_weights(weights)
        write_receipt(run.plan.folder, self.receipt)
        meta = {
            "batches": run.source.stream.get_state(),
            "corpus": run.plan.data.fingerprint,
            "seconds": run.tracker.seconds(),
            **self.meta,
        }
        trained = None if state.average is None else training.trainable.select(state.params)
        others = _other_arrays(state, jax.random.key_data(state.key), trained)
        self.checkpoints.save(run.step, weights, others, meta, validation_loss)


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
