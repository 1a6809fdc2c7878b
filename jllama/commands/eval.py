"""``python -m jllama eval``."""

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions
from jllama.errors import JllamaError, UsageError, check_fields
from jllama.progress import progress

_ONLY = {
    "data": "text_field chat_template stride max_tokens",
    "tasks": "include_path num_fewshot limit apply_chat_template",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Measure how well a model predicts text or chats, or does on tasks of lm-eval.

    Examples:
        runs/quickstart --data text.txt
        runs/chat_lora --data chats.jsonl
        model.gguf --tasks arc_easy,hellaswag --limit 100

    Args:
        data: a text file, a .jsonl file of texts, which are scored each by itself, or one of chats: their answers.
        text_field: where a .jsonl file has its texts.
        chat_template: for chats in place of the model's own: a file, or a name.
        window: the most tokens that the model sees at once; 0 is its context, with --data at most 2048.
        stride: new tokens that each window scores; 0 is half a window.
        max_tokens: score only the first so many; 0 is all.
        tasks: names of lm-eval's tasks, with a comma between several, in place of --data; needs its package.
        include_path: a folder with tasks of your own, as YAML files.
        num_fewshot: how many solved examples a task's question comes after; without it what the task says.
        limit: only so many questions of each task; 0 is all.
        apply_chat_template: put each question as a message of a chat.
        batch_size: how many windows, or questions, go through the model at once.
        json: print the result as JSON.
    """

    data: str = ""
    text_field: str = "text"
    chat_template: str = ""
    window: int = 0
    stride: int = 0
    max_tokens: int = 0
    tasks: str = ""
    include_path: str = ""
    num_fewshot: int | None = None
    limit: int = 0
    apply_chat_template: bool = False
    batch_size: int = 8
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.data) == bool(self.tasks):
            raise UsageError(
                "give --data FILE, to measure how well a text is predicted, or --tasks of lm-eval's"
            )
        other = "tasks" if self.data else "data"
        for name in _ONLY[other].split():
            if getattr(self, name) != getattr(EvalOptions, name):  # its default
                raise UsageError(f"--{name} is for --{other} alone: leave it out")
        check_fields(
            self, "", "window stride max_tokens limit", lambda value: value >= 0, "0 or more"
        )
        check_fields(
            self, "", "num_fewshot", lambda value: value is None or value >= 0, "0 or more"
        )
        check_fields(self, "", "batch_size", lambda value: value >= 1, "at least 1")


def main(argv: list[str], prog: str) -> int:
    """Load a model, evaluate it, and print the results."""
    options = parse(EvalOptions, argv, prog, positional=("checkpoint",))
    if options.tasks:
        return _evaluate_tasks(options)
    from jllama.data.chats import FORMS, data_task, read_records, record_tokens
    from jllama.data.config import DataConfig
    from jllama.data.corpus import read_corpus
    from jllama.evaluation.scoring import score_texts, window_sizes
    from jllama.templates.messages import conversing

    if not (path := Path(options.data)).is_file():
        raise JllamaError(
            f"there is no file at --data {options.data}: give a text file, or a .jsonl file"
        )
    is_chat = data_task(DataConfig(path=options.data, text_field=options.text_field)) != "text"
    if options.chat_template and not is_chat:
        raise UsageError(f"--chat_template is for chats, and {options.data} is text: leave it out")
    model = options.load_model()
    options.say_loaded(model)
    size = window_sizes(model, options.window, options.stride)
    limits, start_s = (
        {"batch_size": options.batch_size, "max_tokens": options.max_tokens or None},
        time.perf_counter(),
    )
    texts: Any = ("".join(document()) for document in read_corpus([path], options.text_field))
    if is_chat:
        tokenizer = model.text_tokenizer
        talk = conversing(tokenizer, model.chat_template, model.stop_ids, options.chat_template)
        records = read_records([path], FORMS[1:])
        texts = itertools.chain.from_iterable(
            record_tokens(record, tokenizer, *talk) for record in records
        )
    with progress("tokens scored") as move:
        score = score_texts(
            model,
            texts,
            on_progress=lambda n, total: move(completed=n, total=total),
            **size,
            **limits,
        )
    tokens_per_s = round(score.tokens / (time.perf_counter() - start_s), 1)
    results = {
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity,
    }
    results |= {"bits_per_byte": score.bits_per_byte, **size, "tokens_per_s": tokens_per_s}
    lines = (
        f"{name:14} {each:,{'.4f' if isinstance(each, float) else ''}}"
        for name, each in results.items()
    )
    print(json.dumps(results, indent=1) if options.json else "\n".join(lines))
    return 0


def _evaluate_tasks(options: EvalOptions) -> int:
    from jllama.evaluation import harness  # needs lm-eval

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    manager = harness.task_manager(names, options.include_path)  # before the model is loaded
    model = options.load_model()
    options.say_loaded(model)
    lm = harness.JllamaLM(model, options.batch_size, options.window or None)
    arguments = {name: getattr(options, name) for name in ("num_fewshot", "apply_chat_template")}
    results = harness.evaluate_tasks(
        lm, names, manager, limit=options.limit or None, log_samples=False, **arguments
    )
    print(json.dumps(results["results"], indent=1) if options.json else harness.table(results))
    return 0
