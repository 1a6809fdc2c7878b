"""The model of a run that goes on: texts that it writes, and copies of it for callbacks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

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


def current_model(run: Run) -> LanguageModel:
    """Return the current model, with its tokenizer and chat template."""
    weights = run.training.model_weights(run.state)
    return dataclasses.replace(run.plan.language_model, params=weights)


def copy_current_model(run: Run) -> LanguageModel:
    """Return the current model with arrays of its own, as the next step donates the state's."""
    model = current_model(run)
    return dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))
