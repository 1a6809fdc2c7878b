"""The model of a run that goes on: texts that it writes, and copies of it for callbacks."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllama.core.parameters import PARAMETERS, layers_of
from jllama.data.datasets import ChatDataset
from jllama.data.prompts import PromptDataset
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.models.language_model import LanguageModel
from jllama.system.files import SAMPLES
from jllama.templates.messages import message_ids
from jllama.training.loop import Run


def sample(run: Run) -> None:
    """Let the model continue the sample prompt or answer the questions; show and log the texts.

    In a run on chats they go through the template; if there are none, the first question of the
    validation data is asked. A run on prompts shows answers to held-out ones when it evaluates.
    """
    plan = run.plan
    options = plan.options
    data = plan.data
    if plan.model.num_experts and run.recent:
        log_experts(run, current_model(run))
    if not options.sample_tokens or isinstance(data, PromptDataset):
        return
    model = current_model(run)
    texts: list[str] = options.questions or [options.sample_prompt]
    separator = ""
    if options.questions:
        separator = " "
        sampling = SamplingParams(temperature=0.0)
    else:
        key = jax.random.fold_in(run.state.key, run.state.step)
        key = jax.random.fold_in(key, plan.sampling.seed)
        sampling = dataclasses.replace(plan.sampling, seed=int(jax.random.bits(key)))

    # Chats are prompted with ids.
    prompts: list[Any] = texts
    max_new_tokens = options.sample_tokens
    if isinstance(data, ChatDataset):
        if not any(texts):
            prompts = [data.first_question()]
            texts = [model.text_tokenizer.decode(prompts[0])]
        elif model.chat_template:
            prompts = [
                message_ids(
                    model.text_tokenizer,
                    model.chat_template,
                    [{"role": "user", "content": text}],
                    True,
                )
                for text in texts
            ]
        if prompts is not texts:
            longest = max(map(len, prompts))
            max_new_tokens = min(max_new_tokens, model.config.max_seq_len - longest)
    completions = generate(model, prompts, sampling, max_new_tokens=max_new_tokens)
    for text, completion in zip(texts, completions, strict=True):
        run.tracker.write(run.step, SAMPLES, prompt=text, text=completion.text)
        run.tracker.say(f"{text}{separator}{completion.text}\n", "dim")


def log_experts(run: Run, model: LanguageModel) -> None:
    """Log and show how the model's experts share the first rows of the last batch.

    Shares are each expert's part of all choices, in the mean over layers; the entropy is that of a
    layer's shares over its greatest one, ``log(num_experts)``, in the mean. With rewards, on one
    device, also log the share of answers' tokens with another expert in some layer when these rows
    are decoded token by token.
    """
    config = model.config
    batch = run.recent[-1][1]
    tokens, segments = (array[:4, :-1] for array in batch[:2])
    is_real = np.asarray(segments) != 0
    layers = layers_of(PARAMETERS["layers/router"], config)
    names = [f"layers/{layer}/experts" for layer in layers]
    chosen = model.capture(tokens, names, segments)
    counts = np.array(
        [
            np.bincount(np.asarray(experts)[is_real].ravel(), minlength=config.num_experts)
            for experts in chosen.values()
        ]
    )
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-30)), axis=1)
    relative = float(entropy.mean() / math.log(max(config.num_experts, 2)))
    means = shares.mean(axis=0)
    run.tracker.write(run.step, expert_shares=means.round(4).tolist(), expert_entropy=relative)
    run.tracker.say(
        f"experts: {means.min():.1%} to {means.max():.1%} of the tokens, entropy {relative:.3f}",
        "dim",
    )
    if isinstance(run.plan.data, PromptDataset) and run.plan.mesh.size == 1:
        from jllama.models.capture import decoded_experts

        # The choice of a sampler, which decodes, beside that for whole sequences.
        params = jax.tree.map(lambda leaf: leaf.astype(run.plan.dtype), model.params)
        model = dataclasses.replace(model, params=params).for_decoding()
        decoded = decoded_experts(config, model.decode_params, jnp.asarray(tokens))
        whole = jnp.stack([*model.capture(tokens, names, segments).values()])
        differs = (jnp.sort(decoded) != jnp.sort(whole)).any(axis=(0, -1))
        is_answer = np.asarray(batch.counted[:4, :-1])
        share = float((differs & is_answer).sum() / max(is_answer.sum(), 1))
        run.tracker.write(run.step, experts_differ=share)


def current_model(run: Run) -> LanguageModel:
    """Return the current model, with its tokenizer and chat template."""
    weights = run.training.model_weights(run.state)
    return dataclasses.replace(run.plan.language_model, params=weights)


def copy_current_model(run: Run) -> LanguageModel:
    """Return the current model with arrays of its own, as the next step donates the state's."""
    model = current_model(run)
    return dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))
