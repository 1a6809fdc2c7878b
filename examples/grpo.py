"""Learn from rewards alone (GRPO, arXiv:2402.03300): sums, whose answers have a format.

    python examples/grpo.py
    python examples/grpo.py --advantage rloo --learning_rate 1e-3

A small model first learns to add from texts in several formats, some of them wrong. Then it answers
prompts, `score` says how good each answer is, and good answers become likelier. `jllama train grpo`
does the same for a file of prompts (docs/rewards.md); own_rewards.py is the loop inside.
"""

import argparse
import json
import random
from pathlib import Path

import jax

import jllama


def score(prompt, answers, row):
    """Return the reward of each answer to a prompt; `row` is its record in the file of prompts."""
    is_right = [answer == row["answer"] for answer in answers]
    has_format = [answer.startswith("<") and answer.endswith(">") for answer in answers]
    return [0.8 * right + 0.2 * form for right, form in zip(is_right, has_format, strict=True)]


def write_sums(folder):
    """Write texts to learn adding from, and prompts; no prompt is in the texts."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    sums = [(a, b) for a in range(20) for b in range(20)]
    generator.shuffle(sums)
    prompts = [{"prompt": f"{a}+{b}=", "answer": f"<{a + b}>"} for a, b in sums[:100]]
    texts = []
    for _ in range(20_000):
        a, b = generator.choice(sums[100:])
        answers = [f"<{a + b}>", f"<{a + b + 10}>", f"({a + b})", f"{a + b}."]
        texts.append({"text": f"{a}+{b}={generator.choice(answers)}"})
    for name, records in {"prompts": prompts, "texts": texts}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return prompts


def train_base(folder, num_steps):
    """Train a small model on the texts, and save it."""
    data = jllama.prepare_data(jllama.DataConfig(f"{folder}/texts.jsonl", tokenizer="bytes"))
    config = jllama.TrainConfig(
        jllama.LlamaConfig(259, num_layers=2, embed_dim=96, num_heads=4, max_seq_len=32),
        optimizer=jllama.OptimizerConfig(learning_rate=4e-3),
        training=jllama.LoopConfig(batch_size=32, seq_len=32, steps=num_steps),
    )
    training = jllama.compile_training(config)
    state = training.init(jax.random.key(0))
    batches = data.training_batches(batch_size=32, seq_len=32, seed=0)
    for step in range(1, num_steps + 1):
        state, metrics = training.step(state, next(batches))
        if step % 200 == 0:
            print(f"base, step {step}: loss {metrics.loss:.3f}")
    base = jllama.LanguageModel(config.model, state.params, data.tokenizer)
    jllama.save(base, folder / "base", "hf", overwrite=True)


def show_answers(checkpoint, prompts):
    """Print several answers to each of a few prompts."""
    model = jllama.load(checkpoint)
    requests = [
        jllama.Prompt(row["prompt"], jllama.SamplingParams(seed=seed), max_new_tokens=8)
        for row in prompts
        for seed in range(4)
    ]
    completions = jllama.generate(model, requests)
    answers = [completion.text for completion in completions]
    for number, row in enumerate(prompts):
        print(f"  {row['prompt']:<8}{'  '.join(answers[4 * number : 4 * number + 4])}")


def main():
    """Train the base, and let it learn from rewards."""
    parser = argparse.ArgumentParser(description="Learn sums from rewards.")
    parser.add_argument("--base_steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="in each step")
    parser.add_argument("--group_size", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--advantage", default="group", choices=["group", "centered", "rloo"])
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--run_dir", default="runs/example_grpo")
    options = parser.parse_args()

    folder = Path(f"{options.run_dir}_data")
    prompts = write_sums(folder)
    train_base(folder, options.base_steps)
    base = f"{folder}/base"
    print("Answers before:")
    show_answers(base, prompts[:4])

    config = jllama.TrainConfig(
        jllama.LlamaConfig(),  # the checkpoint's own is used
        init_from=base,
        run_dir=options.run_dir,
        overwrite=True,
        yes=True,
        data=jllama.DataConfig(f"{folder}/prompts.jsonl", validation_fraction=0.2),
        reward=f"{__file__}:score",
        sampling=jllama.SamplingParams(temperature=1.0),
        optimizer=jllama.OptimizerConfig(
            learning_rate=options.learning_rate, schedule="constant", weight_decay=0.0
        ),
        training=jllama.LoopConfig(
            batch_size=options.prompts * options.group_size,
            seq_len=31,
            steps=options.steps,
            eval_every=options.steps,
            log_every=5,
            sample_tokens=0,
            grpo=jllama.GrpoConfig(
                group_size=options.group_size, max_answer_tokens=8, advantage=options.advantage
            ),
        ),
    )
    evaluation = jllama.train(config)
    print("\nAnswers after:")
    show_answers(options.run_dir, prompts[:4])
    print(evaluation)


if __name__ == "__main__":
    main()
