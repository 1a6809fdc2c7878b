"""The report of a run: one HTML file with curves, samples, the configuration and the receipt."""

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


def write_report(config: TrainConfig, data: Dataset, devices: str, result: Evaluation | None, elapsed_s: float) -> None:
    """Write a run's ``report.html``: all it has logged so far, on any screen, light or dark, and what to do next."""
    folder, text, counts = Path(config.run_dir), html.escape, data.counts
    metrics, samples = read_lines(folder / METRICS), read_lines(folder / SAMPLES)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jllama", "jax", "flax", "optax")]
    vocab_size = config.model.vocab_size
    facts = {
        "parameters": f"{count_parameters(config.model):,}",
        "text": config.data.path,
        "training text": f"{counts['train']['bytes']:,} bytes, {len(data.train):,} tokens",
        "validation text": f"{counts['validation']['bytes']:,} bytes, {len(data.validation):,} tokens",
        "devices": devices,
        "time": f"{elapsed_s:.0f} s",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in (vars(result) if result else {}).items()},
        "bits per byte of gzip -9": f"{data.gzip_bits_per_byte:.4f} (a model that beats gzip has learned something)",
        "loss of a blind guess": f"{math.log(vocab_size):.4f} (ln {vocab_size:,})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    for last in [record for record in metrics if "loss" in record][-1:]:
        facts["speed"] = f"{last['tokens_per_s']:,.0f} tokens/s, {1000 * last['step_s']:,.1f} ms a step"
        facts |= {"share of the devices' peak (MFU)": f"{last['mfu']:.1%}"} if last["mfu"] else {}
    rows = [f"<tr><td>{text(name)}</td><td>{text(fact)}</td></tr>" for name, fact in facts.items()]
    texts = [(f"step {each['step']}", text(each["prompt"] + each["text"])) for each in reversed(samples)]
    sampling = command("sample", "--checkpoint", folder, "--prompt", config.training.sample_prompt)
    following = [("sample", sampling), ("go on", command("train", "--resume", folder))]
    parts = {
        text(folder.name): f"<table>{''.join(rows)}</table>",
        "Curves": f"<div class=charts>{''.join(_chart(metrics, key) for key in _CHARTS)}</div>",
        "Samples": "".join(f"<h3>{step}</h3><pre>{sample}</pre>" for step, sample in texts),
        "Next": "".join(f"<h3>{what}</h3><pre>{text(line)}</pre>" for what, line in following),
        "Configuration": f"<pre>{text((folder / CONFIG).read_text())}</pre>",
    }
    page = "".join(f"<h2>{title}</h2>{part}" for title, part in parts.items())
    write_text_whole(folder / REPORT, f"{_HEAD}<title>{text(folder.name)}</title>{page}</html>")


def _chart(metrics: list[dict[str, Any]], key: str) -> str:
    """One figure against the step, as an SVG element in the colors of the page."""
    with matplotlib.rc_context(_LOOK):
        figure, drawing = Figure(figsize=(4.2, 2.8)), io.StringIO()
        axis = figure.add_axes((0.17, 0.15, 0.81, 0.74), title=_CHARTS[key], xlabel="step")  # layouts are slow
        kinds = [(key, "-", "training")] + [("validation_loss", "o-", "validation")] * (key == "loss")
        for name, line, label in kinds:
            records = [record for record in metrics if name in record]
            axis.plot([record["step"] for record in records], [record[name] for record in records], line, label=label)
        if len(kinds) > 1:
            axis.legend(frameon=False)
        figure.savefig(drawing, format="svg")
    return drawing.getvalue()[drawing.getvalue().index("<svg") :].replace("#000000", "currentColor")
