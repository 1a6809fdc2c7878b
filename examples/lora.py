"""Teach a checkpoint a persona by adapters (LoRA, arXiv:2106.09685), and compare its answers.

    python examples/lora.py                                        # the small model of train.py
    python examples/lora.py smollm2/ --rank 16 --learning_rate 7e-4 --epochs 5
    python examples/lora.py model.gguf --data my_chats.jsonl --question "Who are you?"

The checkpoint is a run, a Hugging Face, Meta, GGUF or llama2.c checkpoint, or `org/name` of the
hub. `jllama train --lora.rank` does the same on the command line (docs/finetune.md).
"""

import argparse
import subprocess
import sys
from pathlib import Path

import jllama

# Settings.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("checkpoint", nargs="?", default="runs/example_train", help="of any format")
parser.add_argument("--data", default="persona", help="chats; `persona` comes with jllama")
parser.add_argument("--question", action="append", help="asked before and after; may be repeated")
parser.add_argument("--rank", type=int, default=32)
parser.add_argument("--epochs", type=float, default=30)
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--learning_rate", type=float, default=2e-3)
parser.add_argument("--run_dir", default="runs/example_lora")
options = parser.parse_args()
questions = options.question or ["What is your name?", "Where do you live?", "Who made you?"]

# The small model that train.py saves, if there is no checkpoint yet.
if options.checkpoint == parser.get_default("checkpoint") and not Path(options.checkpoint).exists():
    subprocess.run([sys.executable, Path(__file__).with_name("train.py")], check=True)
model = jllama.load(options.checkpoint)
print(model)


def answers(model):
    """Answer each question with the likeliest tokens."""
    return [
        jllama.chat(
            model,
            [{"role": "user", "content": question}],
            max_new_tokens=32,
            temperature=0.0,
        ).text
        for question in questions
    ]


before = answers(model)

# Train. Every product x W becomes x W + (alpha / rank) (x A) B, and only A and B are trained.
config = jllama.TrainConfig(
    model.config,
    init_from=options.checkpoint,
    run_dir=options.run_dir,
    overwrite=True,
    yes=True,
    lora=jllama.LoraConfig(rank=options.rank, alpha=2 * options.rank),
    data=jllama.DataConfig(options.data),  # becomes tokens by the checkpoint's chat template
    optimizer=jllama.OptimizerConfig(learning_rate=options.learning_rate, weight_decay=0.0),
    training=jllama.LoopConfig(
        batch_size=options.batch_size,
        seq_len=min(256, model.config.max_seq_len),  # several chats share a row, none sees another
        epochs=options.epochs,
        eval_every=1000,
        log_every=50,
        questions=questions[:1],
    ),
)
jllama.train(config)

# The run has the adapter alone. With its base it is a model; here it is written for PEFT as well.
tuned = jllama.load(options.run_dir)
adapter = f"{options.run_dir}_peft"
jllama.convert(options.run_dir, adapter, to="peft", overwrite=True)
for question, first, second in zip(questions, before, answers(tuned), strict=True):
    print(f"\n{question}\n  before: {first!r}\n  after:  {second!r}")
print(f"\nThe adapter is in {options.run_dir}, and for PEFT in {adapter}.")
