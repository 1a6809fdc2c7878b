"""The model of a run that goes on: texts that it writes, and copies of it for callbacks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jllama.data.datasets import ChatDataset
from jllama.formats.tensors import Checkpoint
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.models.language_model import LanguageModel
from jllama.system.files import SAMPLES
from jllama.templates.messages import chat_format, message_ids
from jllama.training.loop import Run


def sample(origin: Checkpoint | None, run: Run) -> None:
    """Let the model continue the sample prompt or answer the questions; show and log the texts.

    In a run on chats they go through the template; if there are none, the first question of the
    validation data is asked.
    """
    options = run.config.training
    if not options.sample_tokens:
        return
    model = current_model(origin, run)
    texts: list[str] = options.questions or [options.sample_prompt]
    separator = ""
    if options.questions:
        separator = " "
        sampling = SamplingParams(temperature=0.0)
    else:
        key = jax.random.fold_in(run.state.key, run.state.step)
        key = jax.random.fold_in(key, run.config.sampling.seed)
        sampling = dataclasses.replace(run.config.sampling, seed=int(jax.random.bits(key)))

    # Chats are prompted with ids.
    prompts: list[Any] = texts
    max_new_tokens = options.sample_tokens
    if isinstance(run.data, ChatDataset):
        if not any(texts):
            prompts = [run.data.first_question()]
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


def no_samples(run: Run) -> None:
    """Show no texts."""


def current_model(origin: Checkpoint | None, run: Run) -> LanguageModel:
    """Return the current model, with its tokenizer and chat template."""
    tokenizer = run.data.tokenizer
    template = None
    stop_ids = ()
    if origin:
        template, stop_ids = chat_format(tokenizer, origin.chat_template, origin.stop_ids)
    weights = run.training.model_weights(run.state)
    return LanguageModel(run.config.model, weights, tokenizer, template, stop_ids)


def copy_current_model(origin: Checkpoint | None, run: Run) -> LanguageModel:
    """Return the current model with arrays of its own, as the next step donates the state's."""
    model = current_model(origin, run)
    return dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))
