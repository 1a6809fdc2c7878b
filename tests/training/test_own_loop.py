"""A training loop that people write themselves, of public names alone."""

import dataclasses
import itertools
import json
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but

import jllama
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.stop import Stopped
from jllama.tokenizers import BytesTokenizer
from jllama.training.loop import train
from jllama.training.objectives import next_token

LOOP = """
import jax
import jllama

data = jllama.prepare_data(jllama.DataConfig(path="my_texts/", tokenizer="bytes"))
vocab_size = data.tokenizer.vocab_size
model = jllama.LlamaConfig(vocab_size, num_layers=2, embed_dim=64, num_heads=4, max_seq_len=64)
config = jllama.TrainConfig(model, training=jllama.LoopConfig(batch_size=8, seq_len=64, steps=30))
training = jllama.compile_training(config)
state = training.init(jax.random.key(config.seed))
batches = data.training_batches(batch_size=8, seq_len=64, seed=config.seed)
for step, batch in zip(range(30), batches):
    state, metrics = training.step(state, batch)
    if step % 10 == 0:
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
            batch_size=8, seq_len=64, steps=30, eval_every=30, sample_tokens=0
        ),
    )
    train(config)
    first, second = (jllama.load(path)([[1, 40, 50, 60]]) for path in ("run", "my_model"))
    np.testing.assert_array_equal(first, second)


# Batches, objectives and functions of one's own in ``jllama.train``

SMALL = jllama.LlamaConfig(
    259, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, max_seq_len=16
)
STEPS = 6


def batches(count=None):
    """The first ``count`` batches, or more than are needed."""
    rng = np.random.default_rng(0)
    for _ in range(count or 1000):
        yield jllama.text_batch(rng.integers(2, 99, (4, 17)), bos_id=1)


def source(count=None):
    return jllama.BatchSource(BytesTokenizer(), lambda: batches(count), lambda: batches(2))


def a_config(folder, **options):
    defaults = {
        "batch_size": 4,
        "steps": STEPS,
        "eval_every": 3,
        "log_every": 1,
        "sample_tokens": 0,
    }
    training = jllama.LoopConfig(**(defaults | options))
    optimizer = jllama.OptimizerConfig(schedule="constant", warmup_steps=1, learning_rate=0.01)
    return jllama.TrainConfig(
        SMALL, run_dir=str(folder), training=training, optimizer=optimizer, resume="auto"
    )


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


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


@pytest.mark.parametrize("training", slow_but([Resuming], [batches, Resuming]))
def test_batches_of_ones_own_train_and_go_on(tmp_path, training):
    """With a running mean and a selection: stopped in between, all is the same to the last bit."""
    options = {"trainable": ["layers/*", "embed"], "ema": 0.5}
    own = jllama.BatchSource(BytesTokenizer(), training, lambda: batches(2))
    whole = train(a_config(tmp_path / "whole", **options), data=own)
    with pytest.raises(Stopped, match="stopped at step 5 of 6; saved"):
        train(a_config(tmp_path / "parts", **options), data=own, callbacks=[stop(4)])
    assert train(a_config(tmp_path / "parts", **options), data=own) == whole
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    one, other = (
        jllama.load(tmp_path / name, layout="training", step=STEPS).params
        for name in ("whole", "parts")
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    first = jllama.initial_params(jax.random.split(jax.random.key(0))[0], SMALL)
    # Which is frozen.
    np.testing.assert_allclose(one["lm_head"], first["lm_head"], rtol=1e-6, atol=1e-8)


def test_what_is_evaluated_saved_and_loaded_is_the_running_mean(tmp_path):
    """That of the steps' own weights: the same evaluation comes out of the model that is loaded."""
    final = train(a_config(tmp_path / "run", ema=0.9), data=source())
    plain = train(a_config(tmp_path / "plain"), data=source())
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert final.validation_loss != plain.validation_loss
    model = jllama.load(tmp_path / "run", layout="training")
    nats, count = 0.0, 0
    for batch in batches(2):
        logits = np.float64(model(batch.tokens[:, :-1]))
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        nats -= np.take_along_axis(log_probs, batch.tokens[:, 1:, None], axis=-1).sum()
        count += batch.tokens[:, 1:].size
    assert final.validation_loss == pytest.approx(nats / count, rel=1e-5)


def test_callbacks_are_told_and_may_fail(tmp_path, capsys):
    """One is called with each log, evaluation and save; an error in another is a warning, and
    changes nothing.
    """
    events, models = [], []

    def broken(event):
        raise ValueError("no room\nfor this")

    def keep(event):
        events.append((event.name, event.step, dict(event.figures)))
        if event.name == "save":
            models.append(event.model())

    train(a_config(tmp_path / "run", keep_last=2), data=source(), callbacks=[broken, keep])
    err = capsys.readouterr().err
    message = (
        "warning: the callback broken failed: ValueError: no room for this; training goes on\n"
    )
    assert err.count(message) == len(events) == STEPS + 2 + 2
    assert [step for name, step, _ in events if name == "log"] == [*range(1, STEPS + 1)]
    assert [step for name, step, _ in events if name == "evaluation"] == [3, 6]
    logged = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [figures["loss"] for name, _, figures in events if name == "log"] == losses(
        tmp_path / "run"
    )
    reported = [figures["validation_loss"] for name, _, figures in events if name == "evaluation"]
    assert reported == [line["validation_loss"] for line in logged if "validation_loss" in line]
    for model, step in zip(models, (3, 6), strict=True):
        saved = jllama.load(tmp_path / "run", layout="training", step=step)
        jax.tree.map(np.testing.assert_array_equal, model.params, saved.params)


def test_batches_that_end_early_end_the_run_with_what_it_has(tmp_path):
    """Which is saved: with more of them it goes on, and is the same."""
    with pytest.raises(
        jllama.JllamaError, match="ended after step 4 of 6, which is saved: give as many"
    ):
        train(a_config(tmp_path / "run"), data=source(4))
    assert len(losses(tmp_path / "run")) == 4
    train(a_config(tmp_path / "run"), data=source())
    train(a_config(tmp_path / "whole"), data=source())
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(("count", "saved"), [(0, []), (3, [3])])
def test_batches_that_end_at_once_or_at_a_checkpoint(tmp_path, count, saved):
    own = jllama.BatchSource(
        BytesTokenizer(), lambda: itertools.islice(batches(), count), lambda: batches(2)
    )
    with pytest.raises(jllama.JllamaError, match=f"^the batches ended after step {count} of 6[:,]"):
        train(a_config(tmp_path / "run", log_every=2), data=own)
    assert RunCheckpoints(tmp_path / "run" / "checkpoints", read_only=True).steps() == saved


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros((4, 17), int), "a batch is a ndarray; it must be a jllama.Batch"),
        (
            jllama.text_batch(np.ones((3, 17), int), 1),
            "a batch has 3 rows; with training.batch_size it must have 4",
        ),
        (jllama.text_batch(np.full((4, 17), 300), 1), "300"),
        (
            jllama.Batch(*[np.ones((4, size), int) for size in (17, 16, 17)]),
            r"\(4, 17\), \(4, 16\), \(4, 17\); each must be",
        ),
    ],
    ids=["no batch", "rows", "ids", "shapes"],
)
def test_what_is_no_batch_is_refused(tmp_path, batch, message):
    own = jllama.BatchSource(BytesTokenizer(), lambda: iter([batch] * 9), lambda: batches(2))
    with pytest.raises(jllama.UsageError, match=message):
        train(a_config(tmp_path / "run"), data=own)


def test_what_was_learned_before_a_wrong_batch_is_saved(tmp_path):
    """Whether the batch is wrong or the code that should make it; mended, the run goes on."""

    def wrong():
        yield from batches(4)
        raise RuntimeError("the disk of ours is gone")

    def short():
        yield from batches(5)
        yield jllama.text_batch(np.ones((3, 17), int), 1)

    for training, step, error, message in (
        (wrong, 4, RuntimeError, "of ours"),
        (short, 5, jllama.UsageError, "3 rows"),
    ):
        own = jllama.BatchSource(BytesTokenizer(), training, lambda: batches(2))
        with pytest.raises(error, match=message):
            train(a_config(tmp_path / "run", log_every=4), data=own)
        assert RunCheckpoints(tmp_path / "run" / "checkpoints", read_only=True).steps()[-1] == step
    train(a_config(tmp_path / "run", log_every=4), data=source())


def test_an_objective_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    def broken(forward, batch, options):
        total, count, figures = next_token(forward, batch, options)
        return total * jnp.nan, count, figures

    monkeypatch.setitem(jllama.OBJECTIVES, "broken", broken)
    with pytest.raises(jllama.JllamaError) as failed:
        train(a_config(tmp_path / "run", objective="broken", max_skipped=2), data=source())
    message = (
        "the loss or its gradient is not a finite number at step 2 (2 steps in a row); "
        "no checkpoint had been saved yet"
    )
    assert str(failed.value).startswith(message)
    assert "\n" not in str(failed.value)


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
