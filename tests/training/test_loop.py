"""The training loop's own bookkeeping; whole runs are in ``tests/commands/test_train.py``."""

import dataclasses
import io
import itertools
import types

import jax.numpy as jnp
import numpy as np
from helpers import trained_smollm
from models import SMALL
from rich.console import Console

import jllama
from jllama.conversation import chat_ids
from jllama.data.batches import ChatTokens
from jllama.data.datasets import BatchSource, ChatDataset
from jllama.language_model import LanguageModel
from jllama.templates.messages import TEMPLATES
from jllama.tokenizers import BytesTokenizer
from jllama.training import loop
from jllama.training.opening import Run
from jllama.training.step import StepMetrics
from jllama.training.tracker import Tracker


class Recorder(Tracker):
    """Keeps what is written."""

    def __init__(self, metrics, samples=None):
        self.console = Console(file=io.StringIO())
        self.metrics, self.samples = metrics, samples
        self.start_s = 0.0
        self.move = lambda **_: None

    def write(self, step, name="metrics.jsonl", **record):
        self.metrics.update(record)
        if self.samples is not None:
            self.samples.append((name, record))


def a_run(**fields):
    """With these fields alone."""
    run = object.__new__(Run)
    vars(run).update(fields)
    return run


def test_the_speed_logged_is_that_of_steps_that_are_done(monkeypatch):
    """A step is dispatched at once and done when it has said whether it was left out: that wait
    counts.
    """
    now_s, written = [100.0], {}

    def wait_for(value):
        now_s[0] = 104.0
        return value.item()

    monkeypatch.setattr(loop, "bool", wait_for, raising=False)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now_s[0])
    tracker = Recorder(written)
    config = jllama.TrainConfig(
        SMALL, training=jllama.LoopConfig(batch_size=2, seq_len=8, steps=10)
    )
    mesh = types.SimpleNamespace(local_devices=[])
    training = types.SimpleNamespace(mesh=mesh, trainable=types.SimpleNamespace(shares=None))
    data = BatchSource(BytesTokenizer(), lambda: iter([]), list)
    run = a_run(
        step=2,
        config=config,
        training=training,
        planned_bytes=0,
        num_skipped=0,
        data=data,
        batches=iter([]),
        tracker=tracker,
    )
    step = StepMetrics(
        jnp.float32(2.5),
        jnp.float32(1.0),
        jnp.float32(16.0),
        jnp.bool_(False),
        jnp.float32(16.0),
        {},
    )
    run.recent = [(step, jllama.text_batch(np.ones((2, 9), int), 1))] * 2
    run.start_s = 100.0
    loop.log(run)
    assert (written["loss"], written["tokens_per_s"], written["step_s"]) == (2.5, 8.0, 2.0)


def test_questions_of_a_run_on_chats_are_asked_through_its_template(monkeypatch):
    """As the ids that ``chat`` makes, and answered with the likeliest tokens; in a run on text they
    are prompts.
    """
    requests, written, questions = [], [], ["Where do you live?", "And who with?"]
    tokenizer = trained_smollm(["user assistant system"], 300)
    model = LanguageModel(SMALL, {}, tokenizer, TEMPLATES["chatml"], (2,))

    def generate(model, prompts, sampling, **named):
        requests.append((prompts, sampling.temperature, named))
        return [types.SimpleNamespace(text=f"answer {number}") for number in range(len(prompts))]

    monkeypatch.setattr(loop, "generate", generate)
    options = jllama.LoopConfig(
        batch_size=2, seq_len=8, steps=10, sample_tokens=5, questions=questions
    )
    monkeypatch.setattr(loop, "current_model", lambda run: model)
    nothing = np.zeros(0, int)
    no_conversations = ChatTokens(nothing, nothing > 0, nothing, nothing, nothing)
    chats = ChatDataset(tokenizer, no_conversations, no_conversations, "", {})
    text = BatchSource(tokenizer, lambda: iter([]), list)
    for data in (chats, text):
        config = jllama.TrainConfig(SMALL, training=options)
        loop.sample(a_run(config=config, data=data, tracker=Recorder({}, written), step=1))
    chats = [chat_ids(model, [{"role": "user", "content": question}]) for question in questions]
    assert requests == [
        (chats, 0.0, {"max_new_tokens": 5}),
        (questions, 0.0, {"max_new_tokens": 5}),
    ]
    texts = [
        {"prompt": question, "text": f"answer {number}"}
        for number, question in enumerate(questions)
    ]
    assert written == [("samples.jsonl", text) for text in texts] * 2


def test_a_step_that_does_not_fit_computes_its_layers_again(tmp_path, monkeypatch, capsys):
    """By ``remat: auto``, the default; what is learned is the same."""
    tokenizer = BytesTokenizer()
    model = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size)
    rows = [jllama.text_batch(np.random.default_rng(0).integers(3, 250, (4, 33)), bos_id=1)]
    source = BatchSource(tokenizer, lambda: itertools.repeat(rows[0]), lambda: rows)
    losses, outputs = {}, {}
    for name, has_bytes in (("fits", 2**40), ("does not", 2**20)):
        monkeypatch.setattr(
            loop, "device_memory_bytes", lambda device, has_bytes=has_bytes: has_bytes
        )
        options = jllama.LoopConfig(batch_size=4, seq_len=32, steps=2, sample_tokens=0)
        config = jllama.TrainConfig(model, training=options, run_dir=str(tmp_path / name))
        losses[name] = jllama.train(config, data=source).validation_loss
        outputs[name] = capsys.readouterr().err
    message = (
        "note: what remat dots keeps does not fit the device, "
        "so each layer is computed again (block)"
    )
    assert [message in output for output in outputs.values()] == [False, True]
    np.testing.assert_allclose(losses["does not"], losses["fits"], rtol=1e-6)
