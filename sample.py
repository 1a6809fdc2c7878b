"""The same as ``python -m jllama sample``."""

import sys

from jllama.commands.cli import run

sys.exit(run("sample", prog="python sample.py"))
