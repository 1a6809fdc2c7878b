"""A training loop that people write themselves, of public names alone."""

import contextlib
import dataclasses
import io
import json
import operator
import re
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import assert_same_bits

import jllama
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.models import oracle
from jllama.system.stop import Stopped
from jllama.tokenizers.base import BytesTokenizer
from jllama.training import loop, opening
from jllama.training.run import train

LOOP = """
import jax
import jllama

data = jllama.prepare_data(jllama.DataConfig(path="my_texts/", tokenizer="bytes"))
vocab_size = data.tokenizer.vocab_size
model = jllama.LlamaConfig(vocab_size, num_layers=2, embed_dim=64, num_heads=4, max_seq_len=64)
config = jllama.TrainConfig(model, training=jllama.LoopConfig(batch_size=8, seq_len=64, steps=9))
training = jllama.compile_training(config)
state = training.init(jax.random.key(config.seed))
batches = data.training_batches(batch_size=8, seq_len=64, seed=config.seed)
for step, batch in zip(range(9), batches):
    state, metrics = training.step(state, batch)
    if step % 4 == 0:
        print(f"step {step}: loss {metrics.loss:.3f}")
jllama.save(jllama.LanguageModel(model, state.params, data.tokenizer), "my_model", "hf")
"""


def test_a_loop_of_fifteen_lines_trains_as_train_does(tmp_path, monkeypatch, capsys):
    """To the last bit: the same batches, the same steps; what it saves is read again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my_texts").mkdir()
    for number in range(40):
        (tmp_path / "my_texts" / f"{number}.txt").write_text(
            f"The {number}th fox jumps over the lazy dog. " * 5
        )
    assert len(LOOP.strip().splitlines()) <= 15
    own = {}
    exec(LOOP, own)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[0] > losses[1] > losses[2]
    config = jllama.TrainConfig(
        own["model"],
        run_dir="run",
        data=jllama.DataConfig(path="my_texts/", tokenizer="bytes"),
        training=jllama.LoopConfig(
            batch_size=8, seq_len=64, steps=9, eval_every=9, sample_tokens=0
        ),
    )
    train(config)
    first, second = (jllama.load(path, layout="training") for path in ("run", "my_model"))
    assert_same_bits(first.params, second.params)


# Batches, objectives and functions of one's own in ``jllama.train``

SMALL = jllama.LlamaConfig(
    259, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, max_seq_len=16
)
STEPS = 6


def batches(count=None):
    """The first ``count`` batches, or more than are needed."""
    rng = np.random.default_rng(0)
    for _ in range(1000 if count is None else count):
        yield jllama.text_batch(rng.integers(2, 99, (4, 17)), bos_id=1)


def source(training=batches):
    return jllama.BatchSource(BytesTokenizer(), training, lambda: batches(2))


def a_config(folder, **options):
    defaults = {
        "batch_size": 4,
        "steps": STEPS,
        "eval_every": 3,
        "log_every": 1,
        "sample_tokens": 0,
        "max_skipped": 2,
        "keep_last": 2,
        "trainable": ["layers/*", "embed"],
        "ema": 0.5,
    }
    training = jllama.LoopConfig(**(defaults | options))
    optimizer = jllama.OptimizerConfig(schedule="constant", warmup_steps=1, learning_rate=0.01)
    return jllama.TrainConfig(
        SMALL, run_dir=str(folder), training=training, optimizer=optimizer, resume="auto"
    )


def losses(folder):
    return [line["loss"] for line in logged(folder) if "loss" in line]


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def broken(event):
    raise ValueError("no room\nfor this")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with two callbacks, of which one is broken, and all that it says."""
    folder, events, models = tmp_path_factory.mktemp("own") / "whole", [], []

    def keep(event):
        events.append((event.name, event.step, dict(event.figures)))
        if event.name == "save":
            models.append(event.model())

    with contextlib.redirect_stderr(io.StringIO()) as err:
        final = train(a_config(folder), data=source(), callbacks=[broken, keep])
    output = err.getvalue()
    return SimpleNamespace(folder=folder, final=final, events=events, models=models, err=output)


def stop(at):
    """A callback that asks the process to stop after a step; one more is taken, as it was begun."""

    def callback(event):
        if event.name == "log" and event.step == at:
            signal.raise_signal(signal.SIGINT)

    return callback


class Resuming:
    """An iterator with a state of its own, which is not read again."""

    def __init__(self):
        self.at, self.batches = 0, [*batches(STEPS)]

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.batches[self.at - 1]

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_batches_with_a_state_train_and_go_on(tmp_path, whole):
    """With a running mean and a selection: stopped in between, all is the same to the last bit."""
    config, own = a_config(tmp_path / "parts"), source(Resuming)
    with pytest.raises(Stopped, match="stopped at step 5 of 6; saved"):
        train(config, data=own, callbacks=[stop(4)])
    assert train(config, data=own) == whole.final
    assert losses(tmp_path / "parts") == losses(whole.folder)
    one, other = (
        jllama.load(folder, layout="training", step=STEPS).params
        for folder in (whole.folder, tmp_path / "parts")
    )
    assert_same_bits(one, other)
    first = jllama.initial_params(jax.random.split(jax.random.key(0))[0], SMALL)
    # Which is frozen.
    np.testing.assert_allclose(one["lm_head"], first["lm_head"], rtol=1e-6, atol=1e-8)


def test_the_model_that_is_loaded_has_the_loss_that_was_evaluated(whole):
    weights = jax.device_get(jllama.load(whole.folder, layout="training").params)
    tokens = np.concatenate([batch.tokens for batch in batches(2)])
    logits, targets = oracle.forward(weights, tokens[:, :-1], SMALL), tokens[:, 1:]
    nats, count = oracle.cross_entropy(logits, targets, targets > 0)
    assert whole.final.validation_loss == pytest.approx(nats / count, rel=1e-5)
    text_bytes = BytesTokenizer().token_bytes()[targets].sum()
    assert whole.final.bits_per_byte == pytest.approx(nats / np.log(2) / text_bytes, rel=1e-5)


def test_callbacks_are_told_and_may_fail(whole):
    """One is called with each log, evaluation and save; an error in another is a warning, and
    changes nothing.
    """
    events = whole.events
    message = (
        "warning: the callback broken failed: ValueError: no room for this; training goes on\n"
    )
    assert whole.err.count(message) == len(events) == STEPS + 2 + 2
    assert [step for name, step, _ in events if name == "log"] == [*range(1, STEPS + 1)]
    assert [step for name, step, _ in events if name == "evaluation"] == [3, 6]
    assert [figures["loss"] for name, _, figures in events if name == "log"] == losses(whole.folder)
    reported = [figures["validation_loss"] for name, _, figures in events if name == "evaluation"]
    assert reported == [
        line["validation_loss"] for line in logged(whole.folder) if "validation_loss" in line
    ]
    for model, step in zip(whole.models, (3, 6), strict=True):
        saved = jllama.load(whole.folder, layout="training", step=step)
        jax.tree.map(np.testing.assert_array_equal, model.params, saved.params)


def test_a_step_that_does_not_fit_computes_its_layers_again(tmp_path, whole, monkeypatch, capsys):
    """By ``remat: auto``, the default; what is learned is the same."""
    monkeypatch.setattr(loop, "device_memory_bytes", lambda device: 2**20)
    train(a_config(tmp_path / "run"), data=source())
    message = "does not fit the device, so each layer is computed again (block)"
    assert f"note: what remat dots keeps {message}" in capsys.readouterr().err
    assert message not in whole.err
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(whole.folder), rtol=1e-6)


def broken_batches():
    yield from batches(2)
    raise RuntimeError("the disk of ours is gone")


def short_batches():
    yield from batches(5)
    yield jllama.text_batch(np.ones((3, 17), int), 1)


PROBLEMS = [
    (lambda: iter([np.zeros((4, 17))]), "a batch is a ndarray; it must be a jllama.Batch", 0),
    (lambda: iter([None]), "a batch is a NoneType; it must be a jllama.Batch", 0),
    (lambda: batches(0), "^the batches ended after step 0 of 6: give", 0),
    (broken_batches, "the disk of ours is gone", 2),
    # At a checkpoint.
    (lambda: batches(3), "^the batches ended after step 3 of 6, ", 3),
    (lambda: batches(4), "ended after step 4 of 6, which is saved: give as many", 4),
    (short_batches, "a batch has 3 rows; with training.batch_size it must have 4", 5),
]


def test_what_was_learned_before_batches_end_or_are_wrong_is_saved(tmp_path, whole):
    """Whether a batch is wrong or the code that should make it; mended, the run goes on, and is the
    same.
    """
    config = a_config(tmp_path / "run", log_every=4)
    for training, message, step in PROBLEMS:
        with pytest.raises((jllama.JllamaError, RuntimeError), match=message):
            train(config, data=source(training))
        saved = RunCheckpoints(tmp_path / "run" / "checkpoints", read_only=True).steps()
        assert (saved or [0])[-1] == step
    assert train(config, data=source()) == whole.final
    weights = (
        json.loads((folder / "receipt.json").read_text())["weights"]["6"]
        for folder in (tmp_path / "run", whole.folder)
    )
    assert operator.eq(*weights)


def test_weights_that_are_no_numbers_end_the_run(tmp_path, whole, monkeypatch):
    load_state = opening.load_initial_state

    def without_numbers(*arguments):
        state = load_state(*arguments)
        return state._replace(params=jax.tree.map(lambda leaf: leaf * np.nan, state.params))

    monkeypatch.setattr(opening, "load_initial_state", without_numbers)
    with pytest.raises(jllama.JllamaError) as failed:
        train(a_config(tmp_path / "run"), data=source())
    problem, _, rest = str(failed.value).partition("; ")
    assert problem == "the loss or its gradient is not a finite number at step 2 (2 steps in a row)"
    assert rest.startswith("no checkpoint had been saved yet")
    assert "\n" not in rest


def test_options_of_a_corpus_are_refused_beside_ones_own_batches(tmp_path):
    config = a_config(tmp_path / "run")
    corpus = dataclasses.replace(config, data=jllama.DataConfig(path="texts/"))
    with pytest.raises(
        jllama.UsageError, match=r"data is .*; it must be left out with your own batches"
    ):
        train(corpus, data=source())
    with pytest.raises(
        jllama.UsageError, match=r"training.epochs is 2.*; it must be 0 with your own batches"
    ):
        train(a_config(tmp_path / "run", steps=1000, epochs=2), data=source())


def test_no_batch_to_evaluate_with_is_said(tmp_path):
    own = jllama.BatchSource(BytesTokenizer(), batches, list)
    with pytest.raises(jllama.JllamaError, match="the data gave no batch to evaluate with"):
        train(a_config(tmp_path / "run"), data=own)
