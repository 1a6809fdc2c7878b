"""The report card of ``jllama speedrun``: all stages in one page, ``report.html``, and in JSON."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jllama.data.config import DataConfig
from jllama.data.datasets import GZIP
from jllama.data.prompts import prepare_prompts
from jllama.formats.registry import load
from jllama.formats.run import read_config
from jllama.generation.generate import generate
from jllama.lab.speedrun import STAGES, training_flops
from jllama.rl.scorer import Scorer
from jllama.system.errors import shell_command
from jllama.system.files import METRICS, SPEEDRUN, Json, read_json_object, read_lines, write_json
from jllama.templates.messages import find_template, message_ids
from jllama.training.report import COLORS, LOOK, REPORT, svg, table, write_page

CARD = "report.json"
_SHOWN_PROMPTS = 4
_ROWS = {
    "steps": "{step:,}",
    "tokens": "{tokens:,}",
    "FLOPs": "{flops:.2g}",
    "time": "{elapsed_s:,.0f} s",
    "loss": "{loss:.3f}",
    "bits per byte, held out": "{bits_per_byte}",
    "held-out prompts solved": "{solved:.1%}",
}
"""Numbers of a stage on the page, and how they are written."""


def write_card(folder: Path) -> None:
    """Write ``report.html`` and ``report.json`` of a folder of ``jllama speedrun``.

    Raises:
        JllamaError: a stage has no checkpoint.
    """
    # What the runs have logged, and what their models answer.
    runs = {stage: folder / stage for stage in STAGES}
    metrics = {stage: read_lines(run / METRICS) for stage, run in runs.items()}
    solved, answers = _examine(runs)
    facts = metrics["base"][0]["facts"]
    numbers = {}
    for stage, run in runs.items():
        numbers[stage] = {**_numbers(run, metrics[stage]), "solved": solved[stage]}
    minutes = math.fsum(row["elapsed_s"] for row in numbers.values()) / 60
    flops = math.fsum(row["flops"] for row in numbers.values())

    # What to run next.
    depth = read_json_object(folder / SPEEDRUN)["depth"]
    last = runs["rewards"]
    larger = ["--depth", depth + 1, "--run_dir", f"{folder}-{depth + 1}"]
    commands = {
        "talk to it": shell_command("chat", last),
        "serve it": shell_command("serve", last),
        "make a larger one": shell_command("speedrun", *larger),
    }

    # The files.
    card = {"depth": depth, "facts": facts, "stages": numbers, "answers": answers}
    write_json(folder / CARD, {**card, "next": commands})
    cells = [
        {name: form.format_map(row) for name, form in _ROWS.items()} for row in numbers.values()
    ]
    cells[0]["bits per byte of gzip -9"] = facts.get(GZIP, "").partition(" ")[0]
    links = ", ".join(f"<a href={stage}/{REPORT}>{stage}</a>" for stage in STAGES)
    parts = {
        f"Depth {depth}: {minutes:.0f} minutes, {flops:.2g} FLOPs": _curves(metrics)
        + table([*numbers], cells)
        + f"<p>More of each stage: {links}</p>",
        "Answers": table([*answers], [*answers.values()]),
        "Data and machine": table([], [facts]),
        "Next": table([], [commands]),
    }
    write_page(folder / REPORT, folder.name, parts)


def _numbers(run: Path, metrics: Sequence[Mapping[str, Any]]) -> Json:
    """Return what a stage took and reached."""
    config, model, _ = read_config(run)
    loop = config["training"]
    seq_len = loop["seq_len"] or model.max_seq_len
    numbers: Json = {}
    for line in metrics:
        numbers |= line | line.get("final", {})
    tokens = numbers["step"] * loop["batch_size"] * seq_len
    flops = tokens * training_flops(model, seq_len, bool(config["reward"]))
    logged = {name: numbers[name] for name in ("step", "elapsed_s", "loss", "bits_per_byte")}
    return {"tokens": tokens, "flops": flops, **logged}


def _examine(runs: Mapping[str, Path]) -> tuple[dict[str, float], dict[str, dict[str, str]]]:
    """Return the share of held-out prompts that each model answers right, and its answers.

    All models see the prompts as the last one does. The answers are the likeliest ones.
    """
    # The prompts: those that rewards held out, and questions of the chats.
    last = load(runs["rewards"])
    tokenizer = last.text_tokenizer
    template = find_template(tokenizer, last.chat_template)
    config = read_config(runs["rewards"]).fields
    data = DataConfig(**config["data"])
    rows = prepare_prompts(data, tokenizer, template, last.config.max_seq_len).validation
    questions = read_config(runs["chat"]).fields["training"]["questions"]
    prompts: list[Any] = [row.ids for row in rows]
    for question in questions:
        messages = [{"role": "user", "content": question}]
        prompts.append(message_ids(tokenizer, template, messages, True))

    # The answers, and their rewards.
    reward = config["reward"]
    scorer = Scorer(reward if isinstance(reward, dict) else {reward: 1.0})
    room = last.config.max_seq_len - max(map(len, prompts))
    solved = {}
    answers = {}
    for stage, run in runs.items():
        completions = generate(load(run), prompts, temperature=0.0, max_new_tokens=min(32, room))
        texts = [completion.text for completion in completions]
        scores = [
            scorer.score([row.prompt], [[text]], [row.fields], [row.place]).total[0, 0]
            for row, text in zip(rows, texts, strict=False)
        ]
        solved[stage] = math.fsum(scores) / len(scores)
        shown = [*questions, *(row.prompt[-1]["content"] for row in rows[:_SHOWN_PROMPTS])]
        answers[stage] = dict(zip(shown, texts[len(rows) :] + texts, strict=False))
    scorer.close()
    return solved, answers


def _curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw the losses and the rewards of all stages over the minutes, as an SVG element."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 3.2))
        losses = figure.add_axes(
            (0.09, 0.15, 0.82, 0.8), xlabel="minutes", ylabel="loss (nats per token)"
        )
        rewards = losses.twinx()
        rewards.set_ylabel("reward")
        rewards.set_ylim(0, 1.05)
        start_s = 0.0
        for (stage, lines), color in zip(metrics.items(), COLORS, strict=False):
            key, axis = ("reward", rewards) if stage == "rewards" else ("loss", losses)
            steps = [line for line in lines if key in line and "elapsed_s" in line]
            minutes = [(start_s + line["elapsed_s"]) / 60 for line in steps]
            axis.plot(minutes, [line[key] for line in steps], color=color, label=stage)
            start_s += max((line["elapsed_s"] for line in steps), default=0.0)
        figure.legend(loc="upper center", ncols=3, frameon=False)
        return svg(figure)
