"""The mesh of devices and the processes, as options. Data only; nothing here imports JAX."""

import dataclasses

from jllama.core import UsageError, check_fields


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many ways to split the work; the product is the number of devices.

    Args:
        data: copies of the model, each with its share of the batch.
        fsdp: ways to split the parameters (and the batch); they are gathered where they are used.
        tensor: ways to split heads, feed-forward width and vocabulary.
        sequence: ways to split the tokens of each row, for long contexts.
        rules: mesh axes that split logical axes, in place of those in
            ``jllama.parallel.sharding.RULES``: ``{"mlp": ["tensor"]}``.
        expert: ways to split the experts of each layer (and the batch); devices exchange tokens.

    >>> dict(jllama.make_mesh(jllama.MeshConfig(data=-1), jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'expert': 1, 'sequence': 1, 'tensor': 1}
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    rules: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    expert: int = 1

    def __post_init__(self) -> None:
        if self.data == 0:
            vars(self)["data"] = -1  # runs of version 0.1 have 0
        sizes = {name: size for name, size in vars(self).items() if name != "rules"}
        num_derived = list(sizes.values()).count(-1)
        if num_derived > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            raise UsageError(
                f"the mesh {sizes} needs positive sizes; one may be -1, for all remaining devices"
            )


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The processes that train one model together.

    All get the same options, except that each has its own ``process_id``.

    Args:
        coordinator: ``HOST:PORT`` where process 0 listens; ``auto`` asks Cloud TPU, SLURM, Open MPI
            or Kubernetes.
        num_processes: number of processes.
        process_id: index of this process, from 0.
        timeout_s: seconds to wait until all processes have connected.
    """

    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0
    timeout_s: int = 300

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        has_address = bool(host) and port.isdigit()
        check_fields(
            self,
            "distributed.",
            "coordinator",
            lambda text: has_address or text in ("", "auto"),
            "HOST:PORT, auto or left out",
        )
        check_fields(
            self,
            "distributed.",
            "num_processes",
            lambda number: number >= 1 if has_address else number == 1,
            "at least 1" if has_address else "left out unless distributed.coordinator is HOST:PORT",
        )
        check_fields(
            self,
            "distributed.",
            "process_id",
            lambda index: 0 <= index < self.num_processes,
            f"from 0 to {self.num_processes - 1}",
        )
