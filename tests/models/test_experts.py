"""Experts: their choice, sums and gradients, beside the float64 reference and transformers."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from helpers import run_on_eight_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from models import SERVED
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import jllama
from jllama.commands import cli
from jllama.core import UsageError, ops
from jllama.core.parameters import (
    PARAMETERS,
    count_parameters,
    layers_of,
    parameter_table,
    shape_of,
)
from jllama.core.step import Batch
from jllama.formats.registry import open_checkpoint
from jllama.formats.tensors import load_params
from jllama.formats.upcycling import upcycle
from jllama.kernels.experts import grouped_product
from jllama.lab.checks import TOLERANCE, random_params
from jllama.models import capture, oracle
from jllama.models.capture import decoded_experts
from jllama.parallel.sharding import check_divides
from jllama.parallel.shards import AXES
from jllama.tokenizers.base import BytesTokenizer
from jllama.training.config import TrainConfig
from jllama.training.metrics import training_flops_per_token
from jllama.training.optimizer import OPTIMIZERS
from jllama.training.resolve import _with_model

SMALL = jllama.LlamaConfig(
    61,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
    num_experts=5,
    experts_per_token=2,
    expert_dim=24,
)
CASES = {
    "two of five": {},
    "normalized": {"normalize_expert_weights": True},
    "one": {"experts_per_token": 1},
    "all": {"experts_per_token": 5, "normalize_expert_weights": True},
    "more experts than rows": {"num_experts": 40},
}


def config_of(case):
    return dataclasses.replace(SMALL, **CASES[case])


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_choice(data):
    """Of equal logits the first experts are chosen."""
    num_experts = data.draw(st.integers(1, 8))
    count = data.draw(st.integers(1, num_experts))
    logits = data.draw(
        st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=num_experts, max_size=num_experts)
    )
    for normalize in (False, True):
        weights, chosen = ops.route(jnp.array([logits]), count, normalize)
        expected = oracle.softmax(np.array(logits))
        order = sorted(range(num_experts), key=lambda expert: (-logits[expert], expert))[:count]
        assert chosen[0].tolist() == order
        total = expected[order].sum() if normalize else 1.0
        np.testing.assert_allclose(weights[0], expected[order] / total, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(2, 13), (1, 1)])
def test_logits_are_those_of_the_reference(case, shape):
    config = config_of(case)
    params = random_params(config, 0)
    tokens = np.random.default_rng(1).integers(0, 61, shape)
    expected = oracle.forward(params, tokens, config)
    params = jax.tree.map(jnp.asarray, params)
    for layout in (params, jllama.decode_layout(params, config)):
        llama = jllama.build_model(config, layout)
        np.testing.assert_allclose(llama(tokens), expected, atol=1e-5)


def test_all_tokens_choose_the_same_experts():
    """The others get no token."""
    config = config_of("normalized")
    params = random_params(config, 0)
    params["layers"]["router"][:] = 0  # equal logits: the first two
    tokens = np.random.default_rng(1).integers(0, 61, (2, 13))
    llama = jllama.build_model(config, jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(llama(tokens), oracle.forward(params, tokens, config), atol=1e-5)


def peers():
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    experts = {"num_experts_per_tok": 2, "intermediate_size": 24}
    mixtral = MixtralConfig(**sizes, **experts, num_local_experts=5)
    qwen = Qwen3MoeConfig(
        **sizes | experts, num_experts=6, moe_intermediate_size=20, head_dim=12, norm_topk_prob=True
    )
    olmoe = OlmoeConfig(**sizes, **experts, num_experts=5)
    return {
        "mixtral": (MixtralForCausalLM, mixtral),
        "qwen3_moe": (Qwen3MoeForCausalLM, qwen),
        "olmoe": (OlmoeForCausalLM, olmoe),
    }


@pytest.fixture(scope="module", params=peers())
def peer(request, tmp_path_factory):
    """A model of transformers with random weights that matter, in float64, and its folder."""
    torch.manual_seed(0)
    kind, config = peers()[request.param]
    model = kind._from_config(config, experts_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("peer") / request.param
    model.save_pretrained(folder)
    return model, folder


TOKENS = np.random.default_rng(2).integers(0, 61, (2, 17))


def test_a_folder_of_transformers_is_read_and_written(peer, tmp_path):
    theirs, folder = peer
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    model = jllama.load(folder, "float32")
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)
    for format, target in (("hf", "hf"), ("gguf", "model.gguf"), ("orbax", "run")):
        jllama.save(model, tmp_path / target, format)
        copy = jllama.load(tmp_path / target)
        np.testing.assert_allclose(copy(TOKENS), model(TOKENS), atol=1e-6)
        if format != "gguf":
            assert copy.config == model.config
    again = type(theirs).from_pretrained(tmp_path / "hf", experts_implementation="eager").double()
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(TOKENS)).logits, expected, atol=1e-5)


def test_gradients_are_those_of_torch(peer):
    theirs, folder = peer
    targets = torch.tensor(TOKENS[:, 1:])
    theirs.zero_grad()
    logits = theirs(torch.tensor(TOKENS[:, :-1])).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 61), targets.reshape(-1)).backward()
    model = jllama.load(folder, "float32", layout="training")

    def loss(params):
        logits = jllama.build_model(model.config, params)(TOKENS[:, :-1])
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, jnp.array(TOKENS[:, 1:])[..., None], 2).mean()

    gradients = jax.grad(loss)(model.params)
    router = theirs.model.layers[1].mlp.gate.weight.grad.numpy().T
    np.testing.assert_allclose(gradients["layers"]["router"][1], router, atol=1e-6)
    down = theirs.model.layers[0].mlp.experts.down_proj.grad.numpy()
    np.testing.assert_allclose(gradients["layers"]["experts_down"][0], down, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "experts_per_token is set without num_experts: set both"),
        ({"experts_per_token": 6}, "experts_per_token is 6; it must be at most num_experts, 5"),
    ],
)
def test_configurations_that_make_no_sense(changes, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_balanced_routes_have_the_gradients_of_two_more_losses():
    """Written out, with shares that have no gradient."""
    rng = np.random.default_rng(3)
    logits = jnp.array(rng.normal(size=(7, 5)), jnp.float32)
    counted = jnp.array([1, 1, 0, 1, 1, 1, 0], bool)
    pull = jnp.array(rng.normal(size=(7, 2)), jnp.float32)
    options = {"counted": counted, "balance": 0.3, "z_loss": 0.2}

    def short(logits):
        weights, _ = ops.balanced_route(logits, 2, True, **options)
        return (weights * pull).sum()

    def written_out(logits):
        weights, chosen = ops.route(logits, 2, True)
        probs = jax.nn.softmax(logits)
        loads = jnp.array([((chosen == expert) * counted[:, None]).sum() for expert in range(5)])
        share = loads / loads.sum()
        balance = 0.3 * 5 * (counted[:, None] * probs * share).sum()
        z_loss = 0.2 * (counted * jax.nn.logsumexp(logits, axis=1) ** 2).sum()
        return (weights * pull).sum() + balance + z_loss

    np.testing.assert_allclose(jax.grad(short)(logits), jax.grad(written_out)(logits), atol=1e-6)
    for actual, expected in zip(
        ops.balanced_route(logits, 2, True, **options), ops.route(logits, 2, True), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [
        (700, [0, 300, 0, 150, 250]),  # experts without a row
        (700, [0, 300, 0, 100, 20]),  # rows of nobody
        (40, [40, 0, 0]),  # all to one
        (1, [0, 0, 1, 0]),
        (300, [0, 0, 0]),
    ],
)
def test_grouped_products_of_each_platform(platform, num_rows, sizes):
    """With their gradients. All of them run on a CPU, too."""
    rng = np.random.default_rng(0)
    x = jnp.array(rng.normal(size=(num_rows, 24)), jnp.float32)
    matrices = jnp.array(rng.normal(size=(len(sizes), 16, 24)), jnp.float32)
    of_somebody = (np.arange(num_rows) < sum(sizes))[:, None]
    experts = np.repeat(np.arange(len(sizes)), sizes)

    def written_out(x, matrices):
        return jnp.einsum("ri,roi->ro", x[: len(experts)], matrices[experts])

    def grouped(x, matrices):
        product = grouped_product(platform, x, matrices, jnp.array(sizes))
        return jnp.where(of_somebody, product, 0)

    expected = np.zeros((num_rows, 16))
    expected[: len(experts)] = written_out(x, matrices)
    np.testing.assert_allclose(jax.jit(grouped)(x, matrices), expected, atol=2e-5)
    gradients = (
        jax.grad(lambda *arguments, of=of: jnp.sin(of(*arguments)).sum(), (0, 1))(x, matrices)
        for of in (grouped, written_out)
    )
    for actual, exact in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, exact, atol=1e-4)


def test_captured_experts_are_those_of_the_reference():
    config = config_of("normalized")
    params = random_params(config, 0)
    model = jllama.LanguageModel(config, jax.tree.map(jnp.asarray, params))
    names = ["layers/0", "layers/1/attention", "layers/1/experts"]
    before, attended, chosen = map(np.asarray, model.capture(TOKENS, names).values())
    assert chosen.shape == (2, 17, 2)
    layer = {name: stack[1] for name, stack in params["layers"].items()}
    hidden = oracle.rms_norm(before + attended, layer["mlp_norm"], config.norm_eps)
    expected = np.argsort(-(hidden @ layer["router"]), axis=-1)[..., :2]
    np.testing.assert_array_equal(chosen, expected)


def test_only_a_model_with_experts_has_them_captured():
    model = jllama.LanguageModel(SERVED, random_params(SERVED, 0))
    with pytest.raises(UsageError, match="there is no activation layers/0/experts"):
        model.capture([[1, 2]], ["layers/0/experts"])


LLAMA_4 = {
    "num_layers": 4,
    "experts_per_token": 1,
    "router": "sigmoid",
    "shared_expert": True,
    "dense_layers": (0, 2),
    "no_rope_layers": (3,),
    "attention_chunk": 60,
    "temperature_step": 50,
}


@pytest.mark.parametrize("changes", [CASES["normalized"], LLAMA_4], ids=["mixtral", "llama4"])
def test_decoding_chooses_the_experts_of_whole_sequences(changes):
    """For 2,000 tokens one after the other, as a trainer's program does for all of them at once."""
    config = dataclasses.replace(SMALL, max_seq_len=256, **changes)
    model = jllama.LanguageModel(config, jax.tree.map(jnp.asarray, random_params(config, 0)))
    tokens = np.random.default_rng(5).integers(0, 61, (8, 250))
    layers = layers_of(PARAMETERS["layers/router"], config)
    names = [f"layers/{layer}/experts" for layer in layers]
    expected = np.stack([*model.capture(tokens, names).values()])
    by_step = decoded_experts(config, model.decode_params, jnp.asarray(tokens))
    np.testing.assert_array_equal(by_step, expected)


def test_sizes_that_are_left_out():
    config = jllama.LlamaConfig(61, num_layers=1, embed_dim=32, num_heads=4, num_experts=4)
    assert (config.experts_per_token, config.expert_dim) == (2, config.mlp_dim)
    assert jllama.LlamaConfig(61, num_experts=1).experts_per_token == 1


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12_879_925_248),
        ("qwen3-30b-a3b", 3_353_032_704),
        ("llama4-scout", 17_172_894_720),
        ("llama4-maverick", 17_184_691_200),
    ],
)
def test_active_parameters(name, active):
    """A token meets its own experts, and all other matrices; an embedding counts whole."""
    config = jllama.preset(name)
    assert count_parameters(config, active=True) == active
    once = training_flops_per_token(config, 0) / 6
    assert once == active - config.vocab_size * config.embed_dim - norm_sizes(config)


def norm_sizes(config):
    return sum(
        math.prod(shape_of(row, config))
        for row in parameter_table(config).values()
        if row.role == "scale"
    )


@pytest.fixture(scope="module")
def report():
    return run_on_eight_devices("experts_on_eight_devices.py")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=8 of experts",
        "expert=8 of experts",
        "expert=2 fsdp=2 tensor=2 of experts",
        "data=2 expert=4 of experts",
        "expert=4 sequence=2 of experts",
        "fsdp=8 of Llama 4",
        "expert=2 fsdp=2 tensor=2 of Llama 4",
        "data=2 expert=4 of Llama 4",
    ],
)
def test_a_mesh_computes_trains_and_answers_as_one_device_does(report, mesh):
    assert report[mesh]["loaded_error"] == 0
    assert report[mesh]["error"] < TOLERANCE
    assert report[mesh]["training_error"] < TOLERANCE
    assert report[mesh]["answers_are_equal"]
    assert report[mesh]["adapters_error"] < TOLERANCE


def test_experts_that_do_not_divide():
    with pytest.raises(UsageError, match=r"mesh.expert is 2, which does not divide the model's 5 "):
        check_divides(AbstractMesh((1, 1, 2, 1, 1), AXES), SMALL)


def train(folder, *options):
    arguments = ["--data.path", str(folder / "text.txt"), "--run_dir", str(folder / "run")]
    arguments += ["--training.seq_len", "16", "--training.sample_tokens", "0"]
    return cli.run("train", [*arguments, *options])


def test_a_run_logs_how_experts_share_the_tokens(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    sizes = ["--model.num_layers", "1", "--model.embed_dim", "32", "--model.num_heads", "2"]
    sizes += ["--model.num_experts", "4", "--model.max_seq_len", "32", "--training.steps", "2"]
    assert train(tmp_path, *sizes, "--data.tokenizer", "bytes", "--training.batch_size", "2") == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "expert_shares" in line]
    assert len(line["expert_shares"]) == 4
    assert sum(line["expert_shares"]) == pytest.approx(1, abs=1e-3)
    assert 0 < line["expert_entropy"] <= 1
    model = jllama.load(tmp_path / "run", "float32")
    assert model.config.num_experts == 4


def test_a_run_with_rewards_logs_how_many_experts_differ_when_it_samples(tmp_path, monkeypatch):
    """Of the answers' tokens, and in any layer."""
    config = dataclasses.replace(config_of("normalized"), vocab_size=259)
    model = jllama.LanguageModel(config, random_params(config, 0), BytesTokenizer())
    jllama.save(model, tmp_path / "base", "hf")
    prompts = [json.dumps({"prompt": f"to be {number}"}) for number in range(9)]
    (tmp_path / "text.jsonl").write_text("\n".join(prompts))
    arguments = ["--data.path", str(tmp_path / "text.jsonl"), "--init_from", str(tmp_path / "base")]
    arguments += ["--reward", "length:4", "--training.steps", "2"]
    arguments += ["--training.seq_len", "16", "--training.grpo.max_answer_tokens", "4"]
    arguments += [
        "--training.grpo.mask_overlong",
        "false",
        "--training.grpo.group_size",
        "2",
        "--training.batch_size",
        "4",
    ]
    cases = {
        "equal": ((), 0),
        "one layer": ((0,), 1),
        "in prompts": ((slice(None), slice(None), slice(0, 5)), 0),
    }
    for name, (where, share) in cases.items():

        def changed(*arguments, where=where):
            chosen = np.array(decoded_experts(*arguments))
            if where:
                chosen[where] = 5
            return jnp.asarray(chosen)

        monkeypatch.setattr(capture, "decoded_experts", changed)
        assert cli.run("train", [*arguments, "--run_dir", str(tmp_path / name)]) == 0
        metrics = (tmp_path / name / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in metrics.splitlines()]
        (line,) = [line for line in lines if "experts_differ" in line]
        assert line["experts_differ"] == share


@pytest.fixture
def dense(tmp_path):
    params = random_params(SERVED, 0)
    jllama.save(jllama.LanguageModel(SERVED, params, BytesTokenizer()), tmp_path / "dense", "hf")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    return tmp_path


def test_a_dense_checkpoint_begins_a_model_with_experts(dense):
    """It computes the same before the first step, and afterwards has other experts."""
    options = ["--init_from", str(dense / "dense"), "--model.num_experts", "4"]
    model = jllama.load(dense / "dense", "float32", layout="training")
    begun = upcycle(open_checkpoint(dense / "dense"), SMALL, seed=0)
    llama = jllama.build_model(begun.config, load_params(begun))
    np.testing.assert_allclose(llama(TOKENS), model(TOKENS), atol=1e-5)
    assert train(dense, *options, "--training.steps", "3", "--optimizer.learning_rate", "1e-2") == 0
    model = jllama.load(dense / "run", "float32", layout="training")
    assert model.config.num_experts == 4
    assert model.config.experts_per_token == 2
    gate = model.params["layers"]["experts_gate"]
    assert abs(gate[:, 0] - gate[:, 1]).max() > 1e-4


def test_experts_of_another_width_than_the_dense_model(dense, capsys):
    options = ["--init_from", str(dense / "dense"), "--model.num_experts", "4"]
    assert train(dense, *options, "--model.expert_dim", "7") == 2
    assert "is 7; it must be 96, as in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model.experts_per_token 1", "experts_per_token is 1; it must be at least 2"),
        ("--lora.rank 2", "lora.rank is 2; it must be left out with num_experts"),
    ],
)
def test_what_a_dense_checkpoint_cannot_begin(dense, capsys, options, message):
    words = ["--init_from", str(dense / "dense"), "--model.num_experts", "4", *options.split()]
    assert train(dense, *words) == 2
    assert message in capsys.readouterr().err


def test_an_upcycled_run_goes_on(dense):
    options = ["--init_from", str(dense / "dense"), "--model.num_experts", "4"]
    go_on = ["--resume", "auto", "--resume_with_changes"]
    assert train(dense, *options, "--training.steps", "2") == 0
    assert train(dense, *options, "--training.steps", "4", *go_on) == 0
    lines = (dense / "run/metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 4


def test_a_preset_and_what_follows_its_number_of_experts():
    options = TrainConfig(jllama.LlamaConfig(num_experts=128), preset="qwen3-30b-a3b")
    assert _with_model(options, None).model == jllama.preset("qwen3-30b-a3b")
    options = TrainConfig(jllama.LlamaConfig(num_experts=64), preset="qwen3-30b-a3b")
    with pytest.raises(UsageError, match=r"model.num_experts is 64; it must be 128"):
        _with_model(options, None)


BATCH = Batch(
    np.random.default_rng(6).integers(1, 61, (4, 17)).astype(np.int32),
    np.repeat([[1] * 9 + [2] * 8], 4, axis=0),
    np.random.default_rng(7).random((4, 17)) < 0.7,
)


def step(batch=BATCH, **options):
    """The parameters after a step of plain gradient descent, and its loss."""
    loop = jllama.LoopConfig(batch_size=4, seq_len=16, steps=9, dtype="float32", **options)
    optimizer = jllama.OptimizerConfig("sgd", learning_rate=1.0, schedule="constant", clip_norm=1e9)
    config = TrainConfig(config_of("normalized"), training=loop, optimizer=optimizer)
    training = jllama.compile_training(config)
    params = jax.tree.map(jnp.asarray, random_params(config.model, 0))
    state, metrics = training.step(training.init(jax.random.key(0), params), batch)
    return state.params, float(metrics.loss)


@pytest.fixture
def plain_descent(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sgd", lambda config: optax.identity())


@pytest.mark.parametrize("remat", ["none", "dots", "block"])
def test_a_step_has_the_losses_of_balance(plain_descent, remat):
    """Written out in the loss of whole batches; the loss that is logged has none of them."""
    config = config_of("normalized")
    weights, loss = step(balance_loss=0.5, router_z_loss=0.2, remat=remat)
    _, expected_loss = step(balance_loss=0.0)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    counted = BATCH.counted[:, 1:] & (BATCH.segments[:, 1:] == BATCH.segments[:, :-1])
    count = counted.sum()
    is_counted = jnp.asarray(counted.reshape(-1))

    def total(params):
        extra = []

        def route(logits, num_chosen, normalize, *others):
            weights, chosen = ops.route(logits, num_chosen, normalize)
            choices = jax.nn.one_hot(chosen, 5).sum(axis=1)[is_counted]
            share = jax.lax.stop_gradient(choices.sum(axis=0) / choices.sum())
            probs = jax.nn.softmax(logits)[is_counted]
            z = jax.nn.logsumexp(logits, axis=1)[is_counted]
            extra.append(0.5 * 5 * (probs * share).sum() + 0.2 * (z**2).sum())
            return weights, chosen

        llama = jllama.build_model(config, jllama.decode_layout(params, config))
        llama.functions = llama.functions._replace(route=route)
        hidden = llama.hidden(BATCH.tokens[:, :-1], jnp.asarray(BATCH.segments[:, :-1]))
        log_probs = jax.nn.log_softmax(llama.logits(hidden))
        targets = jnp.asarray(BATCH.tokens[:, 1:, None])
        losses = -jnp.take_along_axis(log_probs, targets, axis=2)[..., 0]
        return (losses[counted].sum() + sum(extra)) / count

    params = jax.tree.map(jnp.asarray, random_params(config, 0))
    gradients = jax.grad(total)(params)
    for name in ("router", "experts_down", "wq"):
        moved = params["layers"][name] - weights["layers"][name]
        np.testing.assert_allclose(moved, gradients["layers"][name], atol=2e-5)


def test_pairs_and_frozen_routers_have_none(plain_descent):
    pairs = BATCH._replace(reference=np.zeros(4, np.float32))
    frozen = {"trainable": ["layers/*/wq", "layers/*/experts_up"]}
    for batch, options in ((pairs, {}), (BATCH, frozen)):
        first, _ = step(batch, balance_loss=0.0, **options)
        second, _ = step(batch, balance_loss=1.0, **options)
        jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_gradients_of_experts_are_summed_in_float32(platform):
    """A sum in bfloat16 would stop growing."""
    rng = np.random.default_rng(0)
    x = jnp.array(rng.random((25_600, 16)), jnp.bfloat16)
    matrices = jnp.array(rng.random((1, 8, 16)), jnp.bfloat16)
    pull = jnp.array(rng.random((25_600, 8)), jnp.bfloat16)
    sizes = jnp.array([25_600])
    _, backward = jax.vjp(lambda each: grouped_product(platform, x, each, sizes), matrices)
    (actual,) = backward(pull)
    expected = np.float64(pull).T @ np.float64(x)
    np.testing.assert_allclose(np.float64(actual[0]), expected, rtol=0.005)


def test_a_bias_balances_without_a_loss(plain_descent):
    """It counts in the choice, has no other gradient, and moves against shares."""
    config = dataclasses.replace(config_of("normalized"), router_bias=True)
    params = random_params(config, 0)
    bias = params["layers"]["router_bias"]
    bias[:] = np.random.default_rng(8).normal(size=bias.shape) * 0.2
    tokens = BATCH.tokens[:, :-1]
    llama = jllama.build_model(config, jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(llama(tokens), oracle.forward(params, tokens, config), atol=1e-5)
    loop = jllama.LoopConfig(batch_size=4, seq_len=16, steps=9, dtype="float32", balance_loss=0.0)
    optimizer = jllama.OptimizerConfig("sgd", learning_rate=1.0, schedule="constant", clip_norm=1e9)
    training = jllama.compile_training(TrainConfig(config, training=loop, optimizer=optimizer))
    before = jax.tree.map(jnp.asarray, params)
    everything = BATCH._replace(segments=np.ones((4, 17), int), counted=np.ones((4, 17), bool))
    state, _ = training.step(training.init(jax.random.key(0), before), everything)
    model = jllama.LanguageModel(config, jax.tree.map(jnp.asarray, params))
    for layer in range(config.num_layers):
        chosen = np.asarray(model.capture(tokens, [f"layers/{layer}/experts"]).popitem()[1])
        excess = np.bincount(chosen.ravel(), minlength=5) - chosen.size / 5
        moved = np.asarray(state.params["layers"]["router_bias"][layer]) - bias[layer]
        np.testing.assert_allclose(moved, -1e-4 * excess / chosen.size, rtol=0.01, atol=2e-8)
