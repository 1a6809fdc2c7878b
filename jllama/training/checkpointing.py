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
    """Saves training states and restores them. What a checkpoint holds as the model is ``training.weights(state)``.

    ``corpus`` and ``base`` are the fingerprints of the data and, with adapters, of the weights that they adapt.
    """

    saved: RunCheckpoints
    training: Training
    corpus: str
    base: str | None

    def save(
        self,
        step: int,
        state: TrainState,
        batches: Any,
        seconds: float,
        validation_loss: float | None,
    ) -> None:
        """Begin to save a state, with the state of the batches; JllamaError if this or the save before failed."""
        meta: Json = {"batches": batches, "corpus": self.corpus, "seconds": seconds}
        if self.base:
            meta["base_fingerprint"] = self.base
        key = jax.random.key_data(state.key)
        trained = None if state.average is None else self.training.trainable.trained(state.params)
        others = _others(state, key, trained)
        self.saved.save(step, self.training.weights(state), others, meta, validation_loss)

    def restore(self, step: int, base: Params | None) -> tuple[TrainState, Json]:
        """The state that was saved at a step, on its devices, with these weights that are not saved; and the notes.

        JllamaError if the files are damaged, or the data or the base is another.
        """
        abstract = jax.eval_shape(self.training.init, jax.random.key(0))
        key = jax.eval_shape(
            jax.jit(jax.random.key_data, out_shardings=abstract.key.sharding), abstract.key
        )
        weights, others, meta = self.saved.restore(
            step, abstract.params, _others(abstract, key, abstract.average)
        )
        self._check(step, meta)
        others["key"] = jax.random.wrap_key_data(others["key"])
        trainable = self.training.trainable
        trained = others.pop("trained", None)
        if trained is not None:
            others["average"] = trainable.trained(weights)
            weights = trainable.replaced(weights, trained)
        return TrainState(params=weights, base=base, **others), meta

    def _check(self, step: int, meta: Json) -> None:
        corpora = (
            meta.get("corpus"),
            *meta.get("identity", {}).values(),
        )  # 0.1.0 wrote an identity
        if self.corpus not in corpora:
            said = f"changed since {self.saved.folder / str(step)} was saved: the corpus or its tokenizer"
            raise JllamaError(
                f"{said}; restore what it was, or start a new run with another run_dir"
            )
        if meta.get("base_fingerprint") != self.base:
            said = f"init_from is not the model that the run {self.saved.folder.parent} began from"
            raise JllamaError(
                f"{said}: put that there again, or start a new run with another run_dir"
            )


def _others(state: TrainState, key: Any, trained: Params | None) -> dict[str, Any]:
    """What is saved besides the model: the key as plain numbers, and what is trained where the model is its mean."""
    others = {"opt_state": state.opt_state, "step": state.step, "key": key}
    others |= {"usual_norm": state.usual_norm, "trained": trained}
    return {name: value for name, value in others.items() if value is not None}
