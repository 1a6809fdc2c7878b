"""``jllama eval``: measure how well a model predicts text or answers benchmarks."""

import dataclasses
import json
import time
from typing import Any

from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions
from jllama.core import JllamaError, UsageError, check_fields
from jllama.system.places import as_place
from jllama.system.progress import progress
from jllama.system.remote import fetch

_OF_TEXT = "text_field chat_template window stride max_tokens"
_OF_BENCHMARKS = "run_programs num_fewshot limit apply_chat_template"
_COMMON = (
    "adapter quantize data window stride max_tokens benchmarks run_programs num_fewshot "
    "limit batch_size json"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Measure how well a model predicts text or the answers of chats, or answers benchmarks.

    Examples:
        runs/quickstart --data text.txt
        runs/chat_lora --data chats.jsonl
        smollm2/ --benchmarks core,mmlu --limit 100

    Args:
        data: a text file, a .jsonl file of texts, each scored by itself, or a .jsonl file of
            chats, whose answers are scored; or what one of --benchmarks reads in place of the
            published data: a folder, a file, a glob or a URL.
        text_field: the field of a .jsonl file that holds the text.
        chat_template: a chat template in place of the model's own: a file, or llama2, llama3,
            chatml, mistral, phi4 or granite.
        window: the maximum number of tokens that the model sees at once; 0 is its context, at most
            2048.
        stride: the number of new tokens that each window scores; 0 is half a window.
        max_tokens: the number of tokens to score, from the beginning; 0 is all.
        benchmarks: core, arc_easy, arc_challenge, mmlu, gsm8k, humaneval or humaneval_instruct,
            or several, separated by commas.
        run_programs: let --benchmarks humaneval run programs that the model writes.
        num_fewshot: the number of solved examples before each question; the default is the
            task's own.
        limit: the number of questions of each task or subject; 0 is all.
        apply_chat_template: put each question as a message of a chat.
        batch_size: the number of windows or questions that the model processes at once.
        json: print the result as JSON.
    """

    data: str = ""
    text_field: str = "text"
    chat_template: str = ""
    window: int = 0
    stride: int = 0
    max_tokens: int = 0
    benchmarks: str = ""
    run_programs: bool = False
    num_fewshot: int | None = None
    limit: int = 0
    apply_chat_template: bool = False
    batch_size: int = 8
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data and not self.benchmarks:
            raise UsageError(
                "give --data FILE, to measure how well a text is predicted, or --benchmarks"
            )
        for name in (_OF_TEXT if self.benchmarks else _OF_BENCHMARKS).split():
            if getattr(self, name) != getattr(EvalOptions, name):
                user = "--data" if self.benchmarks else "--benchmarks"
                raise UsageError(f"--{name} is for {user} alone: leave it out")
        if self.data and "," in self.benchmarks:
            raise UsageError("--data is of one benchmark: name one, or leave --data out")
        check_fields(
            self,
            "",
            "window stride max_tokens limit num_fewshot",
            lambda value: value is None or value >= 0,
            "0 or more",
        )
        check_fields(self, "", "batch_size", lambda value: value >= 1, "at least 1")


def main(argv: list[str], prog: str) -> int:
    """Load a model, evaluate it, and print the results."""
    options = parse(EvalOptions, argv, prog, ("checkpoint",), _COMMON)
    if options.benchmarks:
        _evaluate_benchmarks(options)
    else:
        _evaluate_text(options)
    return 0


def _evaluate_text(options: EvalOptions) -> None:
    from jllama.data.chats import FORMS, data_task, read_records, record_tokens
    from jllama.data.config import DataConfig
    from jllama.data.corpus import read_corpus
    from jllama.score.scoring import score_texts, window_sizes
    from jllama.templates.messages import chat_format

    # 1) Check the file, and whether it has chats or text.
    path = fetch(as_place(options.data))
    if not path.is_file():
        raise JllamaError(
            f"there is no file at --data {options.data}: give a text file, or a .jsonl file"
        )
    is_chat = data_task(DataConfig(path=str(path), text_field=options.text_field)) != "text"
    if options.chat_template and not is_chat:
        raise UsageError(f"--chat_template is for chats, and {options.data} is text: leave it out")

    # 2) Load the model, and choose its windows.
    model = options.load_model()
    options.say_loaded(model)
    sizes = window_sizes(model, options.window, options.stride)

    # 3) Read the texts, and score them.
    start_s = time.perf_counter()
    texts: Any
    if is_chat:
        tokenizer = model.text_tokenizer
        chat = chat_format(tokenizer, model.chat_template, model.stop_ids, options.chat_template)
        texts = (
            tokens
            for record in read_records([path], FORMS[1:])
            for tokens in record_tokens(record, tokenizer, *chat)
        )
    else:
        texts = ("".join(document()) for document in read_corpus([path], options.text_field))
    with progress("tokens scored") as move:
        score = score_texts(
            model,
            texts,
            on_progress=move,
            batch_size=options.batch_size,
            max_tokens=options.max_tokens or None,
            **sizes,
        )

    # 4) Print the results.
    results = {
        "tokens": score.tokens,
        "bytes": score.text_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        **sizes,
        "tokens_per_s": round(score.tokens / (time.perf_counter() - start_s), 1),
    }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, value in results.items():
        form = ",.4f" if isinstance(value, float) else ","
        print(f"{name:14} {value:{form}}")


def _evaluate_benchmarks(options: EvalOptions) -> None:
    from jllama.score.benchmarks import check_benchmarks, evaluate

    names = options.benchmarks.replace(" ", "").split(",")
    check_benchmarks(names, options.run_programs, options.num_fewshot, options.apply_chat_template)
    model = options.load_model()
    options.say_loaded(model)
    results: dict[str, Any] = {}
    try:
        for name in names:
            new = evaluate(
                model,
                name,
                options.data,
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.apply_chat_template,
                batch_size=options.batch_size,
            )
            results |= new
            if not options.json:
                for group, numbers in new.items():
                    for metric, value in numbers.items():
                        print(f"{group:40} {metric:24} {value:8.4g}", flush=True)
    finally:  # also if an error ends the run
        if options.json and results:
            print(json.dumps(results, indent=1))
