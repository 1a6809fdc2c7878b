"""``python -m jllama train``, also ``train.py``."""

from collections.abc import Sequence

from jllama.commands.cli import parse
from jllama.training.config import TrainConfig
from jllama.training.loop import train


def main(argv: Sequence[str], prog: str) -> int:
    """Train as the options say."""
    train(parse(TrainConfig, argv, prog))
    return 0
