"""The page of a run, ``report.html``, and the commands that runs tell their users."""

import html
import importlib.metadata
import io
import math
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jllama.checkpoints.run import CONFIG, METRICS, SAMPLES, read_config, read_model_config
from jllama.data.tokens import Dataset
from jllama.files import read_lines, write_text_whole
from jllama.parameters import count_parameters

REPORT = "report.html"
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


def write_report(folder: Path, data: Dataset, devices: str, losses: Mapping[str, float], elapsed_s: float) -> None:
    """Write a run's ``report.html``: all it has logged so far, on any screen, light or dark, and what to do next."""
    text, counts, config, model = html.escape, data.counts, read_config(folder), read_model_config(folder)
    metrics, samples = read_lines(folder / METRICS), read_lines(folder / SAMPLES)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jllama", "jax", "flax", "optax")]
    facts = {
        "parameters": f"{count_parameters(model):,}",
        "text": config["data"]["path"],
        "training text": f"{counts['train']['bytes']:,} bytes, {len(data.train):,} tokens",
        "validation text": f"{counts['validation']['bytes']:,} bytes, {len(data.validation):,} tokens",
        "devices": devices,
        "time": f"{elapsed_s:.0f} s",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in losses.items()},
        "bits per byte of gzip -9": f"{data.gzip_bits_per_byte:.4f} (a model that beats gzip has learned something)",
        "loss of a blind guess": f"{math.log(model.vocab_size):.4f} (ln {model.vocab_size:,})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    for last in [record for record in metrics if "loss" in record][-1:]:
        facts["speed"] = f"{last['tokens_per_s']:,.0f} tokens/s, {1000 * last['step_s']:,.1f} ms a step"
        facts |= {"share of the devices' peak (MFU)": f"{last['mfu']:.1%}"} if last["mfu"] else {}
    rows = [f"<tr><td>{text(name)}</td><td>{text(fact)}</td></tr>" for name, fact in facts.items()]
    written = {f"step {each['step']}": each["prompt"] + each["text"] for each in reversed(samples)}
    sampling = command("sample", "--checkpoint", folder, "--prompt", config["training"]["sample_prompt"])
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
