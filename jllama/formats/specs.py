"""The tensors of a model's file, derived from the table of parameters."""

from typing import NamedTuple

import numpy as np

from jllama.core.config import LlamaConfig
from jllama.core.parameters import (
    NamedFormat,
    Parameter,
    flatten_matrix,
    inputs_first,
    matrix_shape,
    parameter_table,
)


class TensorSpec(NamedTuple):
    """A tensor of a file: a parameter outside the layers, or one layer of a parameter."""

    key: str  # path among unstacked parameters, such as embed or layers/3/wq
    path: str  # path in the table, such as embed or layers/wq
    parameter: Parameter
    layer: int  # 0 outside the layers
    shape: tuple[int, ...]  # ``matrix_shape``, the same in every file format

    @property
    def joined_key(self) -> str:
        """The path, among unstacked parameters, of the joined matrix; if there is none, ``key``."""
        joined = self.parameter.joined
        return f"layers/{self.layer}/{joined}" if joined else self.key

    def name(self, file_format: NamedFormat) -> str:
        """Return the tensor's name in files of a format."""
        return self.parameter.name(file_format, self.layer)


def tensor_specs(config: LlamaConfig) -> list[TensorSpec]:
    """Return all tensors of a model's file: the embedding, layer by layer, then the others."""
    table = parameter_table(config)
    stacked = [path for path in table if path.startswith("layers/")]
    first, *last = (path for path in table if path not in stacked)
    places = [(first, 0)]
    for layer in range(config.num_layers):
        places += [(path, layer) for path in stacked]
    places += [(path, 0) for path in last]
    specs = []
    for path, layer in places:
        row = table[path]
        key = path.replace("/", f"/{layer}/")
        specs.append(TensorSpec(key, path, row, layer, matrix_shape(row, config)))
    return specs


def as_matrix(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """Return a view of one layer (or a part of it) as ``[outputs, inputs]``, or flat for a norm."""
    if not parameter.inputs:
        return array.reshape(-1)
    matrix = flatten_matrix(parameter, array)
    return matrix.T if inputs_first(parameter) else matrix
