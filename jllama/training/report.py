"""The report of a run: one HTML file with curves, samples, the configuration and the receipt."""

from __future__ import annotations

import dataclasses
import html
import importlib.metadata
import io
import math
import platform
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jllama.data.tokens import Dataset
from jllama.files import read_lines, write_text_whole
from jllama.parameters import count_parameters
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation
from jllama.training.run_folder import CONFIG, METRICS, REPORT, SAMPLES, command

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; } svg { width: 100%; height: auto; }
pre { background: #8881; padding: 1rem; overflow-x: auto; white-space: pre-wrap; font-size: 13px; }
table { border-collapse: collapse; } td { padding: .15rem 1.5rem .15rem 0; vertical-align: top; }
td:first-child { opacity: .7; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1rem; }
"""
_TEXT = "#010203"  # stands for the page's own text color, which matplotlib cannot name
_CHARTS = {
    "loss": "loss (nats per token)",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens per second",
}


def write_report(
    config: TrainConfig, data: Dataset, devices: str, evaluation: Evaluation | None, elapsed_s: float
) -> None:
    """Write a run's ``report.html``: all it has logged so far, on any screen, light or dark, and what to do next."""
    folder, text = Path(config.run_dir), html.escape
    metrics, samples = read_lines(folder / METRICS), read_lines(folder / SAMPLES)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jllama", "jax", "flax", "optax")]
    deeper = dataclasses.replace(config.model, num_layers=config.model.num_layers + 1)
    parameters, gzip = count_parameters(config.model), data.gzip_bits_per_byte
    last = next((record for record in reversed(metrics) if "loss" in record), None)
    facts = {
        "parameters": f"{parameters:,}, {count_parameters(deeper) - parameters:,} of them in each layer",
        "text": config.data.path,
        "training text": f"{data.train_counts.bytes:,} bytes, {data.train_counts.tokens:,} tokens",
        "validation text": f"{data.validation_counts.bytes:,} bytes, {data.validation_counts.tokens:,} tokens",
        "devices": devices,
        "time": f"{elapsed_s:.0f} s",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in (vars(evaluation) if evaluation else {}).items()},
        "bits per byte of gzip -9": f"{gzip:.4f} (a model that beats gzip has learned something)",
        "loss of a blind guess": f"{math.log(config.model.vocab_size):.4f} (ln {config.model.vocab_size:,})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    if last:
        facts["speed"] = f"{last['tokens_per_s']:,.0f} tokens/s, {1000 * last['step_s']:,.1f} ms a step"
        facts |= {"share of the devices' peak (MFU)": f"{last['mfu']:.1%}"} if last["mfu"] else {}
    rows = [f"<tr><td>{text(name)}</td><td>{text(fact)}</td></tr>" for name, fact in facts.items()]
    texts = [
        f"<h3>step {sample['step']}</h3><pre><b>{text(sample['prompt'])}</b>{text(sample['text'])}</pre>"
        for sample in reversed(samples)
    ]
    commands = {"sample": sample_command(config), "go on": command("train", "--resume", folder)}
    following = [f"<h3>{name}</h3><pre>{text(line)}</pre>" for name, line in commands.items()]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'><title>{text(folder.name)}</title>"
        f"<style>{_STYLE}</style><h1>{text(folder.name)}</h1><table>{''.join(rows)}</table>"
        f"<h2>Curves</h2><div class=charts>{''.join(_chart(metrics, key) for key in _CHARTS)}</div>"
        f"<h2>Samples</h2>{''.join(texts)}<h2>Next</h2>{''.join(following)}"
        f"<h2>Configuration</h2><pre>{text((folder / CONFIG).read_text())}</pre></html>"
    )
    write_text_whole(folder / REPORT, page)


def sample_command(config: TrainConfig) -> str:
    """The command line that samples from a run."""
    return command("sample", "--checkpoint", config.run_dir, "--prompt", config.training.sample_prompt)


def _chart(metrics: list[dict[str, Any]], key: str) -> str:
    """One figure against the step, as an SVG element in the colors of the page."""
    style: dict[Any, Any] = {f"{name}.color": _TEXT for name in ("text", "xtick", "ytick")}
    style |= {"axes.edgecolor": _TEXT, "axes.labelcolor": _TEXT, "axes.facecolor": "none", "figure.facecolor": "none"}
    style |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.2, 2.8))
        axis = figure.add_axes((0.17, 0.15, 0.81, 0.74))  # matplotlib's own layouts are slow
        kinds = [(key, "-", "training")] + [("validation_loss", "o-", "validation")] * (key == "loss")
        for name, line, label in kinds:
            records = [record for record in metrics if name in record]
            axis.plot([record["step"] for record in records], [record[name] for record in records], line, label=label)
        axis.set(title=_CHARTS[key], xlabel="step")
        if len(kinds) > 1:
            axis.legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg")
    return drawing.getvalue()[drawing.getvalue().index("<svg") :].replace(_TEXT, "currentColor")
