"""The training loop's own bookkeeping; whole runs are in ``tests/commands/test_train.py``."""

import io
import types

import jax.numpy as jnp
from helpers import trained_smollm
from models import SMALL
from rich.console import Console

import jllama
from jllama.conversation import chat_ids
from jllama.language_model import LanguageModel
from jllama.templates.messages import TEMPLATES
from jllama.training import loop
from jllama.training.step import StepMetrics


def test_the_speed_logged_is_that_of_steps_that_are_done(monkeypatch):
    """A step is dispatched at once and done when it has said whether it was left out: that wait counts."""
    now_s, written = [100.0], {}

    def wait_for(value):
        now_s[0] = 104.0
        return value.item()

    monkeypatch.setattr(loop, "bool", wait_for, raising=False)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now_s[0])
    run = types.SimpleNamespace(
        step=2,
        config=jllama.TrainConfig(SMALL, training=jllama.LoopConfig(batch_size=2, seq_len=8, steps=10)),
        console=Console(file=io.StringIO()),
        training=types.SimpleNamespace(mesh=types.SimpleNamespace(local_devices=[])),
        planned_bytes=0,
        skipped=0,
        data=types.SimpleNamespace(is_text=True),
        seconds=lambda: 9.0,
        write=written.update,
        show=lambda: None,
    )
    step = StepMetrics(jnp.float32(2.5), jnp.float32(1.0), jnp.float32(16.0), jnp.bool_(False), jnp.float32(16.0), {})
    loop._Run.log(run, [(step, None)] * 2, 100.0)
    assert (written["loss"], written["tokens_per_s"], written["step_s"]) == (2.5, 8.0, 2.0)


def test_questions_of_a_run_on_chats_are_asked_through_its_template(monkeypatch):
    """As the ids that ``chat`` makes, and answered with the likeliest tokens; in a run on text they are prompts."""
    asked, written, questions = [], [], ["Where do you live?", "And who with?"]
    tokenizer = trained_smollm(["user assistant system"], 300)
    model = LanguageModel(SMALL, {}, tokenizer, TEMPLATES["chatml"], (2,))

    def generate(model, prompts, sampling, **named):
        asked.append((prompts, sampling.temperature, named))
        return [types.SimpleNamespace(text=f"answer {number}") for number in range(len(prompts))]

    monkeypatch.setattr(loop, "generate", generate)
    options = jllama.LoopConfig(batch_size=2, seq_len=8, steps=10, sample_tokens=5, questions=questions)
    for is_text in (False, True):
        run = types.SimpleNamespace(
            config=jllama.TrainConfig(SMALL, training=options),
            data=types.SimpleNamespace(is_text=is_text),
            model=lambda: model,
            console=Console(file=io.StringIO()),
            write=lambda name, **record: written.append((name, record)),
        )
        loop._Run.sample(run)
    chats = [chat_ids(model, [{"role": "user", "content": question}]) for question in questions]
    assert asked == [(chats, 0.0, {"max_new_tokens": 5}), (questions, 0.0, {"max_new_tokens": 5})]
    texts = [{"prompt": question, "text": f"answer {number}"} for number, question in enumerate(questions)]
    assert written == [("samples.jsonl", text) for text in texts] * 2
