"""Adapters: made for their base alone, read and written in every format, merged as they are unmerged."""

import jax.numpy as jnp
import numpy as np
import pytest
from models import FILE, weights

from jllama.checkpoints.registry import convert, open_checkpoint, save
from jllama.checkpoints.tensors import base_fingerprint, is_same_base
from jllama.language_model import LanguageModel
from jllama.parameters import map_by_path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of float32 numbers that bfloat16 holds, as most released models are."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    rounded = map_by_path(lambda _, leaf: np.float32(leaf.astype(jnp.bfloat16)), weights(FILE))
    save(LanguageModel(FILE, rounded), folder, "hf")
    return folder


def fingerprint_as(source, target, to, dtype=None):
    convert(source, target, to, dtype)
    return base_fingerprint(open_checkpoint(target))


def test_a_base_has_one_fingerprint_in_every_format_and_dtype(base, tmp_path):
    expected = base_fingerprint(open_checkpoint(base))
    assert len(expected) == 129
    for to, dtype in [("orbax", None), ("gguf", None), ("llama2c", None), ("meta", None), ("gguf", "bfloat16")]:
        assert fingerprint_as(base, tmp_path / f"{to}-{dtype}", to, dtype) == expected
    for dtype in ("float16", "q8_0"):  # rounded: the norms are left
        assert fingerprint_as(base, tmp_path / f"{dtype}.gguf", "gguf", dtype) == expected.split(":")[0]


@pytest.mark.parametrize("changed", ["layers/mlp_norm", "layers/wv", "embed"])
def test_another_base_has_another_fingerprint(base, tmp_path, changed):
    one = base_fingerprint(open_checkpoint(base))
    factor = {changed: np.float32(1.25)}
    other = map_by_path(lambda path, leaf: leaf * factor.get(path, np.float32(1)), weights(FILE))
    save(LanguageModel(FILE, other), tmp_path / "other", "hf")
    two = base_fingerprint(open_checkpoint(tmp_path / "other"))
    assert not is_same_base(one, two)
    assert is_same_base(one.split(":")[0], two) == (changed != "layers/mlp_norm")
