"""Twenty steps against torch: transformers' models, PEFT's adapters, AdamW, the same rows, and so
the same losses.
"""

import pytest
import tuning
from helpers import slow_but
from helpers_torch import their_losses, their_tuning
from tuning import KINDS, OPTIMIZER, STEPS, apart, conversations, packed

from jllama.verify.checks import relative_error

TOLERANCE = 1e-5


def compare_losses(kind, arranged, architecture="llama"):
    """Compare the losses of twenty steps; return by how much they fall."""
    batches = [arranged(conversations(step % 5)) for step in range(STEPS)]
    training = tuning.compiled(kind)
    state, actual, clipped = tuning.begun(kind, training), [], 0
    for rows in batches:
        state, metrics = training.step(state, rows)
        actual.append(float(metrics.loss))
        clipped += bool(metrics.grad_norm > OPTIMIZER.clip_norm)
    expected = their_losses(their_tuning(kind, architecture), batches)
    assert clipped > 10
    assert max(map(relative_error, actual, expected)) < TOLERANCE
    return actual[0] - actual[-1]


QUICK = {("lora", packed), ("full", apart)}


@pytest.mark.parametrize(
    ("kind", "arranged"),
    [
        pytest.param(kind, arranged, marks=[] if (kind, arranged) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for arranged in (packed, apart)
    ],
)
def test_twenty_steps_have_torchs_losses(kind, arranged):
    assert compare_losses(kind, arranged) > 0.5


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(["qwen3"], ["mistral", "qwen2", "qwen3", "olmo2"]))
def test_twenty_steps_of_other_families_have_torchs_losses(name, kind):
    """Mistral's window is shorter than the rows."""
    with tuning.family(name):
        assert compare_losses(kind, apart, name) > 0.1
