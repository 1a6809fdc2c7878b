"""When a run logs, evaluates, samples and saves."""

import dataclasses

from jllama.checkpoints.run import CHECKPOINTS, METRICS
from jllama.training.config import LoopConfig


@dataclasses.dataclass
class Schedule:
    """What is due at a step, and what was due and has not come about, also in a run that goes on.

    ``done`` has the step of the last evaluation (``METRICS``), sample (``SAMPLES``) and checkpoint (``CHECKPOINTS``).
    """

    options: LoopConfig
    done: dict[str, int] = dataclasses.field(default_factory=dict)

    def is_due(self, step: int, every: int) -> bool:
        """Whether a step is one of every so many, or the last."""
        return step % every == 0 or step == self.options.steps

    def pauses(self, step: int) -> bool:
        """Whether anything is due after a step."""
        every = self.options.log_every, self._every(METRICS), self._every(CHECKPOINTS)
        return any(self.is_due(step, each) for each in every)

    def owes(self, name: str, step: int) -> bool:
        """Whether the last of these that was due up to a step has not come about."""
        every = self._every(name)
        last_due = step if self.is_due(step, every) else step - step % every
        return self.done.get(name, 0) < last_due

    def _every(self, name: str) -> int:
        save_every = self.options.save_every if name == CHECKPOINTS else 0
        return save_every or self.options.eval_every
