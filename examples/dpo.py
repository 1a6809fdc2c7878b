"""Learn from pairs of a better and a worse answer (DPO, arXiv:2305.18290).

    python examples/dpo.py                      # with a small model that is trained here first
    python examples/dpo.py smollm2/ --learning_rate 1e-5

Each question has a long and a short answer. The small model first learns both. The pairs then
prefer the short one. `jllama train` does the same for a file of pairs (docs/finetune.md).
"""

import argparse
import json
import random
from pathlib import Path

import jax

import jllama

# Settings.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("checkpoint", nargs="?", help="of any format; by default a small new model")
parser.add_argument("--first_steps", type=int, default=300, help="of the small model")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch_size", type=int, default=16, help="pairs in a step")
parser.add_argument("--beta", type=float, default=0.1, help="higher: nearer to the first model")
parser.add_argument("--learning_rate", type=float, default=1e-4)
parser.add_argument("--run_dir", default="runs/example_dpo")
options = parser.parse_args()
folder = Path(f"{options.run_dir}_data")
folder.mkdir(parents=True, exist_ok=True)

# Data: questions with two answers.
pairs = []
for number in range(1000):
    is_even = number % 2 == 0
    short = "Yes." if is_even else "No."
    long = f"The number {'can' if is_even else 'cannot'} be divided by two."
    pairs.append({"prompt": f"Is {number} even?", "chosen": short, "rejected": long})
random.Random(0).shuffle(pairs)
test_pairs = pairs[:8]
pairs = pairs[8:]
(folder / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))

# A small model that gives both answers, trained on them as text.
checkpoint = options.checkpoint
if not checkpoint:
    checkpoint = folder / "first"
    template = """{{ bos_token }}{% for message in messages %}{{ message["content"] }}
{% if message["role"] == "assistant" %}{{ eos_token }}{% endif %}{% endfor %}"""
    texts = [f"{pair['prompt']}\n{pair[kind]}" for pair in pairs for kind in ("chosen", "rejected")]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = jllama.prepare_data(jllama.DataConfig(f"{folder}/texts.jsonl", tokenizer="bytes"))
    config = jllama.TrainConfig(
        jllama.LlamaConfig(259, num_layers=2, embed_dim=96, num_heads=4, max_seq_len=64),
        optimizer=jllama.OptimizerConfig(learning_rate=3e-3),
        training=jllama.LoopConfig(batch_size=16, steps=options.first_steps),
    )
    training = jllama.compile_training(config)
    state = training.init(jax.random.key(0))
    batches = data.training_batches(batch_size=16, seq_len=64, seed=0)
    for step in range(1, options.first_steps + 1):
        state, metrics = training.step(state, next(batches))
        if step % 100 == 0:
            print(f"first model, step {step}: loss {metrics.loss:.3f}")
    first_model = jllama.LanguageModel(config.model, state.params, data.tokenizer, template)
    jllama.save(first_model, checkpoint, "hf", overwrite=True)


def show_answers(model):
    """Print answers to questions that no pair has."""
    for seed, pair in enumerate(test_pairs):
        question = [{"role": "user", "content": pair["prompt"]}]
        answer = jllama.chat(model, question, max_new_tokens=40, temperature=1.0, seed=seed)
        print(f"  {pair['prompt']} {answer.text.strip()!r}")


model = jllama.load(checkpoint)
print("Answers before:")
show_answers(model)

# Train on the pairs. An answer's reward is beta times the change of its log-probability, and the
# margin is the reward of the chosen answer minus that of the rejected one: 0 before training.
margins = {0: 0.0}


def keep_margin(event):
    """Keep the margin of the held-out pairs."""
    if event.name == "evaluation":
        margins[event.step] = event.figures["validation_figures"]["margin"]


config = jllama.TrainConfig(
    model.config,
    init_from=str(checkpoint),
    run_dir=options.run_dir,
    overwrite=True,
    yes=True,
    data=jllama.DataConfig(f"{folder}/pairs.jsonl"),
    optimizer=jllama.OptimizerConfig(learning_rate=options.learning_rate, weight_decay=0.0),
    training=jllama.LoopConfig(
        batch_size=options.batch_size,
        seq_len=min(255, model.config.max_seq_len - 1),
        steps=options.steps,
        dpo_beta=options.beta,
        eval_every=max(1, options.steps // 2),
        sample_tokens=0,
    ),
)
jllama.train(config, callbacks=[keep_margin])

print("\nAnswers after:")
show_answers(jllama.load(options.run_dir))
for step, margin in margins.items():
    print(f"margin of held-out pairs at step {step}: {margin:.3f}")
