"""Twenty steps against torch: transformers' models, PEFT's adapters, AdamW, the same rows, and so
the same losses.
"""

import peft
import pytest
import torch
import transformers
import tuning
from test_second_oracle import their_config
from tuning import KINDS, OPTIMIZER, STEPS, apart, conversations, packed

from jllama.parameters import as_matrix, tensor_specs
from jllama.training.optimizer import learning_rate_at
from jllama.verify.checks import relative_error

TOLERANCE = 1e-5
NAMES = {
    **{
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
    },
    **{"w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"},
}
"""What transformers calls each matrix of a layer."""


def their_model(architecture):
    """The model of ``tuning`` in transformers, with tensors by their names."""
    config, weights = tuning.CONFIG, tuning.WEIGHTS
    fields = their_config(config).to_dict() | {"model_type": architecture}
    window = config.sliding_window or None
    options = transformers.AutoConfig.for_model(**fields, sliding_window=window)
    options._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(options)
    tensors = {}
    for spec in tensor_specs(config):
        in_layers, _, name = spec.path.rpartition("/")
        array = weights["layers"][name][spec.layer] if in_layers else weights[name]
        matrix = as_matrix(spec.parameter, array)
        tensors[spec.name("huggingface")] = torch.tensor(matrix.copy())
    if config.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model


def their_tuning(kind, architecture):
    """The same model in torch, and what of it is trained."""
    model, lora = their_model(architecture).train(), KINDS[kind]
    if not lora.rank:
        return model
    targets, switches = [NAMES[name] for name in lora.targets], {"use_rslora": lora.rank_stabilized}
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        use_dora=lora.dora,
        bias="none",
        **switches,
    )
    model = peft.get_peft_model(model, options)
    layers = model.base_model.model.model.layers
    for name, part in tuning.random_adapter(kind)["layers"].items():
        for index, layer in enumerate(layers):
            module = layer.get_submodule(NAMES[name])
            copied = [(module.lora_A, part["a"][index].T), (module.lora_B, part["b"][index].T)]
            copied += (
                [(module.lora_magnitude_vector, part["magnitude"][index])] if lora.dora else []
            )
            for holder, values in copied:
                holder["default"].weight.data = torch.tensor(values.copy())
    return model


def their_losses(kind, batches, architecture):
    """Losses of steps with AdamW, the gradient clipped to a global norm, matrices alone decayed."""
    model = their_tuning(kind, architecture)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_decayed = [parameter.ndim > 1 for parameter in trained]
    groups = [
        {
            "params": [p for p, is_one in zip(trained, is_decayed, strict=True) if is_one],
            "weight_decay": 0.1,
        },
        {
            "params": [p for p, is_one in zip(trained, is_decayed, strict=True) if not is_one],
            "weight_decay": 0.0,
        },
    ]
    betas = OPTIMIZER.beta1, OPTIMIZER.beta2
    optimizer, losses = torch.optim.AdamW(groups, betas=betas, eps=OPTIMIZER.epsilon), []
    for step, rows in enumerate(batches):
        inputs, targets, segments = map(
            torch.tensor, (rows.tokens[:, :-1], rows.tokens[:, 1:], rows.segments[:, :-1])
        )
        seen = (segments[:, :, None] == segments[:, None]) & torch.ones(
            inputs.shape[1], inputs.shape[1]
        ).tril().bool()
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
        if segments.max() == 1:  # they make their own, with a window
            mask = None
        positions = torch.arange(inputs.shape[1]).expand(inputs.shape)
        logits = model(
            input_ids=inputs.long(), attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        counted = torch.tensor(rows.counted[:, 1:])
        loss = torch.nn.functional.cross_entropy(logits[counted], targets[counted].long())
        loss.backward()
        norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in trained))
        for parameter in trained:
            parameter.grad *= torch.clamp(OPTIMIZER.clip_norm / norm, max=1.0)
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate_at(step, OPTIMIZER, STEPS))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_losses(kind, arranged, architecture="llama"):
    """Compare the losses of twenty steps; return by how much they fall."""
    batches = [arranged(conversations(step % 5)) for step in range(STEPS)]
    training = tuning.compiled(kind)
    state, actual, clipped = tuning.begun(kind, training), [], 0
    for rows in batches:
        state, metrics = training.step(state, rows)
        actual.append(float(metrics.loss))
        clipped += bool(metrics.grad_norm > OPTIMIZER.clip_norm)
    expected = their_losses(kind, batches, architecture)
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
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "olmo2"])
def test_twenty_steps_of_other_families_have_torchs_losses(name, kind):
    """Mistral's window is shorter than the rows."""
    with tuning.family(name):
        assert compare_losses(kind, apart, name) > 0.1
