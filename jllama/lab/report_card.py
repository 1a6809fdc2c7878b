"""The report card of ``jllama speedrun``: all stages in one page, and in JSON beside it."""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
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
from jllama.system.files import METRICS, Json, read_lines, read_optional_json, write_json
from jllama.templates.messages import find_template, message_ids
from jllama.training.report import COLORS, LOOK, svg, table, write_page

_SHOWN_PROMPTS = 4
_REPLY_TOKENS = 24
SCORES = "benchmarks.json"
"""What ``jllama eval RUN --benchmarks NAMES --json`` printed, in the folder of a run."""


def write_card(folder: Path, target: Path) -> None:
    """Write the page of a folder of ``jllama speedrun``, and its numbers as JSON beside it.

    Raises:
        JllamaError: a stage has no checkpoint.
    """
    # What the runs have logged, and what their models answer.
    runs = {stage: folder / stage for stage in STAGES}
    metrics = {stage: read_lines(run / METRICS) for stage, run in runs.items()}
    numbers = {stage: _numbers(run, metrics[stage]) for stage, run in runs.items()}
    answers = _examine(runs, numbers)
    base = read_config(runs["base"])
    facts = next((line["facts"] for line in metrics["base"] if "facts" in line), {})
    if GZIP in facts:
        numbers["base"]["bits_per_byte_of_gzip"] = float(facts[GZIP].partition(" ")[0])

    # What to run next.
    last = runs["rewards"]
    depth = base.model.num_layers
    larger = ["--depth", depth + 1, "--run_dir", f"{folder}-{depth + 1}"]
    commands = {
        "talk to it": shell_command("chat", last),
        "serve it": shell_command("serve", last),
        "make a larger one": shell_command("speedrun", *larger),
    }

    # The files.
    card = {"depth": depth, "facts": facts, "stages": numbers, "answers": answers}
    write_json(target.with_suffix(".json"), {**card, "next": commands})
    cells = [
        {
            name.replace("_", " "): f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
            for name, value in row.items()
        }
        for row in numbers.values()
    ]
    minutes = math.fsum(row["elapsed_s"] for row in numbers.values()) / 60
    flops = math.fsum(row["flops"] for row in numbers.values())
    parts = {
        f"Depth {depth}: {minutes:.0f} minutes, {flops:.2g} FLOPs": _curves(metrics),
        "Stages": table([*numbers], cells),
        "Answers": table([*answers], [*answers.values()]),
        "Data and machine": table([], [facts]),
        "Next": table([], [commands]),
    }
    write_page(target, folder.name, parts)


def _numbers(run: Path, metrics: Sequence[Mapping[str, Any]]) -> Json:
    """Return what a stage took and reached."""
    config, model, _ = read_config(run)
    loop = config["training"]
    seq_len = loop["seq_len"] or model.max_seq_len
    logged: Json = {}
    for line in metrics:
        logged |= line | line.get("final", {})
    tokens = logged["step"] * loop["batch_size"] * seq_len
    flops = tokens * training_flops(model, seq_len, bool(config["reward"]))
    numbers = {"tokens": tokens, "flops": flops}
    names = ["step", "elapsed_s"]
    if not config["reward"]:
        names += ["loss", "validation_loss", "bits_per_byte"]
    numbers |= {name: logged[name] for name in names if logged.get(name) is not None}
    for benchmark, scores in read_optional_json(run / SCORES).items():
        numbers |= {
            f"{benchmark} {name}": value
            for name, value in scores.items()
            if "/" not in benchmark and "stderr" not in name  # not a part of one, nor its error
        }
    return numbers


def _examine(runs: Mapping[str, Path], numbers: Mapping[str, Json]) -> dict[str, dict[str, str]]:
    """Return each model's answers, and put the mean reward of those to held-out prompts in numbers.

    All models see the prompts as the last one does. The answers are the likeliest ones. Rewards
    in Python files are not run.
    """
    # The prompts: those that rewards held out, and questions of the chats.
    config = read_config(runs["rewards"]).fields
    loop = config["training"]
    max_new_tokens = loop["grpo"]["max_answer_tokens"]
    last = load(runs["rewards"])
    tokenizer = last.text_tokenizer
    template = find_template(tokenizer, last.chat_template)
    max_prompt_tokens = loop["seq_len"] + 1 - max_new_tokens
    data = prepare_prompts(DataConfig(**config["data"]), tokenizer, template, max_prompt_tokens)
    rows = data.validation[: loop["grpo"]["eval_prompts"] or None]
    questions = read_config(runs["chat"]).fields["training"]["questions"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    chats = [message_ids(tokenizer, template, message, True) for message in messages]
    shown = [*questions, *(tokenizer.decode(row.ids) for row in rows[:_SHOWN_PROMPTS])]

    # The answers, and their rewards.
    rewards = config["reward"]
    if isinstance(rewards, str):
        rewards = {rewards: 1.0}
    scorer = Scorer({spec: weight for spec, weight in rewards.items() if ".py:" not in spec})
    answers = {}
    for stage, run in runs.items():
        model = load(run)
        answer = functools.partial(generate, model, temperature=0.0)
        completions = answer([row.ids for row in rows], max_new_tokens=max_new_tokens)
        texts = [completion.text for completion in completions]
        if scorer.weights:
            scores = scorer.score(
                [row.prompt for row in rows],
                [[text] for text in texts],
                [row.fields for row in rows],
                [row.place for row in rows],
            )
            numbers[stage]["held_out_reward"] = float(np.nanmean(scores.total))
        replies = [reply.text for reply in answer(chats, max_new_tokens=_REPLY_TOKENS)]
        lines = (" ".join(text.split()) for text in [*replies, *texts])
        answers[stage] = dict(zip(shown, lines, strict=False))
    scorer.close()
    return answers


def _curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw the losses and the rewards of all stages over the minutes, as an SVG element."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 3.2))
        place = (0.09, 0.15, 0.82, 0.74)
        losses = figure.add_axes(place, xlabel="minutes", ylabel="loss (nats per token)")
        rewards = losses.twinx()
        rewards.set_ylabel("reward")
        start_s = 0.0
        for (stage, lines), color in zip(metrics.items(), COLORS, strict=False):
            key, axis = ("reward", rewards) if stage == "rewards" else ("loss", losses)
            steps = [line for line in lines if key in line and "elapsed_s" in line]
            minutes = [(start_s + line["elapsed_s"]) / 60 for line in steps]
            axis.plot(minutes, [line[key] for line in steps], color=color, label=stage)
            start_s += max((line["elapsed_s"] for line in steps), default=0.0)
        figure.legend(loc="upper center", ncols=3, frameon=False)
        return svg(figure)
