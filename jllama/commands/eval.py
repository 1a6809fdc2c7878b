"""``python -m jllama eval``."""

import dataclasses
import json
import time
from pathlib import Path

from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions
from jllama.errors import JllamaError, UsageError, check_fields
from jllama.progress import progress

_ONLY = {"data": "text_field stride max_tokens", "tasks": "include_path num_fewshot limit apply_chat_template"}


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
        stride: new tokens that each window scores, the remaining ones being context; 0 is half a window.
        max_tokens: score only the first so many tokens; 0 is all.
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
        other = "tasks" if self.data else "data"
        for name in _ONLY[other].split():
            if getattr(self, name) != getattr(EvalOptions, name):  # its default
                raise UsageError(f"--{name} is for --{other} alone: leave it out")
        check_fields(self, "", "window stride max_tokens limit", lambda value: value >= 0, "0 or more")
        check_fields(self, "", "num_fewshot", lambda value: value is None or value >= 0, "0 or more")
        check_fields(self, "", "batch_size", lambda value: value >= 1, "at least 1")


def main(argv: list[str], prog: str) -> int:
    """Load a model, evaluate it, and print the results."""
    options = parse(EvalOptions, argv, prog, positional=("checkpoint",))
    if options.tasks:
        return _evaluate_tasks(options)
    from jllama.data.corpus import read_corpus
    from jllama.evaluation.scoring import score_texts

    if not (path := Path(options.data)).is_file():
        raise JllamaError(f"there is no file at --data {options.data}: give a text file, or a .jsonl file")
    model = options.load_model()
    options.say_loaded(model)
    window = options.window or min(model.config.max_seq_len, 2048)
    size = {"window": window, "stride": options.stride or max(window // 2, 1)}
    texts = ("".join(document()) for document in read_corpus([path], options.text_field))
    limits, start_s = {"batch_size": options.batch_size, "max_tokens": options.max_tokens or None}, time.perf_counter()
    with progress("tokens scored") as move:
        score = score_texts(model, texts, on_progress=lambda n, total: move(completed=n, total=total), **size, **limits)
    tokens_per_s = round(score.tokens / (time.perf_counter() - start_s), 1)
    results = {"tokens": score.tokens, "bytes": score.text_bytes, "loss": score.loss, "perplexity": score.perplexity}
    results |= {"bits_per_byte": score.bits_per_byte, **size, "tokens_per_s": tokens_per_s}
    lines = (f"{name:14} {each:,{'.4f' if isinstance(each, float) else ''}}" for name, each in results.items())
    print(json.dumps(results, indent=1) if options.json else "\n".join(lines))
    return 0


def _evaluate_tasks(options: EvalOptions) -> int:
    from jllama import harness  # needs lm-eval

    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    manager = harness.task_manager(names, options.include_path)  # before the model is loaded
    model = options.load_model()
    options.say_loaded(model)
    lm = harness.JllamaLM(model, options.batch_size, options.window or None)
    arguments = {name: getattr(options, name) for name in ("num_fewshot", "apply_chat_template")}
    results = harness.evaluate_tasks(lm, names, manager, limit=options.limit or None, log_samples=False, **arguments)
    print(json.dumps(results["results"], indent=1) if options.json else harness.table(results))
    return 0
