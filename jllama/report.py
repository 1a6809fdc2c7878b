"""The page of a run, or of several, ``report.html``, and the commands that runs tell their users."""

import contextlib
import html
import importlib.metadata
import io
import itertools
import math
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import jllama
from jllama.checkpoints.run import CONFIG, METRICS, SAMPLES, read_config, recognizes
from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.files import fault_of, read_lines, write_text_whole
from jllama.parameters import count_parameters

REPORT = "report.html"
_HEAD = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
_COLORS = [
    "#2a78c2",
    "#d0611c",
    "#2c8f5a",
    "#b0568f",
    "#8c7300",
    "#7d6bc4",
    "#c24b4b",
    "#2b8a97",
]  # on light and dark
_LOOK: dict[Any, Any] = {
    "axes.facecolor": "none",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9,
    "svg.fonttype": "none",
}
_CHARTS = {
    "loss": "loss (nats per token)",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens per second",
}
_NUMBERS = {
    "validation loss": "{validation_loss:.4f}",
    "perplexity": "{perplexity:.4f}",
    "bits per byte": "{bits_per_byte:.4f}",
    "padding": "{padding:.1%}",
    "time": "{elapsed_s:.0f} s",
    "speed": "{tokens_per_s:,.0f} tokens/s, {step_ms:,.1f} ms a step",
    "share of peak (MFU)": "{mfu:.1%}",
}


def command(*words: object) -> str:
    """The command line of jllama with these words, to be pasted into a shell."""
    return shlex.join(["python", "-m", "jllama", *map(str, words)])


def run_facts(
    data: dict[str, str], devices: str, driver: str, trained: int, frozen: int
) -> dict[str, str]:
    """What a run's page says of its parameters, its data and its machine: logged with its metrics."""
    versions = [f"jllama {jllama.__version__}"]  # which need not be installed
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax")]
    parameters = f"{trained:,} trained, {f'{frozen:,}' if frozen else 'none'} frozen"
    program = ", ".join(
        [f"Python {platform.python_version()}", *versions, *([driver] if driver else [])]
    )
    return {"parameters": parameters, **data, "devices": devices, "versions": program}


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Write the page of a run: all it has logged so far, on any screen, light or dark, and what to do next. Several
    runs share one, with their curves in the same charts. JllamaError for a folder that is not a run's.
    """
    several, config, curves, facts, written = len(folders) > 1, {}, {}, [], {}
    for folder in folders:
        if not recognizes(folder):
            raise JllamaError(f"{folder} is not the folder of a run: it has no {CONFIG}")
        name = (
            folder.name if [each.name for each in folders].count(folder.name) == 1 else str(folder)
        )
        with fault_of(
            f"{folder} does not hold what a run logs",
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
        ):
            config, model, _ = read_config(folder)
            lines = read_lines(folder / METRICS)
            curves[name] = [line for line in lines if isinstance(line["step"], int)]
            facts.append(_facts(model, config["data"], curves[name]))
            for title, part in _written(folder, config["training"].get("questions", ())).items():
                written[f"{title} of {name}" if several else title] = part
    marks = [
        f"<b style='color:{_COLORS[at % 8]}'>&#9632;</b> {html.escape(name)}"
        for at, name in enumerate(curves)
    ]
    charts = "".join(_chart(curves, key) for key in _CHARTS)
    legend = f"<p>{' &emsp; '.join(marks)} &emsp; validation is dashed</p>" if several else ""
    parts = {", ".join(curves): table([*curves] if several else [], facts)}
    parts |= {"Curves": f"{legend}<div class=charts>{charts}</div>", **written}
    if not several:
        sample = (
            "sample",
            "--checkpoint",
            folders[0],
            "--prompt",
            config["training"]["sample_prompt"],
        )
        words = ("chat", folders[0]) if "training chats" in facts[0] else sample
        following = {words[0]: command(*words), "go on": command("train", "--resume", folders[0])}
        parts["Next"] = "".join(
            f"<h3>{what}</h3><pre>{html.escape(line)}</pre>" for what, line in following.items()
        )
        parts["Configuration"] = (
            f"<pre>{html.escape((folders[0] / CONFIG).read_text(encoding='utf-8'))}</pre>"
        )
    write_page(target, ", ".join(curves), parts)


def write_page(target: Path, title: str, parts: Mapping[str, str]) -> None:
    """Write a page of parts, HTML by their titles; empty ones are left out."""
    page = "".join(f"<h2>{html.escape(name)}</h2>{part}" for name, part in parts.items() if part)
    write_text_whole(target, f"{_HEAD}<title>{html.escape(title)}</title>{page}</html>")


def bars(measured: Mapping[str, Sequence[float]], label: str) -> str:
    """A figure with a bar for each name, its median, and the range of what was measured, as an SVG element."""
    middles, height = [*map(statistics.median, measured.values())], 0.5 + 0.4 * len(measured)
    ranges = [
        (middle - min(each), max(each) - middle)
        for middle, each in zip(middles, measured.values(), strict=True)
    ]
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(8.4, height))
        axis = figure.add_axes((0.17, 0.5 / height, 0.81, 1 - 0.5 / height), xlabel=label)
        axis.barh(
            [*measured],
            middles,
            0.6,
            xerr=[*zip(*ranges, strict=True)],
            color=_COLORS,
            ecolor="#888",
        )
        axis.invert_yaxis()
        return _svg(figure)


def _facts(
    model: LlamaConfig, data: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """What a run's page says first: what it has logged of itself, and its last numbers."""
    facts = {
        "parameters": f"{count_parameters(model):,}",
        "data": f"{data.get('mixture') or data['path']}",
    }
    for line in metrics:
        facts |= line.get("facts", {})
        values = {"step_s": math.nan, **line, **line.get("final", {})}
        for name, text in _NUMBERS.items():
            with contextlib.suppress(
                KeyError, TypeError
            ):  # it is in another line, or was not known
                facts[name] = text.format(**values, step_ms=1000 * values["step_s"])
    return {
        **facts,
        "loss of a blind guess": f"{math.log(model.vocab_size):.4f} (ln {model.vocab_size:,})",
    }


def _written(folder: Path, questions: Sequence[str]) -> dict[str, str]:
    """What a run wrote: the answers to its questions side by side, by step, and samples, the latest first."""
    answers, samples = {}, ""
    for line in read_lines(folder / SAMPLES, "text"):
        step = f"step {line['step']}"
        if line["prompt"] in questions:
            answers.setdefault(step, {})[line["prompt"]] = line["text"]
        else:
            samples = f"<h3>{html.escape(step)}</h3><pre>{html.escape(line['prompt'] + line['text'])}</pre>{samples}"
    return {
        "Answers": table([*answers], [*answers.values()]) if answers else "",
        "Samples": samples,
    }


def table(heads: Sequence[str], columns: Sequence[Mapping[str, object]]) -> str:
    """A table with a row for each name that a column has; where it is too wide, it scrolls by itself."""
    rows = [
        [name, *(column.get(name, "") for column in columns)]
        for name in dict.fromkeys(itertools.chain(*columns))
    ]
    lines = ["".join(f"<td>{html.escape(str(cell))}" for cell in row) for row in rows]
    lines = (
        ["".join(f"<th>{html.escape(head)}" for head in ["", *heads]), *lines] if heads else lines
    )
    return f"<div class=wide><table>{''.join(f'<tr>{line}' for line in lines)}</table></div>"


def _chart(runs: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> str:
    """One figure against the step, of a run or several, as an SVG element in the colors of the page."""
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(4.2, 2.8))
        axis = figure.add_axes(
            (0.17, 0.15, 0.81, 0.74), title=_CHARTS[key], xlabel="step"
        )  # layouts are slow
        for index, metrics in enumerate(runs.values()):
            for name, style, label in (
                (key, "-", "training"),
                (f"validation_{key}", "o--", "validation"),
            ):
                records = [
                    line
                    for line in metrics
                    if isinstance(line.get(name), float) and "skipped" not in line
                ]
                color = _COLORS[(index if len(runs) > 1 else label == "validation") % len(_COLORS)]
                points = [line["step"] for line in records], [line[name] for line in records]
                axis.plot(*points, style, label=label, color=color, linewidth=1.2, markersize=4)
        if key == "loss" and len(runs) == 1:
            axis.legend(frameon=False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    return drawing.getvalue()[drawing.getvalue().index("<svg") :].replace("#000000", "currentColor")
