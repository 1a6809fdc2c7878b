"""Twenty steps against torch: transformers' Llama, PEFT's adapters, AdamW, the same rows, and so
the same losses.
"""

import peft
import pytest
import torch
import tuning
from test_second_oracle import their_model
from tuning import (
    CONFIG,
    KINDS,
    OPTIMIZER,
    STEPS,
    WEIGHTS,
    apart,
    begun,
    compiled,
    conversations,
    packed,
)

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


def their_tuning(kind):
    """The same model in torch, and what of it is trained."""
    model, lora = their_model(CONFIG, WEIGHTS).train(), KINDS[kind]
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


def their_losses(kind, batches):
    """Losses of steps with AdamW, the gradient clipped to a global norm, matrices alone decayed."""
    model = their_tuning(kind)
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
    batches = [arranged(conversations(step % 5)) for step in range(STEPS)]
    training = compiled(kind)
    state, actual, clipped = begun(kind, training), [], 0
    for rows in batches:
        state, metrics = training.step(state, rows)
        actual.append(float(metrics.loss))
        clipped += bool(metrics.grad_norm > OPTIMIZER.clip_norm)
    expected = their_losses(kind, batches)
    assert clipped > 10
    assert actual[-1] < actual[0] - 0.5
    assert max(map(relative_error, actual, expected)) < TOLERANCE
