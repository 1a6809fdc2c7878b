"""``jllama speedrun``: from text to a chat model, by one command."""

import dataclasses
import math
import sys
from pathlib import Path

from jllama.commands import cli
from jllama.commands.cli import parse
from jllama.core import check_fields
from jllama.system.errors import shell_command
from jllama.system.places import local_path
from jllama.training.config import TrainConfig

_COMMON = "depth run_dir corpus chats tokens_per_parameter price topology plan base.training.steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedrunOptions:
    """Make a chat model from text: a tokenizer, a base, chats, rewards, a report card, and files.

    Each stage is an ordinary command, which is printed, and each model is an ordinary run. What is
    finished is not done again, so the same command goes on after a stop.

    Examples:
        --depth 2 --plan
        --corpus my_texts/ --chats my_chats.jsonl
        --depth 20 --topology h100:8 --price 24

    Args:
        depth: the number of layers, which also decides the width, heads, context, vocabulary,
            batch, learning rates and steps (docs/speedrun.md has the rules).
        run_dir: the folder of everything, on this machine.
        corpus: the text of the base, as data.path of training; hf://datasets/... is a stream.
        chats: the chats to learn from, beside those of the tasks: persona, a file or a URL.
        tokens_per_parameter: the length of the base's training.
        price: what this machine, or the devices of the topology, cost in an hour.
        topology: plan for devices that are absent, as jllama plan, and end.
        plan: show the plan, and end.
        base: options of the first run, which learns text.
        chat: options of the second run, which learns chats.
        rewards: options of the third run, which learns from rewards.
    """

    base: TrainConfig
    chat: TrainConfig
    rewards: TrainConfig
    depth: int = 3
    run_dir: str = "runs/speedrun"
    corpus: str = "stdlib"
    chats: str = "persona"
    tokens_per_parameter: float = 2.0
    price: float = 0.0
    topology: str = ""
    plan: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", "depth", lambda depth: 1 <= depth <= 128, "from 1 to 128")
        check_fields(self, "", "run_dir corpus chats", bool, "given, or left out for its default")
        local_path(self.run_dir)
        positive = "tokens_per_parameter"
        check_fields(self, "", positive, lambda ratio: 0 < ratio < math.inf, "positive and finite")
        check_fields(self, "", "price", lambda price: 0 <= price < math.inf, "0 or positive")


def main(argv: list[str], prog: str) -> int:
    """Plan the stages, run those that are not finished, and return the exit code of the last."""
    flags = ["--config", "speedrun"]
    options = parse(SpeedrunOptions, [*flags, *argv], prog, (), _COMMON)
    from jllama.lab import speedrun

    # The rules read the options, and what is given by name overrides them.
    for rule in speedrun.RULES:
        flags += [f"--{name}={value}" for name, value in rule(options).items()]
        options = parse(SpeedrunOptions, [*flags, *argv], prog)

    # The plan; a process of many must not start its devices before it knows the others.
    ends = options.plan or bool(options.topology)
    is_alone = not options.base.distributed.coordinator
    if ends or (is_alone and not Path(options.base.run_dir).exists()):
        for line in speedrun.plan_stages(options):
            print(line, file=sys.stderr)
    if ends:
        return 0

    # The stages.
    for name, command in speedrun.write_stages(options):
        print(f"{name}: {shell_command(*command)}", file=sys.stderr)
        code = cli.main([str(word) for word in command])
        if code:
            print(f"To go on: {shell_command('speedrun', *argv)}", file=sys.stderr)
            return code
    return 0
