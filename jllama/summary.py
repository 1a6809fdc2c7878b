"""A model's parameters, printed as a table."""

from __future__ import annotations

import math

from rich.table import Table

from jllama.config import LlamaConfig
from jllama.parameters import count_parameters, parameter_table, shape_of, training_flops_per_token


def summary_table(config: LlamaConfig) -> Table:
    """Every parameter with its axes, shape and count; the totals and the training cost of a token below."""
    table = Table(show_footer=True, footer_style="bold")
    table.add_column("parameter", footer="total")
    table.add_column(
        "axes", footer=f"{training_flops_per_token(config, config.max_seq_len):.3g} FLOPs per training token"
    )
    table.add_column("shape", justify="right", footer=f"{4 * count_parameters(config) / 2**20:,.1f} MiB in float32")
    table.add_column("count", justify="right", footer=f"{count_parameters(config):,}")
    for path, row in parameter_table(config).items():
        shape = shape_of(row, config)
        table.add_row(path, " ".join(row.axes), " x ".join(map(str, shape)), f"{math.prod(shape):,}")
    return table
