"""The checkpoints of a run as training states."""

import dataclasses
from typing import Any

import jax

from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.errors import JllamaError
from jllama.files import Json
from jllama.parameters import Params
from jllama.training.step import Training, TrainState


@dataclasses.dataclass
class Checkpoints:
    """Saves training states and restores them.

    As the model a checkpoint holds ``training.weights(state)``: with ``training.ema`` the running
    mean, and the weights that training continues with are then part of the saved state.
    """

    store: RunCheckpoints
    training: Training
    corpus: str  # the fingerprint of the data
    base: str | None  # the fingerprint of the weights under adapters

    def save(
        self,
        step: int,
        state: TrainState,
        batches: Any,
        seconds: float,
        validation_loss: float | None,
    ) -> None:
        """Begin to save a state; ``JllamaError`` if this or the save before it failed."""
        meta: Json = {"batches": batches, "corpus": self.corpus, "seconds": seconds}
        if self.base:
            meta["base_fingerprint"] = self.base
        key = jax.random.key_data(state.key)
        trained = None if state.average is None else self.training.trainable.select(state.params)
        others = _other_arrays(state, key, trained)
        self.store.save(step, self.training.weights(state), others, meta, validation_loss)

    def restore(self, step: int, base: Params | None) -> tuple[TrainState, Json]:
        """Return the state of a step on its devices, with the given ``base``, and the metadata.

        Raises ``JllamaError`` if the files are damaged, or the data or the base has changed.
        """
        training = self.training
        abstract = jax.eval_shape(training.init, jax.random.key(0))
        as_numbers = jax.jit(jax.random.key_data, out_shardings=abstract.key.sharding)
        key = jax.eval_shape(as_numbers, abstract.key)
        others = _other_arrays(abstract, key, abstract.average)
        weights, others, meta = self.store.restore(step, abstract.params, others)
        self._check(step, meta)
        others["key"] = jax.random.wrap_key_data(others["key"])
        trained = others.pop("trained", None)
        if trained is not None:
            others["average"] = training.trainable.select(weights)
            weights = training.trainable.with_trained(weights, trained)
        return TrainState(params=weights, base=base, **others), meta

    def _check(self, step: int, meta: Json) -> None:
        problem = ""
        identity = meta.get("identity", {})  # version 0.1.0 wrote one
        if self.corpus not in (meta.get("corpus"), *identity.values()):
            saved = self.store.folder / str(step)
            problem = f"the corpus or its tokenizer has changed since {saved} was saved"
        elif meta.get("base_fingerprint") != self.base:
            problem = (
                f"init_from is not the model that the run {self.store.folder.parent} began from"
            )
        if problem:
            raise JllamaError(
                f"{problem}; restore what it was, or start a new run with another run_dir"
            )


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
