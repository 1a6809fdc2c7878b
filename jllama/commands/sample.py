"""``python -m jllama sample``, also ``sample.py``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Generator
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions, sampling_params
from jllama.errors import JllamaError, UsageError, check_fields
from jllama.files import fault_of
from jllama.generation.sampling_params import SamplingParams

COMPARED = {"greedy": SamplingParams(temperature=0.0)} | {
    f"{name}, T={temperature:g}": SamplingParams(temperature, *cuts)
    for name, cuts in {"random": (0, 1.0), "top-k 40": (40, 1.0), "top-p 0.9": (0, 0.9)}.items()
    for temperature in (1.0, 0.7)
}  # the settings that ``--compare`` sets side by side
_COMMON = (
    "prompt",
    "prompts_file",
    "output",
    "n",
    "max_new_tokens",
    "stop",
    "temperature",
    "seed",
    "quantize",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(SamplingParams, ModelOptions):
    """Continue a prompt, or a file of prompts, with a trained model; the text streams to stdout as it comes.

    Examples:
        runs/quickstart --prompt "def "
        model.gguf --prompt "Once upon a time" --max_new_tokens 200 --temperature 0.5 -n 3
        smollm2/ --prompts_file prompts.jsonl --output texts.jsonl

    Args:
        prompt: the text to continue; empty lets the model begin, a dash reads it from stdin.
        prompts_file: a .jsonl file of objects with a "prompt", and with settings of their own if they like.
        output: the .jsonl file that the completions of prompts_file go to; an interrupted call goes on from there.
        n: samples per prompt; each has the next seed.
        max_new_tokens: the most tokens to generate; 0 fills what is left of the model's context.
        stop: a string that ends the text, or a JSON list of them; it is not part of the text.
        stop_ids: a JSON list of token ids that end the text; without it the model's own.
        json_schema: the text is JSON that this schema allows; it, or the .json file that it is in.
        regex: the text matches this regular expression from beginning to end.
        speculate: tokens to guess at each step by prompt lookup; the text is the same, faster where it repeats itself.
        batch_size: how many texts of prompts_file to generate at once.
        logprobs: show each token and its log-probability, too.
        echo: begin the text with the prompt; by default on in the terminal, off with --json.
        json: print a JSON object for each text instead of the text itself.
        compare: print a table of seven settings (greedy, random, top-k 40 and top-p 0.9) instead.
    """

    prompt: str = ""
    prompts_file: str = ""
    output: str = ""
    n: int = 1
    max_new_tokens: int = 0
    stop: list[str] | str = dataclasses.field(default_factory=list)
    stop_ids: list[int] | None = None
    json_schema: str = ""
    regex: str = ""
    temperature: float = 0.8
    top_p: float = 0.95
    speculate: int = 0
    batch_size: int = 8
    logprobs: bool = False
    echo: bool | None = None
    json: bool = False
    compare: bool = False

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)
        ModelOptions.__post_init__(self)
        check_fields(self, "", "max_new_tokens speculate", lambda value: value >= 0, "0 or more")
        check_fields(
            self,
            "",
            "n batch_size",
            lambda value: 1 <= value <= 100_000,
            "at least 1 and at most 100,000",
        )
        if bool(self.prompts_file) != bool(self.output):
            raise UsageError("prompts_file and output go together: give both, or neither")
        for name in ("prompt", "compare", "json"):
            if self.prompts_file and getattr(self, name):
                raise UsageError(f"{name} has no meaning with prompts_file: leave it out")
        if bool(self.json_schema) + bool(self.regex) + bool(self.speculate) > 1:
            raise UsageError(
                "json_schema, regex and speculate do not go together: give one of them"
            )
        if self.compare and (self.n > 1 or self.logprobs or self.json or self.echo is not None):
            raise UsageError(
                "compare prints a table of its own: leave out n, logprobs, json and echo"
            )


def main(argv: list[str], prog: str) -> int:
    """Load a model and generate."""
    options = parse(SampleOptions, argv, prog, ("checkpoint",), _COMMON)
    from jllama.commands.prompts_file import complete_file
    from jllama.generation.decode_batch import check_batch
    from jllama.generation.text import encode_prompt

    if options.prompt == "-":
        with fault_of("the prompt on stdin is not UTF-8 text", UnicodeDecodeError, kind=UsageError):
            options = dataclasses.replace(options, prompt=sys.stdin.buffer.read().decode())
    if (
        options.prompts_file and not Path(options.prompts_file).is_file()
    ):  # known before a large model is loaded
        raise JllamaError(f"there is no prompts_file at {options.prompts_file}: give a .jsonl file")
    grammar = _grammar(options)
    model = options.load_model()
    ends = options.max_new_tokens or None, options.stop, options.stop_ids, grammar
    prompt = encode_prompt(model, jllama.Prompt(options.prompt, sampling_params(options), *ends))
    check_batch(
        model.config, options.batch_size if options.prompts_file else options.n, options.speculate
    )
    options.say_loaded(model)
    problems: list[str] = []
    if options.prompts_file:
        completions, problems = complete_file(model, prompt, options)
    else:
        completions = (_compare if options.compare else _print_texts)(model, prompt, options)
    if options.speculate:
        drafted, accepted = (
            sum(each.drafted for each in completions),
            sum(each.accepted for each in completions),
        )
        share = f", {accepted / drafted:.0%}" if drafted else ""
        print(
            f"speculation: {accepted} of {drafted} guessed tokens were right{share}",
            file=sys.stderr,
        )
    if model.chat_template and any(
        each.finish_reason == "stop_id" and not each.ids for each in completions
    ):
        said = "a text ended at once: the model was trained to answer messages, so talk with it: jllama chat"
        print(said, options.checkpoint, file=sys.stderr)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _grammar(options: SampleOptions) -> jllama.Grammar | None:
    """What the text must match, if anything."""
    if (schema := options.json_schema) and not schema.lstrip().startswith("{"):
        said = f"json_schema is {schema[:100]}, which is neither a JSON object nor a file of one"
        with fault_of(said, OSError, ValueError, kind=UsageError):
            schema = Path(schema).read_text(encoding="utf-8")
    kind = "json_schema" if schema else "regex"
    return jllama.Grammar(kind, schema or options.regex) if schema or options.regex else None


def _print_texts(
    model: jllama.LanguageModel, prompt: jllama.Prompt, options: SampleOptions
) -> list[jllama.Completion]:
    """The continuations of an encoded prompt by consecutive seeds; a single one is shown as it comes."""
    from jllama.commands.prompts_file import log_probs, result, with_seed
    from jllama.generation.generate import stream

    echo = options.prompt if (not options.json if options.echo is None else options.echo) else ""
    streams = options.n == 1 and not options.json
    prompts = [with_seed(prompt, number) for number in range(options.n)]
    if streams:
        print(echo, end="")
        completions = [_shown(stream(model, prompts[0], speculate=options.speculate))]
    else:
        completions = jllama.generate(model, prompts, speculate=options.speculate)
    for number, (each, completion) in enumerate(zip(prompts, completions, strict=True), 1):
        seed = each.sampling.seed
        if options.json:
            line = {"prompt": options.prompt, "seed": seed} | result(
                model, options, options.prompt, each, completion
            )
            print(json.dumps(line, ensure_ascii=False))
            continue
        print(
            ""
            if streams
            else f"--- text {number} of {options.n}, seed {seed}\n{echo}{completion.text}"
        )
        if options.logprobs:
            print(" log_prob      id  token")
            for token in log_probs(model, each, completion, echo=bool(echo)):
                value = "        -" if token["log_prob"] is None else f"{token['log_prob']:9.4f}"
                print(f"{value} {token['id']:7}  {token['text']!r}")
    return completions


def _shown(pieces: Generator[str, None, jllama.Completion]) -> jllama.Completion:
    """Print a text as it comes."""
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            return end.value


def _compare(
    model: jllama.LanguageModel, prompt: jllama.Prompt, options: SampleOptions
) -> list[jllama.Completion]:
    """All the settings as the rows of one batch, and of one table."""
    replace = dataclasses.replace
    rows = [
        replace(prompt, sampling=replace(sampling, seed=options.seed))
        for sampling in COMPARED.values()
    ]
    table = Table(
        "setting", Column("text", overflow="fold", min_width=6), show_lines=True
    )  # which must not vanish
    completions = jllama.generate(model, rows, speculate=options.speculate)
    for name, completion in zip(COMPARED, completions, strict=True):
        table.add_row(name, Text(options.prompt, "bold") + Text(completion.text))
    Console().print(table)
    return completions
