"""Models with experts in ``verify``: the ways to run them, mistakes by name, and close choices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equalities import SEQ, Case, cache_error, layouts_error, packed_error, ragged_error, ways_of
from equalities import remat_error as recomputed_error
from helpers import slow_but
from peer_server import TOKENIZER

import jllama
import jllama.models.build
from jllama.lab import layerwise
from jllama.lab.bisect import bisect
from jllama.lab.checkpoint import TOLERANCE as OF_LAYERS
from jllama.lab.checkpoint import verify_checkpoint
from jllama.lab.checks import TOLERANCE, VISIBLE, random_params, relative_error
from jllama.lab.conformance import VARIANTS, reference_logits
from jllama.lab.mistakes import _WRONG_MODELS, known_mistakes
from jllama.lab.mutations import MUTATIONS, model_with
from jllama.lab.precisions import PRECISIONS, WEIGHTS
from jllama.models import oracle
from jllama.models.decode_params import decode_layout

CONFIG = jllama.LlamaConfig(
    vocab_size=259,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=256,
    num_experts=5,
    experts_per_token=2,
    expert_dim=48,
    normalize_expert_weights=True,
)
CASES = {
    "two of five": {},
    # Normalized, one weight would be 1, and the router without a gradient.
    "one of many": {
        "num_experts": 40,
        "experts_per_token": 1,
        "normalize_expert_weights": False,
        "qk_norm": "head",
    },
    "not normalized": {
        "num_experts": 12,
        "experts_per_token": 3,
        "normalize_expert_weights": False,
        "qk_norm": "whole",
    },
}
JLLAMA = ways_of(jllama.models.build)


def case_of(name, implementation=JLLAMA):
    config = dataclasses.replace(CONFIG, **CASES[name])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (SEQ, SEQ))
    return Case(implementation, config, random_params(config, 0, embed_std=0.1), tokens)


# The variants


def test_no_choice_of_a_variant_is_within_rounding(monkeypatch):
    """Float32 moves a logit by some 1e-6: the margin between the last expert and the next."""
    margins = []
    right = oracle.experts

    def experts(x, router, *others, **options):
        count = others[3]
        logits = np.sort(x @ router, axis=1)
        margins.append(float(np.min(logits[:, -count] - logits[:, -count - 1])))
        return right(x, router, *others, **options)

    monkeypatch.setattr(oracle, "experts", experts)
    names = [name for name, config in VARIANTS.items() if config.num_experts]
    for name in names:
        reference_logits.__wrapped__(VARIANTS[name])
    assert len(names) == 4
    assert len(margins) >= 2 * len(names)
    assert min(margins) > 2e-5


# The ways to run a model

_SPLITS = [(SEQ, np.arange(1, SEQ + 1)), *[(1, 1)] * SEQ]
_LENGTHS = np.random.default_rng(1).permutation(SEQ)
_SEGMENTS = np.sort(np.random.default_rng(2).integers(0, 4, (SEQ, SEQ)))
WAYS = {
    "prefill and decode": lambda case: cache_error(case, _SPLITS),
    "chunks": lambda case: cache_error(case, [(5, 5)] * SEQ),
    "ragged": lambda case: ragged_error(case, _LENGTHS),
    "packed": lambda case: packed_error(case, _SEGMENTS),
    "scanned": layouts_error,
    "loss": lambda case: recomputed_error(case, 0),
    "gradients": lambda case: recomputed_error(case, 1),
}


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but([("two of five", "packed")], [(name, way) for name in CASES for way in WAYS]),
)
def test_ways_of_running_a_model_agree(name, way):
    assert WAYS[way](case_of(name)) < TOLERANCE


@pytest.mark.parametrize("name", slow_but(["one of many"], CASES))
def test_int8_for_decoding_is_the_precision_of_that_name(name):
    """It keeps the router: a rounded one chooses others."""
    case = case_of(name)
    params = decode_layout(jax.tree.map(jnp.asarray, case.params), case.config, "int8")
    logits = JLLAMA.forward(case.config, params, jnp.asarray(case.tokens))
    _, rounded = PRECISIONS["int8"].misread(case.config, case.params)
    assert rounded["layers"]["router"] is case.params["layers"]["router"]
    assert relative_error(logits, oracle.forward(rounded, case.tokens, case.config)) < TOLERANCE
    assert relative_error(logits, case.forward()) > VISIBLE * TOLERANCE
    _, in_bfloat16 = WEIGHTS["bfloat16"](case.config, case.params)
    for name in ("router", "experts_down"):
        weights = case.params["layers"][name]
        assert 0 < relative_error(in_bfloat16["layers"][name], weights) < 2**-8


def test_products_of_8_bits_are_those_of_experts_too():
    case = case_of("two of five")
    rounded = case._replace(implementation=ways_of(PRECISIONS["int8-products"].model)).forward()
    others = _silent(case.params)
    silent = case._replace(params=others)
    of_attention = silent._replace(implementation=ways_of(PRECISIONS["int8-products"].model))
    whole = relative_error(rounded, case.forward())
    assert whole > 2 * relative_error(of_attention.forward(), silent.forward()) > 0


def _silent(params):
    """Parameters whose experts add nothing."""
    down = np.zeros_like(params["layers"]["experts_down"])
    return params | {"layers": params["layers"] | {"experts_down": down}}


# Mistakes


def functions_of_experts():
    """The parts of a model that ``model_with`` replaces reach the experts."""
    return {
        "silu_gate": lambda gate, up: up,
        "route": lambda logits, count, *others: (
            jnp.ones((len(logits), count)),
            jnp.zeros((len(logits), count), int),
        ),
    }


@pytest.mark.parametrize("name", functions_of_experts())
def test_experts_call_replaced_functions(name):
    case = case_of("two of five")
    copy = model_with(**{name: functions_of_experts()[name]})
    wrong = case._replace(implementation=ways_of(copy))
    assert wrong._replace(implementation=ways_of(model_with())).forward() == pytest.approx(
        case.forward(), abs=1e-5
    )
    assert relative_error(wrong.forward(), case.forward()) > 0.01
    silent = wrong._replace(params=_silent(case.params))
    expected = case._replace(params=silent.params).forward()
    assert relative_error(silent.forward(), expected) < TOLERANCE


def test_mistakes_with_experts_have_names():
    names = {}
    for name in CASES:
        model = jllama.LanguageModel(*case_of(name)[1:3])
        names[name] = {mistake.about for mistake in known_mistakes(model, 300)}
    assert "experts_per_token 1 for 2" in names["two of five"]
    assert "experts_per_token 3 for 2" in names["two of five"]
    assert "normalize_expert_weights false for true" in names["two of five"]
    assert not any("experts_per_token 0" in about for about in names["one of many"])
    assert "normalize_expert_weights true for false" in names["not normalized"]
    without = {"num_experts": 0, "experts_per_token": 0, "expert_dim": 0}
    dense = dataclasses.replace(CONFIG, **without, normalize_expert_weights=False)
    model = jllama.LanguageModel(dense, random_params(dense, 0))
    assert not [one.about for one in known_mistakes(model, 300) if "expert" in one.about]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with experts in a folder."""
    folder = tmp_path_factory.mktemp("experts") / "hf"
    params = random_params(CONFIG, 0, embed_std=0.3)
    model = jllama.LanguageModel(CONFIG, params, TOKENIZER, None, (TOKENIZER.eos_id,))
    jllama.save(model, folder, "hf")
    return folder, params


def with_fields(**fields):
    return jllama.models.build, dataclasses.replace(CONFIG, **fields)


def with_model(model):
    return model, CONFIG


PLANTED = {
    "experts_per_token 1 for 2": with_fields(experts_per_token=1),
    "normalize_expert_weights false for true": with_fields(normalize_expert_weights=False),
    "GELU, not SiLU": with_model(_WRONG_MODELS["GELU, not SiLU"]),
    "residuals of normalized inputs": with_model(_WRONG_MODELS["residuals of normalized inputs"]),
} | {
    mutation.about: with_model(mutation.model)
    for mutation in MUTATIONS
    if mutation.name in ("gate for up", "bfloat16 router", "post-norm")
}


def on_padded(logits):
    """A function of rows of any length that is compiled once: what follows a token is not seen."""
    compiled = jax.jit(logits)
    size = CONFIG.max_seq_len
    return lambda ids: compiled(np.pad(ids, (0, size - len(ids)))[None])[0, : len(ids)]


@pytest.fixture
def few_mistakes(monkeypatch):
    """Try those that are planted here, as each is a program."""
    monkeypatch.setattr(
        "jllama.lab.judge.known_mistakes",
        lambda *model: [one for one in known_mistakes(*model) if one.about in PLANTED],
    )


@pytest.mark.parametrize("name", slow_but(["experts chosen by logits in bfloat16"], PLANTED))
@pytest.mark.usefixtures("few_mistakes")
def test_a_planted_mistake_is_named(saved, name):
    folder, params = saved
    module, config = PLANTED[name]
    wrong = module.build_model(config, jax.tree.map(jnp.asarray, params))
    found = jllama.check_model(on_padded(wrong), folder)
    assert f"; with {name} our logits agree with it to" in found.verdict, found


# A checkpoint, and two of them


def test_a_checkpoint_with_experts_passes(saved):
    result = verify_checkpoint(saved[0])
    assert result.passed, result.problems
    assert max(result.layer_errors) < OF_LAYERS / 5


@pytest.mark.parametrize("num_wrong", [4, 5])
def test_few_tokens_may_have_other_experts(saved, monkeypatch, num_wrong):
    """One of 64 tokens may: 4 of 255; numbers that are none are no choice."""
    right = layerwise._layer

    def wrong(*arguments):
        outputs = np.array(right(*arguments))
        outputs[:, 10 : 10 + num_wrong] += 0.1
        return outputs

    monkeypatch.setattr(layerwise, "_layer", wrong)
    result = verify_checkpoint(saved[0])
    assert result.num_tokens == 256
    assert result.passed == (num_wrong == 4)
    monkeypatch.setattr(
        layerwise, "_layer", lambda *arguments: right(*arguments).at[:, 9].set(np.nan)
    )
    assert not verify_checkpoint(saved[0]).passed


@pytest.mark.parametrize("place", ["wo", "experts_up", "router"])
def test_two_checkpoints_differ_first_in(saved, tmp_path, place):
    """The half of a layer that holds the difference is named, and not the other one."""
    folder, params = saved
    changed = jax.tree.map(np.copy, params)
    changed["layers"][place][1] *= 1.01
    jllama.save(jllama.LanguageModel(CONFIG, changed, TOKENIZER), tmp_path / "hf", "hf")
    result = bisect(folder, tmp_path / "hf", tolerance=1e-4)
    assert result.first[:2] == ("weights", f"layers/1/{place}")
    over = [
        one.name for one in result.compared if one.part == "activations" and result.is_over(one)
    ]
    assert over == [f"layers/1/{'attention' if place == 'wo' else 'feed_forward'}"]
