"""jllama's own checkpoints: the one place that knows orbax.

A run's ``checkpoints`` folder holds one folder a saved step. Each is whole or absent: orbax writes it beside and marks
it finished at the end, so a process killed in the middle of a save leaves the earlier ones as they were.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jllama.errors import JllamaError
from jllama.parameters import Params

_ITEMS = ("params", "state", "meta")


class Checkpoints:
    """The checkpoints of one run. Saving goes on in the background; its errors surface at the next call.

    Args:
        folder: where they are, or will be.
        keep_last: how many of the latest to keep, besides the best by validation loss.
        read_only: never write or clean up.
    """

    def __init__(self, folder: Path, keep_last: int = 1, *, read_only: bool = False) -> None:
        self.folder = folder.resolve()
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={
                "params": ocp.StandardCheckpointHandler(),
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                best_fn=_validation_loss,
                best_mode="min",
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(
                    [
                        checkpoint_managers.LatestN(keep_last),
                        checkpoint_managers.BestN(
                            get_metric_fn=_validation_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
                        ),
                    ]
                ),
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
            ),
        )

    def steps(self) -> list[int]:
        """The steps that are saved whole, oldest first."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The saved step with the lowest validation loss; the last one if none was evaluated."""
        best = self._manager.best_step()
        return self._manager.latest_step() if best is None else best

    def save(self, step: int, params: Params, state: Any, meta: dict[str, Any], validation_loss: float | None) -> None:
        """Begin to save; the arrays are copied first, so they may be donated as soon as this returns.

        Raises:
            JllamaError: this or the save before failed, a full disk for instance; earlier checkpoints stay.
        """
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    state=ocp.args.StandardSave(state),
                    meta=ocp.args.JsonSave(meta),
                ),
                metrics=None if validation_loss is None else {"validation_loss": validation_loss},
                force=True,
            )
        except Exception as error:
            raise self._save_error(error) from error

    def wait(self) -> None:
        """Wait until everything begun is on disk. Raises ``JllamaError`` if it could not be written."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error

    def restore(self, step: int, params: Params, state: Any) -> tuple[Params, Any, dict[str, Any]]:
        """The saved parameters, training state and metadata of a step, placed as the given shapes say.

        Raises:
            JllamaError: the files are damaged, or the arrays are not the ones expected; the message lists what differs.
        """
        with self._reading(step):
            self._check(step, "params", params)
            self._check(step, "state", state)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(params),
                    state=ocp.args.StandardRestore(state),
                    meta=ocp.args.JsonRestore(),
                ),
            )
        return restored["params"], restored["state"], restored["meta"]

    def restore_params(self, step: int, params: Params) -> Params:
        """The saved parameters alone; those with no sharding go to the first device. Raises as ``restore`` does."""
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first), params
        )
        with self._reading(step):
            self._check(step, "params", params)
            args = ocp.args.Composite(params=ocp.args.StandardRestore(params))
            return self._manager.restore(step, args=args)["params"]

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except JllamaError:
            raise
        except Exception as error:
            raise JllamaError(
                f"the checkpoint {self.folder / str(step)} cannot be read ({_reason(error)}): "
                f"put it back from a copy, or delete it to go on from an earlier one"
            ) from error

    def _check(self, step: int, item: str, expected: Any) -> None:
        found = _shapes(self._manager.item_metadata(step)[item].tree)
        wanted = _shapes(expected)
        differences = [
            f"{path} is {found.get(path, 'absent')} in the checkpoint but {wanted.get(path, 'absent')} in this model"
            for path in sorted(found.keys() | wanted.keys())
            if found.get(path) != wanted.get(path)
        ]
        if differences:
            raise JllamaError(f"the checkpoint {self.folder / str(step)} is of another model: {'; '.join(differences)}")

    def _save_error(self, error: Exception) -> JllamaError:
        kept = self.steps()
        last = f"the last good checkpoint is step {kept[-1]}" if kept else "there is no earlier checkpoint"
        return JllamaError(f"could not save a checkpoint in {self.folder} ({_reason(error)}); {last}")


def _reason(error: Exception) -> str:
    """An error of orbax or tensorstore in a few words; the latter tells the whole way there before the reason."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    system = re.search(r": ([^:]+) \[(?:os_error_code|tensorstore_spec)", reason)
    return system[1] if system else reason


def _validation_loss(metrics: dict[str, float]) -> float:
    return metrics["validation_loss"]


def _shapes(tree: Any) -> dict[str, str]:
    """``path -> dtype[shape]`` of every leaf, with tuples and named tuples told apart by position or name alone."""

    def name(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        "/".join(map(name, path)): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves if hasattr(leaf, "shape")
    }
