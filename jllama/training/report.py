"""The report of a run: one HTML file with curves, samples, the configuration and the receipt."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jllama.files import write_text_whole
from jllama.training.run_folder import CONFIG, METRICS, REPORT, SAMPLES, read_lines

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { font-weight: 600; } svg { width: 100%; height: auto; }
pre { background: #f5f5f2; padding: 1rem; overflow-x: auto; white-space: pre-wrap; font-size: 13px; }
table { border-collapse: collapse; } td { padding: .15rem 1.5rem .15rem 0; } td:first-child { color: #666; }
"""


def write_report(folder: Path, receipt: dict[str, Any]) -> Path:
    """Write ``report.html`` from what the run has logged so far. ``receipt``: facts to list, by name."""
    metrics = list(read_lines(folder / METRICS))
    samples = list(read_lines(folder / SAMPLES))
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(fact))}</td></tr>" for name, fact in receipt.items()
    )
    texts = "".join(
        f"<h3>step {sample['step']}</h3><pre><b>{html.escape(sample['prompt'])}</b>{html.escape(sample['text'])}</pre>"
        for sample in reversed(samples)
    )
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(folder.name)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(folder.name)}</h1><table>{rows}</table>"
        f"<h2>Curves</h2>{_curves(metrics)}<h2>Samples</h2>{texts}"
        f"<h2>Configuration</h2><pre>{html.escape((folder / CONFIG).read_text())}</pre></html>"
    )
    path = folder / REPORT
    write_text_whole(path, page)
    return path


def _curves(metrics: list[dict[str, Any]]) -> str:
    """Loss, learning rate, gradient norm and speed against the step, as an SVG element."""
    train = [record for record in metrics if "loss" in record]
    evaluations = [record for record in metrics if "validation_loss" in record]
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(9, 6))
        axes = figure.subplots(2, 2, gridspec_kw={"hspace": 0.35})  # matplotlib's own layouts take three times as long
        panels = [
            ("loss", "loss (nats per token)"),
            ("learning_rate", "learning rate"),
            ("grad_norm", "gradient norm"),
            ("tokens_per_s", "tokens per second"),
        ]
        for axis, (key, title) in zip(axes.flat, panels, strict=True):
            axis.plot([record["step"] for record in train], [record[key] for record in train], label="training")
            axis.set(title=title, xlabel="step")
        axes[0, 0].plot(
            [record["step"] for record in evaluations],
            [record["validation_loss"] for record in evaluations],
            "o-",
            label="validation",
        )
        axes[0, 0].legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg")
    return drawing.getvalue().partition("<svg")[1] + drawing.getvalue().partition("<svg")[2]
