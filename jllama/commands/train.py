"""``jllama train``, also ``train.py``: train a model."""

import argparse
import dataclasses
import itertools
import signal
import sys

from jllama.commands.cli import parse
from jllama.core import UsageError
from jllama.system.places import as_place
from jllama.system.remote import fetch, list_files
from jllama.system.stop import Stopped
from jllama.training.config import TrainConfig

_COMMON = (
    "run_dir resume overwrite init_from preset data.path model.num_layers "
    "model.embed_dim training.batch_size training.seq_len training.steps optimizer.learning_rate"
)
_FINE_TUNING = ["--training.batch_size=4", "--optimizer.learning_rate=2e-5"]
_ADAPTERS = ["--training.batch_size=4", "--optimizer.learning_rate=2e-4"]


def main(argv: list[str], prog: str) -> int:
    """Train, and return 0; a stopped run returns 130 (Ctrl-C) or 143 (SIGTERM), as shells do."""
    config = read_options(argv, prog)
    for spec in config.rewards:
        if ".py:" in spec and spec not in read_options(argv, prog, "--reward=").rewards:
            raise UsageError(
                f"{config.run_dir} names Python code as its reward, {spec}: to run it, name it "
                "yourself, by --reward"
            )
    # Imported here, so that a mistake in the options is reported without waiting for JAX.
    from jllama.training.run import train

    try:
        train(config)
    except Stopped as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # only the end of the process is left
        print(stop, file=sys.stderr)
        return stop.exit_code
    return 0


def read_options(argv: list[str], prog: str, *changes: str) -> TrainConfig:
    """Return the options as a configuration.

    Two sets of defaults come before the files and flags in ``argv``, which override them: with
    ``--resume FOLDER`` the run's own ``config.yaml``, and with ``init_from`` a batch size and
    learning rate for a trained model. The ``model`` and ``data.tokenizer`` of a file are dropped
    in favor of those of ``init_from``; if they are flags, ``train`` checks them. ``changes`` come
    after a run's ``config.yaml``, and before ``argv``.
    """
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scan.add_argument("--resume", nargs="?")
    resume = scan.parse_known_args(argv)[0].resume
    if resume not in (None, "never", "auto"):
        file = as_place(resume) / "config.yaml"
        if list_files(file):
            file = fetch(file)
            # That file has the number of steps that its epochs came to.
            # Code that only a run's folder names is not run.
            options = ["--config", str(file), "--imports", "[]", "--training.epochs", "0"]
            options += ["--run_dir", resume]
            argv = [*options, *changes, *argv]
    config = parse(TrainConfig, argv, prog, ("config",), _COMMON)
    if not config.init_from:
        return config
    defaults = _ADAPTERS if config.trains_adapters else _FINE_TUNING
    config = parse(TrainConfig, [*defaults, *argv], prog, ("config",))
    # Parse the flags of the model and tokenizer again, without files.
    words = []
    for word, following in itertools.pairwise([*argv, "--"]):
        if word.startswith(("--model", "--data.tokenizer")):
            words.append(word)
            if "=" not in word and not following.startswith("--"):
                words.append(following)
    flags = parse(TrainConfig, words, prog)
    data = dataclasses.replace(config.data, tokenizer=flags.data.tokenizer)
    own_config = dataclasses.replace(config, model=flags.model, data=data)
    if not resume and config != own_config:
        note = "model and data.tokenizer of the file are not used: init_from brings its own"
        print(note, file=sys.stderr)
    return own_config
