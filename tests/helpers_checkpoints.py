"""Checkpoints that are not on disk, small configurations, and the sentence of an error."""

import json

import jax
import pytest
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.formats.tensors import Checkpoint, TensorsOfParams


def opened(config, params, **others):
    return Checkpoint(config, TensorsOfParams(config, params), **others)


def in_dtype(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def message(function, *arguments):
    """The one sentence of the error that a call raises."""
    with pytest.raises(JllamaError) as error:
        function(*arguments)
    text = str(error.value)
    assert type(error.value) is JllamaError, "a file's fault is not the command line's"
    assert "\n" not in text
    return text


def change(folder, file="config.json", **changed):
    """Set fields of a JSON file; ``...`` removes one."""
    fields = json.loads((folder / file).read_text()) | changed
    fields = {key: value for key, value in fields.items() if value is not ...}
    (folder / file).write_text(json.dumps(fields))


@st.composite
def small_configs(draw, has_head_dim=True, **options):
    """A few numbers in each tensor; strategies of other fields are ``options``."""
    kv_heads, group, half = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
    )
    width = 2 * half * kv_heads * group
    return LlamaConfig(
        vocab_size=draw(st.integers(1, 9)),
        num_layers=draw(st.integers(1, 3)),
        embed_dim=draw(st.integers(1, 7)) if has_head_dim else width,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * half,
        mlp_dim=draw(st.integers(1, 9)),
        tie_embeddings=draw(st.booleans()),
        **{name: draw(values) for name, values in options.items()},
    )
