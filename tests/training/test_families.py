"""Every family's model is trained and tuned: losses and gradients against the float64 oracle."""

import jax
import numpy as np
import pytest
import tuning
from helpers import slow_but
from models import FAMILIES, family_weights

from jllama import lora
from jllama.config import LoraConfig
from jllama.verify.checks import relative_error

ALL = "all at once"
LOSS, SLOPE = 1e-6, 1e-5
"""The largest relative errors, as of a Llama."""


class Selection(list):
    """A list that a cache takes."""

    def __hash__(self):
        return hash(tuple(self))


def assert_right(name, kind, options=(), loss=tuning.answers_loss, rows=None):
    """Loss and gradient of a first step on packed rows are the oracle's."""
    with tuning.family(name):
        if rows is None:
            rows = tuning.packed(tuning.conversations(0))
        errors = tuning.first_errors(kind, rows, tuning.compiled(kind, **dict(options)), loss)
    assert errors[0] < LOSS
    assert errors[1] < SLOPE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == ALL else pytest.mark.slow)
        for name in FAMILIES
        if name != "llama"
    ],
)
def test_loss_and_gradient_are_the_oracles(name):
    assert_right(name, "full")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("lora", {"accumulation": 4, "remat": "block"}, marks=pytest.mark.slow),
        ("dora", {"remat": "none"}),
    ],
)
def test_so_are_those_of_adapters_beside_biases_and_norms(kind, options):
    assert_right(ALL, kind, options)


@pytest.mark.parametrize("base", slow_but(["int8"], ["int8", "nf4"]))
def test_a_base_in_fewer_bits_keeps_its_biases_and_norms(base, monkeypatch):
    """A step's loss is the oracle's of what the base stands for."""
    monkeypatch.setitem(tuning.KINDS, base, LoraConfig(rank=4, alpha=6.0, base=base))
    with tuning.family(ALL):
        rows = tuning.packed(tuning.conversations(0))
        training = tuning.compiled(base)
        state = tuning.begun(base, training)
        whole = lora.merge(state.base, state.params, FAMILIES[ALL], tuning.KINDS[base])
        whole = jax.tree.map(np.asarray, whole)
        _, metrics = training.step(state, rows)
        assert relative_error(metrics.loss, tuning.answers_loss(whole, rows)) < LOSS
    for name in ("bq", "bk", "bv", "q_norm_whole", "k_norm_whole", "attn_out_norm"):
        np.testing.assert_array_equal(whole["layers"][name], family_weights(ALL)["layers"][name])


def test_preferences_are_learned_by_the_oracles_gradient():
    with tuning.family(ALL):
        pairs = tuning.apart(tuning.conversations(0, 6))
    pairs = pairs._replace(reference=np.linspace(-30, -20, 8, dtype=np.float32))
    assert_right(ALL, "lora", loss=tuning.preference_loss, rows=pairs)


def test_a_selection_of_biases_and_norms_moves_alone():
    selected = Selection(["layers/[1-9]/bq", "layers/*/q_norm_whole"])
    with tuning.family(ALL):
        training = tuning.compiled("full", trainable=selected)
        state, _ = training.step(
            tuning.begun("full", training), tuning.packed(tuning.conversations(0))
        )
    moves = {"bq": [False, True, True, True], "q_norm_whole": [True] * 4}
    for name, stack in family_weights(ALL)["layers"].items():
        has_moved = [
            bool((new != old).all())
            for new, old in zip(state.params["layers"][name], stack, strict=True)
        ]
        assert has_moved == moves.get(name, [False] * 4), name
    for name in ("embed", "final_norm", "lm_head"):
        np.testing.assert_array_equal(state.params[name], family_weights(ALL)[name])
