"""Train a small Llama from scratch on Python's standard library, in a loop of your own.

    python examples/train.py                              # under a minute on two CPU cores
    python examples/train.py --path my_texts/ --steps 2000

`jllama train` does the same, with checkpoints, logs and a report (docs/train.md).
"""

import argparse
import time
from typing import Any

import jax

import jllama

# Settings.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--path", default="stdlib", help="a text file, a folder, .jsonl or Parquet")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--seq_len", type=int, default=128)
parser.add_argument("--learning_rate", type=float, default=4e-3)
parser.add_argument("--eval_every", type=int, default=100)
parser.add_argument("--prompt", default="def get", help="what the sample at the end begins with")
parser.add_argument("--output", default="runs/example_train", help="the folder to save to")
options = parser.parse_args()
sizes: Any = {"batch_size": options.batch_size, "seq_len": options.seq_len}

# Data: the text is split, a tokenizer is trained, and tokens are written to a cache.
data = jllama.prepare_data(
    jllama.DataConfig(path=options.path, vocab_size=1024, validation_fraction=0.02)
)
print(f"{data.size()}, {data.tokenizer.vocab_size:,} different tokens")

# Model and optimizer.
model = jllama.LlamaConfig(
    vocab_size=data.tokenizer.vocab_size,
    num_layers=4,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,  # grouped-query attention: a key-value head serves two query heads
    mlp_dim=384,
    max_seq_len=options.seq_len,
    tie_embeddings=True,
)
optimizer = jllama.OptimizerConfig(
    name="adamw", learning_rate=options.learning_rate, warmup_fraction=0.05, weight_decay=0.1
)
loop = jllama.LoopConfig(steps=options.steps, **sizes)

# The programs of the training, each compiled when it is first called.
training = jllama.compile_training(jllama.TrainConfig(model, optimizer=optimizer, training=loop))
state = training.init(jax.random.key(0))
print(f"{sum(array.size for array in jax.tree.leaves(state.params)):,} parameters")


def validation_loss(state):
    """Return the mean loss over a part of the held-out text, in nats per token."""
    total_nats = 0.0
    total_tokens = 0.0
    for batch in data.validation_batches(**sizes, max_tokens=16_384):
        nats, num_tokens, _ = training.evaluate(training.weights(state), batch)
        total_nats += float(nats)
        total_tokens += float(num_tokens)
    return total_nats / total_tokens


# The loop.
batches = data.training_batches(**sizes, seed=0)
start_s = time.perf_counter()
for step in range(1, options.steps + 1):
    state, metrics = training.step(state, next(batches))
    is_last = step == options.steps
    if step % options.eval_every == 0 or is_last:
        elapsed_s = time.perf_counter() - start_s
        print(
            f"step {step}: loss {metrics.loss:.3f}, validation loss {validation_loss(state):.3f}, "
            f"gradient norm {metrics.grad_norm:.2f}, {elapsed_s:.0f} s"
        )

# Save, load and sample. Transformers and llama.cpp read what `hf` and `gguf` write.
trained = jllama.LanguageModel(model, training.model_weights(state), data.tokenizer)
jllama.save(trained, options.output, "hf", overwrite=True)
loaded = jllama.load(options.output)
max_new_tokens = min(64, options.seq_len // 2)
sample = jllama.generate(
    loaded, options.prompt, max_new_tokens=max_new_tokens, temperature=0.5, seed=0
)
print(f"saved to {options.output}. A sample:\n{options.prompt}{sample[0].text}")
