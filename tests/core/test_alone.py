"""The core without any other file of jllama: 40 lines train a tiny Llama and let it write."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jllama.core

PROGRAM = """
import functools, jax, optax
import jax.numpy as jnp
from jllama.core.config import LlamaConfig
from jllama.core.engine import Engine, Row, Sampling
from jllama.core.step import Batch, Setup, initial_state, take_step

# The data: a text that repeats itself, one token a character.
text = "the core is a place. " * 40
letters = sorted(set(text))
ids = jnp.array([letters.index(letter) for letter in text])
windows = jnp.stack([ids[start : start + 33] for start in range(16)])
batch = Batch(windows, jnp.ones_like(windows), jnp.ones(windows.shape, bool))

# Training: AdamW, warm-up and cosine.
config = LlamaConfig(len(letters), num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2)
rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100, 1e-3)
setup = Setup(config, optax.adamw(rate, 0.9, 0.95))
state = initial_state(setup, jax.random.key(0))
step = jax.jit(functools.partial(take_step, setup))
for _ in range(100):
    state, metrics = step(state, batch)
print(float(metrics.loss))

# Sampling: two texts at once, the likeliest letters of one and drawn ones of the other.
stacked = state.params["layers"]
layers = {str(i): jax.tree.map(lambda leaf: leaf[i], stacked) for i in range(config.num_layers)}
engine = Engine(config, {**state.params, "layers": layers}, num_slots=2, max_len=64)
prompt = ids[:4].tolist()
rows = [engine.submit(Row(prompt, 17, (), Sampling(heat, seed=1))) for heat in (0.0, 0.5)]
while engine.busy:
    engine.step()
written, drawn = (text[:4] + "".join(letters[id] for id in row.tokens) for row in rows)
print(written, drawn, sep="\\n")
"""


def test_it_trains_and_writes(tmp_path):
    """In a process that finds only a copy of these files."""
    shutil.copytree(Path(jllama.core.__file__).parent, tmp_path / "jllama" / "core")
    (tmp_path / "jllama" / "__init__.py").touch()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\nimport jllama\nprint(jllama.__file__)\n")
    assert len(PROGRAM.strip().splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loss, written, drawn, file = done.stdout.splitlines()
    assert float(loss) < 0.2
    assert written == "the core is a place. "
    assert drawn[:4] == "the "
    assert len(drawn) == len(written)
    assert Path(file).is_relative_to(tmp_path)
