"""The checkpoints of a run, and the receipt of their weights."""

import dataclasses
from pathlib import Path

from jllama.core.parameters import Params
from jllama.core.step import TrainState
from jllama.formats.receipt import describe_weights
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.system.files import Json
from jllama.training.checkpointing import restore_state, save_state
from jllama.training.compiling import Training
from jllama.training.receipt import write_receipt


@dataclasses.dataclass
class Keeper:
    """Saves the states of a run, and reads them again.

    Attributes:
        folder: the run's.
        checkpoints: those in it.
        origin_meta: fingerprints of the model that adapters or rewards need again.
        receipt: see ``jllama.training.receipt``.
    """

    folder: Path
    checkpoints: RunCheckpoints
    origin_meta: Json
    receipt: Json

    @property
    def data_since(self) -> int:
        """The step after which the data are those of now."""
        return self.origin_meta.get("data_since", 0)

    def save(
        self,
        training: Training,
        step: int,
        state: TrainState,
        meta: Json,
        validation_loss: float | None,
    ) -> None:
        """Begin to save a state; ``meta`` is what a resumed run needs to know."""
        self.receipt["weights"][str(step)] = describe_weights(training.weights(state))
        write_receipt(self.folder, self.receipt)
        meta = {**meta, **self.origin_meta}
        save_state(self.checkpoints, training, step, state, meta, validation_loss)

    def restore(self, training: Training, step: int, base: Params | None) -> TrainState:
        """Return the state of a saved step; ``base`` is what adapters are of."""
        return restore_state(self.checkpoints, training, step, base)[0]
