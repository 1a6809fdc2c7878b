"""How the work is split over devices, as data."""

from __future__ import annotations

import dataclasses

from jllama.errors import UsageError


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many ways to split the work; the product is the number of devices.

    Args:
        data: copies of the model, each with its share of the batch; 0 takes all devices left over.
        fsdp: ways to split the parameters (and the batch), gathered where they are used.
        tensor: ways to split heads, feed-forward width and vocabulary.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.data < 0 or self.fsdp < 1 or self.tensor < 1:
            raise UsageError(
                f"the mesh {dataclasses.asdict(self)} needs positive sizes (data may be 0: all that is left)"
            )
