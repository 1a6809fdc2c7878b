"""A training loop that people write themselves, of public names alone."""

import re

import numpy as np

import jllama
from jllama.training.loop import train

LOOP = """
import jax
import jllama

data = jllama.prepare_data(jllama.DataConfig(path="my_texts/", tokenizer="bytes"))
model = jllama.LlamaConfig(data.tokenizer.vocab_size, num_layers=2, embed_dim=64, num_heads=4, max_seq_len=64)
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
        (tmp_path / "my_texts" / f"{number}.txt").write_text(f"The {number}th fox jumps over the lazy dog. " * 5)
    assert len(LOOP.strip().splitlines()) <= 15
    own = {}
    exec(LOOP, own)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[0] > losses[1] > losses[2]
    config = jllama.TrainConfig(
        own["model"],
        run_dir="run",
        data=jllama.DataConfig(path="my_texts/", tokenizer="bytes"),
        training=jllama.LoopConfig(batch_size=8, seq_len=64, steps=30, eval_every=30, sample_tokens=0),
    )
    train(config)
    first, second = (jllama.load(path)([[1, 40, 50, 60]]) for path in ("run", "my_model"))
    np.testing.assert_array_equal(first, second)
