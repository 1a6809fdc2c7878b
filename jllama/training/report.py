"""The page of one or several runs, ``report.html``, and the commands that runs show their users."""

import contextlib
import html
import importlib.metadata
import io
import itertools
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from flax.traverse_util import flatten_dict
from matplotlib.figure import Figure

import jllama
from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.formats.run import read_config, recognizes
from jllama.system.errors import shell_command
from jllama.system.files import CONFIG, METRICS, SAMPLES, atomic_write_text, errors_as, read_lines
from jllama.system.places import name_of

Records = Sequence[Mapping[str, Any]]
REPORT = "report.html"
_HEAD = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
COLORS = [
    "#2a78c2",
    "#d0611c",
    "#2c8f5a",
    "#b0568f",
    "#8c7300",
    "#7d6bc4",
    "#c24b4b",
    "#2b8a97",
]
"""Colors of curves, legible on light and dark."""
LOOK: dict[Any, Any] = {
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
_REWARD_CHARTS = {
    "reward": "reward",
    "no_signal": "share of groups without signal",
    "answer_tokens": "tokens of an answer",
    "entropy": "entropy (nats per token)",
    "kl": "divergence from the model before training",
    "mismatch_max": "largest mismatch of sampler and trainer (nats)",
    "sampling_tokens_per_s": "sampled tokens per second of sampling",
    "training_tokens_per_s": "sampled tokens per second of training",
}
"""Charts of runs with rewards, which have these numbers."""
_NUMBERS = {
    "validation loss": "{validation_loss:.4f}",
    "perplexity": "{perplexity:.4f}",
    "bits per byte": "{bits_per_byte:.4f}",
    "padding": "{padding:.1%}",
    "time": "{elapsed_s:.0f} s",
    "speed": "{tokens_per_s:,.0f} tokens/s, {step_ms:,.1f} ms a step",
    "share of peak (MFU)": "{mfu:.1%}",
}


def run_facts(
    data: dict[str, str], devices: str, driver: str, trained: int, frozen: int
) -> dict[str, str]:
    """Return what a run logs, and its page shows, of parameters, data and machine.

    Args:
        data: facts about the data.
        devices: the devices in words.
        driver: the driver in words; empty if there is none.
        trained: number of trained parameters.
        frozen: number of frozen parameters.
    """
    versions = [f"Python {platform.python_version()}", f"jllama {jllama.__version__}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax")]
    if driver:
        versions.append(driver)
    parameters = f"{trained:,} trained, {f'{frozen:,}' if frozen else 'none'} frozen"
    program = ", ".join(versions)
    return {"parameters": parameters, **data, "devices": devices, "versions": program}


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Write the page of a run: what it has logged so far, and what to do next.

    Several runs share a page, with their curves in the same charts.

    Raises:
        JllamaError: a folder is not a run's.
    """
    # Read the runs.
    is_comparison = len(folders) > 1
    folder_names = [folder.name for folder in folders]
    config = {}
    curves = {}
    facts = []
    options = []
    texts = {}
    for folder in folders:
        if not recognizes(folder):
            raise JllamaError(f"{folder} is not the folder of a run: it has no {CONFIG}")
        name = folder.name if folder_names.count(folder.name) == 1 else str(folder)
        errors = (KeyError, TypeError, ValueError, AttributeError)
        with errors_as(f"{folder} does not hold what a run logs", *errors):
            config, model, _ = read_config(folder)
            lines = [_with_figures(line) for line in read_lines(folder / METRICS)]
            curves[name] = [line for line in lines if isinstance(line["step"], int)]
            facts.append(_facts(model, config["data"], curves[name]))
            options.append(flatten_dict(config, sep="."))
            for title, part in _texts(folder, config["training"].get("questions", ())).items():
                texts[f"{title} of {name}" if is_comparison else title] = part

    # The options in which they differ.
    for name in dict.fromkeys(itertools.chain(*options)):
        values = [own.get(name) for own in options]
        if any(value != values[0] for value in values):
            for part, value in zip(facts, values, strict=True):
                part[name] = str(value)

    # Lay out the page.
    title = ", ".join(curves)
    names = {name for lines in curves.values() for line in lines for name in line}
    titles = {**_CHARTS, **{key: text for key, text in _REWARD_CHARTS.items() if key in names}}
    if "reward" in names:
        titles["loss"] = "loss of the objective"
    charts = "".join(_chart(curves, key, text) for key, text in titles.items())
    legend = ""
    if is_comparison:
        for name, color in zip(curves, itertools.cycle(COLORS)):
            legend += f"<b style='color:{color}'>&#9632;</b> {html.escape(name)} &emsp; "
        legend = f"<p>{legend}validation is dashed</p>"
    parts = {
        title: table([*curves] if is_comparison else [], facts),
        "Curves": f"{legend}<div class=charts>{charts}</div>",
        **texts,
    }
    if not is_comparison:
        (folder,) = folders
        is_chat = "training chats" in facts[0]
        words = words_to_use(name_of(folder), is_chat, config["training"]["sample_prompt"])
        commands = {
            words[0]: shell_command(*words),
            "continue": shell_command("train", "--resume", folder),
        }
        parts["Next"] = "".join(
            f"<h3>{name}</h3><pre>{html.escape(line)}</pre>" for name, line in commands.items()
        )
        text = (folder / CONFIG).read_text(encoding="utf-8")
        parts["Configuration"] = f"<pre>{html.escape(text)}</pre>"
    write_page(target, title, parts)


def words_to_use(folder: str, is_chat: bool, prompt: str) -> list[object]:
    """Return the words of the command that tries a trained model."""
    return ["chat", folder] if is_chat else ["sample", "--checkpoint", folder, "--prompt", prompt]


def write_page(target: Path, title: str, parts: Mapping[str, str]) -> None:
    """Write a page of parts, which are HTML by title; empty ones are left out."""
    page = "".join(f"<h2>{html.escape(name)}</h2>{part}" for name, part in parts.items() if part)
    atomic_write_text(target, f"{_HEAD}<title>{html.escape(title)}</title>{page}</html>")


def _with_figures(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the figures of its objective beside its other numbers."""
    validation = {
        f"validation_{name}": value
        for name, value in (line.get("validation_figures") or {}).items()
    }
    return {**(line.get("figures") or {}), **validation, **line}


def _facts(model: LlamaConfig, data: Mapping[str, Any], metrics: Records) -> dict[str, str]:
    """Return what a run has logged about itself, and its last numbers."""
    facts = {
        "parameters": f"{count_parameters(model):,}",
        "data": f"{data.get('mixture') or data['path']}",
    }
    for line in metrics:
        facts |= line.get("facts", {})
        values = {"step_s": math.nan, **line, **line.get("final", {})}
        for name, text in _NUMBERS.items():
            with contextlib.suppress(KeyError, TypeError):  # another line has it, or it is null
                facts[name] = text.format(**values, step_ms=1000 * values["step_s"])
    guess = f"{math.log(model.vocab_size):.4f} (ln {model.vocab_size:,})"
    return {**facts, "loss of a uniform guess": guess}


def _texts(folder: Path, questions: Sequence[str]) -> dict[str, str]:
    """Return a run's answers to its questions, a column each step, and samples, latest first."""
    answers, samples = {}, ""
    for line in read_lines(folder / SAMPLES, "text"):
        step = f"step {line['step']}"
        prompt = line["prompt"]
        if prompt in questions or line.get("is_question"):
            answers.setdefault(step, {})[prompt] = line["text"]
        else:
            sample = html.escape(prompt + line["text"])
            samples = f"<h3>{html.escape(step)}</h3><pre>{sample}</pre>{samples}"
    columns = table([*answers], [*answers.values()]) if answers else ""
    return {"Answers": columns, "Samples": samples}


def table(heads: Sequence[str], columns: Sequence[Mapping[str, object]]) -> str:
    """Return a table with a row for each name in a column; if it is too wide, it scrolls."""
    lines = []
    if heads:
        lines.append("".join(f"<th>{html.escape(head)}" for head in ["", *heads]))
    for name in dict.fromkeys(itertools.chain(*columns)):
        cells = [name, *(column.get(name, "") for column in columns)]
        lines.append("".join(f"<td>{html.escape(str(cell))}" for cell in cells))
    rows = "".join(f"<tr>{line}" for line in lines)
    return f"<div class=wide><table>{rows}</table></div>"


def _chart(runs: Mapping[str, Records], key: str, title: str) -> str:
    """Draw one figure of one or several runs over the steps, as an SVG element."""
    is_single = len(runs) == 1
    lines = ((key, "-", "training"), (f"validation_{key}", "o--", "validation"))
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(4.2, 2.8))
        # The axes are fixed, since layouts are slow.
        axis = figure.add_axes((0.17, 0.15, 0.81, 0.74), title=title, xlabel="step")
        for run_index, metrics in enumerate(runs.values()):
            for line_index, (name, style, label) in enumerate(lines):
                records = [
                    record
                    for record in metrics
                    if isinstance(record.get(name), float) and "skipped" not in record
                ]
                steps = [record["step"] for record in records]
                values = [record[name] for record in records]
                color_index = line_index if is_single else run_index
                color = COLORS[color_index % len(COLORS)]
                axis.plot(
                    steps, values, style, label=label, color=color, linewidth=1.2, markersize=4
                )
        if key == "loss" and is_single:
            axis.legend(frameon=False)
        return svg(figure)


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element in the page's text color."""
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    text = drawing.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor")
