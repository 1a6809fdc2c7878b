"""``python -m jllama eval``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions, check_least
from jllama.errors import JllamaError, UsageError
from jllama.progress import progress

_WINDOW = 2048
_FOR_DATA = ("text_field", "stride", "max_tokens")
_FOR_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Measure how well a model predicts a text, or how it does on tasks of EleutherAI's lm-eval.

    Examples:
        runs/quickstart --data text.txt
        model.gguf --tasks arc_easy,hellaswag --limit 100

    Args:
        data: the text: a UTF-8 file, or a .jsonl file, whose documents are scored each by itself.
        text_field: where the text is in each object of a .jsonl file.
        window: the most tokens that the model sees at once; 0 is its context, with --data at most 2048.
        stride: how many new tokens each window scores, the rest being context; 0 is half a window.
        max_tokens: score only so many tokens, the first ones; 0 is all.
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
            raise UsageError("give --data FILE, to measure how well a text is predicted, or --tasks of lm-eval's")
        for name in _FOR_TASKS if self.data else _FOR_DATA:
            if getattr(self, name) != getattr(EvalOptions, name):  # its default
                raise UsageError(f"--{name} is for {'--tasks' if self.data else '--data'} alone: leave it out")
        check_least(self, 0, "window", "stride", "max_tokens", "limit", "num_fewshot")
        check_least(self, 1, "batch_size")


def main(argv: Sequence[str], prog: str) -> int:
    """Load a model, measure it, and print what was found."""
    options = parse(EvalOptions, argv, prog, positional=("checkpoint",))
    if options.tasks:
        return _evaluate_tasks(options)
    if not Path(options.data).is_file():
        raise JllamaError(f"there is no file at --data {options.data}: give a text file, or a .jsonl file")
    return _evaluate_text(_load(options), options)


def _load(options: EvalOptions) -> jllama.LanguageModel:
    model = options.load_model()
    options.say_loaded(model)
    return model


def _evaluate_text(model: jllama.LanguageModel, options: EvalOptions) -> int:
    from jllama.data.corpus import read_corpus
    from jllama.evaluation.scoring import check_windows, score_texts

    window = options.window or min(model.config.max_seq_len, _WINDOW)
    stride = options.stride or max(window // 2, 1)
    check_windows(window, stride, options.batch_size, model.config.max_seq_len)
    path = Path(options.data)
    texts = (document.text for document in read_corpus({path.name: path}, options.text_field))
    began_s = time.perf_counter()
    with progress("tokens scored") as move:
        score = score_texts(
            model,
            texts,
            window=window,
            stride=stride,
            batch_size=options.batch_size,
            max_tokens=options.max_tokens or None,
            on_progress=lambda done, total: move(completed=done, total=total),
        )
    found = {
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "window": window,
        "stride": stride,
        "tokens_per_s": round(score.tokens / (time.perf_counter() - began_s), 1),
    }
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:14} {value:,.4f}" if isinstance(value, float) else f"{name:14} {value:,}")
    return 0


def _evaluate_tasks(options: EvalOptions) -> int:
    from jllama import harness  # needs lm-eval

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    manager = harness.task_manager(names, options.include_path)  # before the model is loaded
    found = harness.evaluate_tasks(
        harness.JllamaLM(_load(options), options.batch_size, options.window or None),
        names,
        manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit or None,
        apply_chat_template=options.apply_chat_template,
        log_samples=False,
    )
    print(json.dumps(found["results"], indent=1) if options.json else harness.table(found))
    return 0
