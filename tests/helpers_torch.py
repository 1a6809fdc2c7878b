"""The model of ``tuning`` in torch: transformers' classes, PEFT's adapters, and steps of AdamW."""

import peft
import torch
import transformers
import tuning
from test_second_oracle import their_config
from tuning import KINDS, STEPS

from jllama.formats.tensors import as_matrix, tensor_specs
from jllama.training.optimizer import learning_rate_at

NAMES = {name: f"self_attn.{name[1]}_proj" for name in ("wq", "wk", "wv", "wo")}
NAMES |= {f"w_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
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
            if lora.dora:
                copied.append((module.lora_magnitude_vector, part["magnitude"][index]))
            for holder, values in copied:
                holder["default"].weight.data = torch.tensor(values.copy())
    return model


def their_loss(model, rows):
    """Nats per counted token."""
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
    return torch.nn.functional.cross_entropy(logits[counted], targets[counted].long())


def their_losses(model, batches, loss_of=their_loss, optimizer=tuning.OPTIMIZER):
    """Losses of steps with AdamW, the gradient clipped to a global norm, matrices alone decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for is_matrix, decay in ((True, 0.1), (False, 0.0)):
        members = [parameter for parameter in trained if (parameter.ndim > 1) == is_matrix]
        groups.append({"params": members, "weight_decay": decay})
    betas = optimizer.beta1, optimizer.beta2
    adamw = torch.optim.AdamW(groups, betas=betas, eps=optimizer.epsilon)
    losses = []
    for step, rows in enumerate(batches):
        loss = loss_of(model, rows)
        loss.backward()
        norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in trained))
        for parameter in trained:
            parameter.grad *= torch.clamp(optimizer.clip_norm / norm, max=1.0)
        for group in adamw.param_groups:
            group["lr"] = float(learning_rate_at(step, optimizer, STEPS))
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses
