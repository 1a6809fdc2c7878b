"""``python -m jllama eval``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jllama
from jllama.commands.cli import parse
from jllama.errors import JllamaError, UsageError

_WINDOW = 2048
_FOR_DATA = ("text_field", "stride", "max_tokens")
_FOR_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template")


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Measure how well a model predicts a text, or how it does on tasks of EleutherAI's lm-eval.

    Examples:
        runs/quickstart --data text.txt
        model.gguf --tasks arc_easy,hellaswag --limit 100

    Args:
        checkpoint: the folder of a run, or a model in any format: a Hugging Face or Meta folder, a GGUF or llama2.c
            file, a Hugging Face hub id.
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
        step: which checkpoint of a run; 0 takes the one with the lowest validation loss.
        dtype: the dtype of the parameters; without it float32 on a CPU, and elsewhere the files' own.
        quantize: hold the weights as int8, to see what sampling so costs.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out.
    """

    checkpoint: str
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
    step: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantize: Literal["int8"] | None = None
    rope_factor: float | None = None

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.tasks):
            raise UsageError("give --data FILE, to measure how well a text is predicted, or --tasks of lm-eval's")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _FOR_TASKS if self.data else _FOR_DATA:
            if getattr(self, name) != defaults[name]:
                raise UsageError(f"--{name} is for {'--tasks' if self.data else '--data'} alone: leave it out")
        for name in ("window", "stride", "max_tokens", "limit", "num_fewshot", "step"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}; it must be at least 1")


def main(argv: Sequence[str], prog: str) -> int:
    """Load a model, measure it, and print what was found."""
    options = parse(EvalOptions, argv, prog, positional=("checkpoint",))
    if options.tasks:
        return _evaluate_tasks(options)
    if not Path(options.data).is_file():
        raise JllamaError(f"there is no file at --data {options.data}: give a text file, or a .jsonl file")
    return _evaluate_text(_load(options), options)


def _load(options: EvalOptions) -> jllama.Model:
    model = jllama.load(options.checkpoint, options.dtype, rope_factor=options.rope_factor, step=options.step or None)
    if model.tokenizer is None:
        raise JllamaError(f"{options.checkpoint} has no tokenizer: put the one it was trained with beside its weights")
    print(options.checkpoint if model.step is None else f"{options.checkpoint}, step {model.step}", file=sys.stderr)
    return model.for_decoding(options.quantize) if options.quantize else model


def _evaluate_text(model: jllama.Model, options: EvalOptions) -> int:
    from jllama.data.corpus import read_corpus
    from jllama.evaluation.scoring import check_windows, score_texts

    window = options.window or min(model.config.max_seq_len, _WINDOW)
    stride = options.stride or max(window // 2, 1)
    check_windows(window, stride, options.batch_size, model.config.max_seq_len)
    path = Path(options.data)
    texts = (document.text for document in read_corpus({path.name: path}, options.text_field))
    began_s = time.perf_counter()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokens scored", total=None)
        score = score_texts(
            model,
            texts,
            window=window,
            stride=stride,
            batch_size=options.batch_size,
            max_tokens=options.max_tokens or None,
            report=lambda done, total: progress.update(task, completed=done, total=total),
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
    from jllama.evaluation import harness  # needs lm-eval

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
