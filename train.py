"""The same as ``python -m jllama train``."""

import sys

from jllama.commands.cli import run

sys.exit(run("train", prog="python train.py"))
