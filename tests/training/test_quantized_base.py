"""Adapters of a base held in fewer bits, and steps that must leave everything as it was."""

import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tuning
from helpers import slow_but
from tuning import CONFIG, ONE_DEVICE, WEIGHTS, apart, conversations, digest

import jllama
from jllama import lora
from jllama.config import LlamaConfig, LoraConfig
from jllama.errors import UsageError
from jllama.functional.linear import DecodeMatrix
from jllama.tokenizers import BytesTokenizer
from jllama.training import opening
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.step import compile_training
from jllama.verify.checks import relative_error

ROWS = apart(conversations(0))
ERRORS = {"bfloat16": 2**-8, "int8": 0.02, "nf4": 0.15}
"""How far a base in these bits may be from what it holds, as a share of its size."""


def tuned(base, **options):
    loop = LoopConfig(dtype="float32", batch_size=8, seq_len=24, steps=20, **options)
    config = TrainConfig(
        CONFIG, init_from="WEIGHTS", training=loop, lora=LoraConfig(rank=4, base=base)
    )
    return config, compile_training(
        config, ONE_DEVICE, compiler_options={"xla_backend_optimization_level": 0}
    )


@pytest.mark.parametrize("base", slow_but(["nf4"], ERRORS))
def test_a_base_in_fewer_bits_is_computed_with_as_it_is(base):
    """It is near the weights, smaller, the same after steps, and a step's loss is that of what it
    stands for.
    """
    config, training = tuned(base)
    state = training.init(jax.random.key(0), jax.tree.map(np.copy, WEIGHTS))
    state = state._replace(
        params=jax.device_put(tuning.random_adapter("lora"), training.shardings.params)
    )
    before, plain = digest(state.base), jax.tree.map(jnp.zeros_like, state.params)
    whole = lora.merge(state.base, plain, CONFIG, config.lora)
    for name, stack in WEIGHTS["layers"].items():
        assert relative_error(whole["layers"][name], stack) < ERRORS[base]
        if base == "int8" and name.startswith("w"):
            assert isinstance(state.base["layers"][name], DecodeMatrix)
            assert state.base["layers"][name].values.dtype == np.int8
    if base == "nf4":
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.base["layers"]["wq"])} == {
            "uint4",
            "float32",
        }
    whole = lora.merge(state.base, state.params, CONFIG, config.lora)
    expected = tuning.compiled("full").evaluate(whole, ROWS)[:2]
    np.testing.assert_allclose(
        training.evaluate(state.params, ROWS, state.base)[:2], expected, rtol=1e-6
    )
    losses = []
    for _ in range(6):
        state, metrics = training.step(state, ROWS)
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses[0], expected[0] / expected[1], rtol=1e-6)
    assert losses[-1] < losses[0]
    assert digest(state.base) == before


@pytest.mark.parametrize("base", slow_but(["nf4"], ["int8", "nf4"]))
def test_a_run_reads_its_base_in_its_final_form(base, tmp_path, monkeypatch):
    """Its state is what ``init`` makes of whole weights, to the bit, and it trains, ends and
    merges.
    """
    tokenizer = BytesTokenizer()
    model = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    params = jllama.initial_params(jax.random.key(1), model)
    jllama.save(jllama.LanguageModel(model, params, tokenizer), tmp_path / "model", "hf")
    rows = np.random.default_rng(0).integers(3, 250, (8, 25))
    source = jllama.BatchSource(
        tokenizer,
        lambda: itertools.repeat(jllama.text_batch(rows, bos_id=1)),
        lambda: [jllama.text_batch(rows, bos_id=1)],
    )
    config = TrainConfig(
        LlamaConfig(),
        run_dir=str(tmp_path / "run"),
        init_from=str(tmp_path / "model"),
        lora=LoraConfig(rank=2, base=base),
        training=LoopConfig(dtype="float32", batch_size=8, seq_len=24, steps=2, sample_tokens=0),
    )
    states = []
    monkeypatch.setattr(
        opening, "log_facts", lambda run: states.append(jax.tree.map(np.asarray, run.state.base))
    )
    final = jllama.train(config, data=source)
    assert np.isfinite(final.validation_loss)
    whole = compile_training(dataclasses.replace(config, model=model), ONE_DEVICE).init(
        jax.random.key(0), params
    )
    jax.tree.map(np.testing.assert_array_equal, states[0], jax.tree.map(np.asarray, whole.base))
    assert np.isfinite(jllama.load(tmp_path / "run")(rows[:1, :8])).all()


def test_nf4_without_its_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UsageError, match=r"nf4, which needs .* pip install 'jllama\[nf4\]'"):
        tuned("nf4")


def test_targets_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(
        UsageError, match=r"lora.targets has q_proj; the matrices of a layer are wq, wk"
    ):
        lora.adapter_shapes(CONFIG, LoraConfig(rank=4, targets=("q_proj",)))
    with pytest.raises(UsageError, match=r"lora.rank is 4000; it must be at most"):
        lora.adapter_shapes(CONFIG, LoraConfig(rank=4000))
    with pytest.raises(UsageError, match="each once"):
        LoraConfig(rank=4, targets=())


@pytest.mark.parametrize("wrong", ["not finite", "a spike"])
def test_a_bad_step_leaves_all_as_it_was(wrong):
    """Parameters and moments keep every bit, the step is counted, and the next good one goes on."""
    _, training = tuned("auto", spike_factor=3.0)
    state = training.init(jax.random.key(0), jax.tree.map(np.copy, WEIGHTS))
    for _ in range(2):
        state, metrics = training.step(state, ROWS)
        assert not metrics.skipped
    if wrong == "a spike":
        state = state._replace(usual_norm=metrics.grad_norm / 4)
    else:
        state = state._replace(base=state.base | {"final_norm": state.base["final_norm"] * np.inf})
    stored = digest((state.params, state.opt_state)), float(state.usual_norm), int(state.step)
    state, metrics = training.step(state, ROWS)
    assert metrics.skipped
    assert (
        digest((state.params, state.opt_state)),
        float(state.usual_norm),
        int(state.step) - 1,
    ) == stored
    state = state._replace(usual_norm=jnp.float32(0.0))
    state = state._replace(base=state.base | {"final_norm": jnp.asarray(WEIGHTS["final_norm"])})
    state, metrics = training.step(state, ROWS)
    assert not metrics.skipped
    assert digest((state.params, state.opt_state)) != stored[0]
    assert float(state.usual_norm) == pytest.approx(float(metrics.grad_norm))
