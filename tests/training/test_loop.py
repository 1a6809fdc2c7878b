"""The training loop's own bookkeeping, and what a run needs of a machine, which is reckoned before
it is asked for; whole runs are in ``tests/commands/test_train.py``.
"""

import dataclasses
import io
import types

import jax
import numpy as np
import pytest
from helpers import trained_smollm
from models import SMALL
from rich.console import Console

import jllama
from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.core.step import StepMetrics
from jllama.data.batches import ChatTokens
from jllama.data.datasets import BatchSource, ChatDataset
from jllama.generation.conversation import chat_ids
from jllama.models.language_model import LanguageModel
from jllama.parallel.sharding import MeshConfig, make_mesh
from jllama.templates.messages import TEMPLATES
from jllama.training import loop, samples
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.loop import Run
from jllama.training.opening import check_memory
from jllama.training.plan import decide
from jllama.training.sources import Source
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
    config = TrainConfig(SMALL, training=LoopConfig(batch_size=2, seq_len=8, steps=10))
    plan = decide(config)
    run = a_run(
        step=2,
        training=types.SimpleNamespace(plan=plan),
        planned_bytes=0,
        num_skipped=0,
        source=Source(plan),
        tracker=Recorder(written),
    )
    loss, norm, tokens = map(np.float32, (2.5, 1, 16))
    step = StepMetrics(loss, norm, tokens, np.False_, tokens, {})
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

    monkeypatch.setattr(samples, "generate", generate)
    options = LoopConfig(batch_size=2, seq_len=8, steps=10, sample_tokens=5, questions=questions)
    monkeypatch.setattr(samples, "current_model", lambda run: model)
    nothing = np.zeros(0, int)
    no_conversations = ChatTokens(nothing, nothing > 0, nothing, nothing, nothing)
    chats = ChatDataset(tokenizer, no_conversations, no_conversations, "", {})
    text = BatchSource(tokenizer, lambda: iter([]), list)
    for data in (chats, text):
        plan = decide(TrainConfig(SMALL, training=options), data=data)
        training = types.SimpleNamespace(plan=plan)
        samples.sample(a_run(training=training, tracker=Recorder({}, written), step=1))
    chats = [chat_ids(model, [{"role": "user", "content": question}]) for question in questions]
    assert requests == [(prompts, 0.0, {"max_new_tokens": 5}) for prompts in (chats, questions)]
    texts = [{"prompt": text, "text": f"answer {index}"} for index, text in enumerate(questions)]
    assert written == [("samples.jsonl", text) for text in texts] * 2


# Memory

MODEL = LlamaConfig(vocab_size=1000, num_layers=2, embed_dim=64, max_seq_len=128)
CONFIG = TrainConfig(model=MODEL, training=LoopConfig(batch_size=8, seq_len=128))
MESH = make_mesh(MeshConfig(), jax.devices()[:1])
SCALARS = 3 * 4 + 8  # the step, the optimizer's two counts, the key


def check(config, available_bytes=None):
    check_memory(compile_training(config, MESH), available_bytes)


def min_bytes(tokens, state_bytes=12):
    """The state of each parameter; gradients, or before them logits; and 2 bytes of each number of
    a layer's input.
    """
    count, logits = count_parameters(MODEL), 4 * tokens * MODEL.vocab_size
    return state_bytes * count + max(4 * count, logits) + 2 * 2 * tokens * 64 + SCALARS


@pytest.mark.parametrize("accumulation", [1, 16])
def test_the_least_that_a_run_takes(accumulation):
    """One byte less is too little; with parts of 128 tokens logits are smaller than gradients."""
    config = dataclasses.replace(
        CONFIG, training=LoopConfig(batch_size=16, seq_len=128, accumulation=accumulation)
    )
    needed = min_bytes(16 * 128 // accumulation)
    check(config, needed)
    with pytest.raises(
        UsageError, match=r"take 0.0 GiB .*, over the 0.0 GiB of one CPU: take a smaller"
    ):
        check(config, needed - 1)
    lion = dataclasses.replace(config, optimizer=OptimizerConfig("lion"))
    check(lion, min_bytes(16 * 128 // accumulation, state_bytes=8))


@pytest.mark.parametrize(
    "absurd",
    [
        {"training": LoopConfig(batch_size=10**8, seq_len=128)},
        {"model": dataclasses.replace(MODEL, vocab_size=10**7, embed_dim=8192)},
        {"model": dataclasses.replace(MODEL, num_layers=1000, mlp_dim=10**5, embed_dim=8192)},
    ],
)
def test_what_no_machine_has(absurd):
    with pytest.raises(UsageError, match=r"[\d,]{4,}\.\d GiB"):
        check(dataclasses.replace(CONFIG, **absurd))
