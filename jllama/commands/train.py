"""``python -m jllama train``, also ``train.py``."""

import argparse
import dataclasses
import itertools
import signal
import sys
from pathlib import Path

from jllama.commands.cli import parse
from jllama.stop import Stopped
from jllama.training.config import TrainConfig

_COMMON = (
    "run_dir resume overwrite init_from preset data.path model.num_layers model.embed_dim training.batch_size "
    "training.seq_len training.steps optimizer.learning_rate"
)
_FINE_TUNING = ["--training.batch_size=4", "--optimizer.learning_rate=2e-5"]
_ADAPTERS = [_FINE_TUNING[0], "--optimizer.learning_rate=2e-4"]


def main(argv: list[str], prog: str) -> int:
    """Train as the options say. A run that was stopped gives 130 (Ctrl-C) or 143 (SIGTERM), as shells have it."""
    config = read_options(argv, prog)
    from jllama.training.loop import (
        train,
    )  # not at the top: a mistake in the options should not wait for JAX

    try:
        train(config)
    except Stopped as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left is the end of the process
        print(stop, file=sys.stderr)
        return stop.exit_code
    return 0


def read_options(argv: list[str], prog: str) -> TrainConfig:
    """The options as a configuration. Before the files and flags given come two sets of defaults that they override:

    with ``--resume FOLDER`` that run's own ``config.yaml``, and with ``init_from`` what suits a trained model. A file's
    ``model`` and ``data.tokenizer`` give way to those that ``init_from`` brings; flags are left for ``train`` to judge.
    """
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--resume", nargs="?")
    resume = scan.parse_known_args(argv)[0].resume
    if resume not in (None, "never", "auto") and (own := Path(resume) / "config.yaml").is_file():
        argv = [
            "--config",
            str(own),
            "--training.epochs",
            "0",
            "--run_dir",
            resume,
            *argv,
        ]  # they are resolved
    config = parse(TrainConfig, argv, prog, ("config",), _COMMON.split())
    if not config.init_from:
        return config
    suited = _ADAPTERS if config.trains_adapters else _FINE_TUNING
    config, words = parse(TrainConfig, [*suited, *argv], prog, ("config",)), []
    for word, following in itertools.pairwise([*argv, "--"]):
        if word.startswith(("--model", "--data.tokenizer")):
            words += [word] if "=" in word or following.startswith("--") else [word, following]
    flags = parse(TrainConfig, words, prog)
    data = dataclasses.replace(config.data, tokenizer=flags.data.tokenizer)
    own_config = dataclasses.replace(config, model=flags.model, data=data)
    if not resume and config != own_config:
        print(
            "model and data.tokenizer of the file are not used: init_from brings its own",
            file=sys.stderr,
        )
    return own_config
