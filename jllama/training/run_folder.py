"""What training writes into the folder of a run, besides the checkpoints, and with what changes a run may go on."""

import contextlib
import dataclasses
import functools
import html
import importlib.metadata
import io
import json
import math
import platform
import re
import shlex
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from flax.traverse_util import flatten_dict
from matplotlib.figure import Figure

from jllama.checkpoints.run import CONFIG, read_config
from jllama.config import DistributedConfig
from jllama.data.tokens import Dataset
from jllama.errors import JllamaError, UsageError
from jllama.files import append_line, read_lines, write_text_whole
from jllama.parameters import count_parameters
from jllama.training.config import OptimizerConfig, TrainConfig
from jllama.training.metrics import Evaluation
from jllama.training.optimizer import learning_rate_at

METRICS, SAMPLES, REPORT, HISTORY = "metrics.jsonl", "samples.jsonl", "report.html", "config.history.jsonl"

# How the names of options begin that may, or must not, differ when a run goes on; all others do when that is asked for.
# The fingerprint that checkpoints hold speaks for the data, epochs are resolved to steps.
_IGNORED = r"run_dir|resume|distributed|training\.epochs"
_FIXED = r"model|init_from|rope_factor|seed|optimizer\.name|training\.(batch_size|seq_len)|data\.(tokenizer|vocab_size)"
_FREE = r"mesh|sampling|data|training\.(accumulation|attention|compiler_|remat|log_every|keep_|save_|eval_|sample_)"

_HEAD = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content='width=device-width, initial-scale=1'><style>
:root { color-scheme: light dark } svg { width: 100%; height: auto } svg text { fill: currentColor }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { background: #8881; padding: 1rem; white-space: pre-wrap; font-size: 13px }
td { padding: .15rem 1.5rem .15rem 0; vertical-align: top }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1rem }</style>"""
_LOOK: dict[Any, Any] = {"axes.facecolor": "none", "figure.facecolor": "none", "font.size": 9, "svg.fonttype": "none"}
_LOOK |= {"axes.spines.top": False, "axes.spines.right": False}
_CHARTS = {"loss": "loss (nats per token)", "learning_rate": "learning rate"}
_CHARTS |= {"grad_norm": "gradient norm", "tokens_per_s": "tokens per second"}


def command(*words: object) -> str:
    """The command line of jllama with these words, to be pasted into a shell."""
    return shlex.join(["python", "-m", "jllama", *map(str, words)])


def write_config(folder: Path, config: TrainConfig, step: int) -> None:
    """Write a run's resolved configuration, what it replaces to the history; drop what was logged after ``step``."""
    fields = as_written(config)
    if step and (before := read_config(folder)) != fields:
        append_line(folder / HISTORY, {"until_step": step, "config": before})
    write_text_whole(folder / CONFIG, yaml.safe_dump(fields, sort_keys=False))
    for name in (METRICS, SAMPLES):
        kept = [line for line in read_lines(folder / name) if line["step"] <= step and "final" not in line]
        write_text_whole(folder / name, "".join(json.dumps(line) + "\n" for line in kept))


def as_written(config: TrainConfig) -> dict[str, Any]:
    """A configuration as ``config.yaml`` has it: enough to start the same run again."""
    plain = dataclasses.replace(config, resume="never", resume_with_changes=False, distributed=DistributedConfig())
    return yaml.safe_load(yaml.safe_dump(dataclasses.asdict(plain), sort_keys=False))


def changes_on_resume(folder: Path, config: TrainConfig, step: int) -> list[str]:
    """How a configuration differs from that of the run it goes on with, in words; JllamaError if it may not so."""
    flat = functools.partial(flatten_dict, is_leaf=lambda path, _: len(path) == 2, sep=".")
    now, before = flat(as_written(config)), read_config(folder)
    was = now | flat(before)
    changed = [name for name in now if was[name] != now[name] and not re.match(_IGNORED, name)]
    told = {name: f"{name} was {was[name]} and is {now[name]}" for name in changed}
    fixed = [text for name, text in told.items() if re.match(_FIXED, name)]
    free = [text for name, text in told.items() if re.match(_FREE, name)]
    asked = [text for text in told.values() if text not in free]
    if any(re.match(r"training\.steps|optimizer", name) for name in told):
        with contextlib.suppress(KeyError, TypeError, UsageError):  # of a config.yaml edited by hand
            old = learning_rate_at(step - 1, OptimizerConfig(**before["optimizer"]), before["training"]["steps"])
            new = learning_rate_at(step, config.optimizer, config.training.steps)
            asked.append(f"the learning rate was {old:.2e} at step {step:,} and is {new:.2e} at step {step + 1:,}")
    if refused := fixed or ([] if config.resume_with_changes else asked):
        leave = "leave out what has changed," + (" or go on so with resume_with_changes," if not fixed else "")
        raise JllamaError(f"{', '.join(refused)}: {leave} or start a new run with another run_dir")
    return free + asked


def write_report(config: TrainConfig, data: Dataset, devices: str, result: Evaluation | None, elapsed_s: float) -> None:
    """Write a run's ``report.html``: all it has logged so far, on any screen, light or dark, and what to do next."""
    folder, text, counts = Path(config.run_dir), html.escape, data.counts
    metrics, samples = read_lines(folder / METRICS), read_lines(folder / SAMPLES)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jllama", "jax", "flax", "optax")]
    facts = {
        "parameters": f"{count_parameters(config.model):,}",
        "text": config.data.path,
        "training text": f"{counts['train']['bytes']:,} bytes, {len(data.train):,} tokens",
        "validation text": f"{counts['validation']['bytes']:,} bytes, {len(data.validation):,} tokens",
        "devices": devices,
        "time": f"{elapsed_s:.0f} s",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in (vars(result) if result else {}).items()},
        "bits per byte of gzip -9": f"{data.gzip_bits_per_byte:.4f} (a model that beats gzip has learned something)",
        "loss of a blind guess": f"{math.log(config.model.vocab_size):.4f} (ln {config.model.vocab_size:,})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    for last in [record for record in metrics if "loss" in record][-1:]:
        facts["speed"] = f"{last['tokens_per_s']:,.0f} tokens/s, {1000 * last['step_s']:,.1f} ms a step"
        facts |= {"share of the devices' peak (MFU)": f"{last['mfu']:.1%}"} if last["mfu"] else {}
    rows = [f"<tr><td>{text(name)}</td><td>{text(fact)}</td></tr>" for name, fact in facts.items()]
    written = {f"step {each['step']}": each["prompt"] + each["text"] for each in reversed(samples)}
    sampling = command("sample", "--checkpoint", folder, "--prompt", config.training.sample_prompt)
    following = {"sample": sampling, "go on": command("train", "--resume", folder)}
    parts = {
        text(folder.name): f"<table>{''.join(rows)}</table>",
        "Curves": f"<div class=charts>{''.join(_chart(metrics, key) for key in _CHARTS)}</div>",
        "Samples": "".join(f"<h3>{step}</h3><pre>{text(sample)}</pre>" for step, sample in written.items()),
        "Next": "".join(f"<h3>{what}</h3><pre>{text(line)}</pre>" for what, line in following.items()),
        "Configuration": f"<pre>{text((folder / CONFIG).read_text())}</pre>",
    }
    page = "".join(f"<h2>{title}</h2>{part}" for title, part in parts.items())
    write_text_whole(folder / REPORT, f"{_HEAD}<title>{text(folder.name)}</title>{page}</html>")


def _chart(metrics: list[dict[str, Any]], key: str) -> str:
    """One figure against the step, as an SVG element in the colors of the page."""
    with matplotlib.rc_context(_LOOK):
        figure, drawing = Figure(figsize=(4.2, 2.8)), io.StringIO()
        axis = figure.add_axes((0.17, 0.15, 0.81, 0.74), title=_CHARTS[key], xlabel="step")  # layouts are slow
        for name, line, label in ((key, "-", "training"), (f"validation_{key}", "o-", "validation")):
            records = [record for record in metrics if name in record]
            axis.plot([record["step"] for record in records], [record[name] for record in records], line, label=label)
        if key == "loss":
            axis.legend(frameon=False)
        figure.savefig(drawing, format="svg")
    return drawing.getvalue()[drawing.getvalue().index("<svg") :].replace("#000000", "currentColor")
