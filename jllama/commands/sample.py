"""``jllama sample``, also ``sample.py``: generate text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Generator
from pathlib import Path

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions, sampling_params
from jllama.core import JllamaError, UsageError, check_fields
from jllama.generation.sampling_params import SamplingParams
from jllama.system.files import errors_as

_COMMON = "prompt prompts_file output n max_new_tokens stop temperature seed quantize"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(SamplingParams, ModelOptions):
    """Continue a prompt, or a file of prompts, with a trained model; text is printed as it comes.

    Examples:
        runs/quickstart --prompt "def "
        model.gguf --prompt "Once upon a time" --max_new_tokens 200 --temperature 0.5 -n 3
        smollm2/ --prompts_file prompts.jsonl --output texts.jsonl

    Args:
        prompt: the text to continue; if it is empty, the model begins. A dash reads it from stdin.
        parse_special: turn special tokens that a prompt spells out, such as <|im_start|>, into
            their ids; false keeps them as plain text.
        prompts_file: a .jsonl file of objects with a "prompt" each, and optional settings.
        output: the .jsonl file for the results of prompts_file. If the command is interrupted,
            the same command continues where it stopped.
        n: the number of texts per prompt; each has the next seed.
        max_new_tokens: the maximum number of tokens to generate; 0 fills the rest of the model's
            context.
        stop: a string that ends the text, or a JSON list of them; it is not part of the text.
        stop_ids: a JSON list of token ids that end the text; the default is the model's own.
        json_schema: a JSON schema that the text must match: the schema itself, or a .json file.
        regex: a regular expression that the whole text must match.
        speculate: the number of tokens to guess at each step by prompt lookup; 0 is off. The text
            stays the same, and repetitive text is generated faster.
        batch_size: the number of texts of prompts_file to generate at once.
        logprobs: show each token and its log-probability, too.
        echo: print the prompt before the text; by default only without --json.
        json: print a JSON object for each text instead of the text.
    """

    prompt: str = ""
    parse_special: bool = True
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

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)
        ModelOptions.__post_init__(self)
        check_fields(self, "", "max_new_tokens speculate", lambda value: value >= 0, "0 or more")
        expected = "at least 1 and at most 100,000"
        check_fields(self, "", "n batch_size", lambda value: 1 <= value <= 100_000, expected)
        if bool(self.prompts_file) != bool(self.output):
            raise UsageError("prompts_file and output go together: give both, or neither")
        for name in ("prompt", "json"):
            if self.prompts_file and getattr(self, name):
                raise UsageError(f"{name} has no meaning with prompts_file: leave it out")
        exclusive = [self.json_schema, self.regex, self.speculate]
        if sum(map(bool, exclusive)) > 1:
            raise UsageError(
                "json_schema, regex and speculate do not go together: give one of them"
            )


def main(argv: list[str], prog: str) -> int:
    """Load a model and generate text."""
    options = parse(SampleOptions, argv, prog, ("checkpoint",), _COMMON)
    from jllama.commands.prompts_file import complete_file
    from jllama.generation.sampler import check_batch
    from jllama.generation.text import encode_prompt

    # Report what is wrong with the prompts before a large model is loaded.
    if options.prompt == "-":
        with errors_as(
            "the prompt on stdin is not UTF-8 text", UnicodeDecodeError, kind=UsageError
        ):
            options = dataclasses.replace(options, prompt=sys.stdin.buffer.read().decode())
    if options.prompts_file and not Path(options.prompts_file).is_file():
        raise JllamaError(f"there is no prompts_file at {options.prompts_file}: give a .jsonl file")
    grammar = _grammar(options)

    # Load the model, and encode the prompt.
    model = options.load_model()
    prompt = jllama.Prompt(
        options.prompt,
        sampling_params(options),
        options.max_new_tokens or None,
        options.stop,
        options.stop_ids,
        grammar,
        parse_special=options.parse_special,
    )
    encoded = encode_prompt(model, prompt)
    num_rows = options.batch_size if options.prompts_file else options.n
    check_batch(model.config, num_rows, options.speculate)
    options.say_loaded(model)

    # Generate the texts, and print notes and problems.
    problems: list[str] = []
    if options.prompts_file:
        completions, problems = complete_file(model, prompt, options)
    else:
        completions = _print_texts(model, encoded, options)
    _print_notes(model, completions, options)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _print_notes(
    model: jllama.LanguageModel, completions: list[jllama.Completion], options: SampleOptions
) -> None:
    """Print to stderr how well tokens were guessed, and that a model wants to be talked with."""
    if options.speculate:
        drafted = sum(completion.drafted for completion in completions)
        accepted = sum(completion.accepted for completion in completions)
        share = f", {accepted / drafted:.0%}" if drafted else ""
        note = f"speculation: {accepted} of {drafted} guessed tokens were right{share}"
        print(note, file=sys.stderr)
    ended_at_once = any(
        completion.finish_reason == "stop_id" and not completion.ids for completion in completions
    )
    if model.chat_template and ended_at_once:
        note = "a text ended at once: the model was trained to answer messages, so chat with it"
        print(f"{note}: jllama chat {options.checkpoint}", file=sys.stderr)


def _grammar(options: SampleOptions) -> jllama.Grammar | None:
    """Return the grammar that the text must match, or None."""
    schema = options.json_schema
    if schema and not schema.lstrip().startswith("{"):
        problem = f"json_schema is {schema[:100]}, which is neither a JSON object nor a file of one"
        with errors_as(problem, OSError, ValueError, kind=UsageError):
            schema = Path(schema).read_text(encoding="utf-8")
    if schema:
        return jllama.Grammar("json_schema", schema)
    return jllama.Grammar("regex", options.regex) if options.regex else None


def _print_texts(
    model: jllama.LanguageModel, prompt: jllama.Prompt, options: SampleOptions
) -> list[jllama.Completion]:
    """Print the continuations of a prompt by consecutive seeds; a single one is streamed."""
    from jllama.commands.prompts_file import log_probs, result, with_seed
    from jllama.generation.generate import stream

    echoes = options.echo if options.echo is not None else not options.json
    echo = options.prompt if echoes else ""
    streams = options.n == 1 and not options.json
    prompts = [with_seed(prompt, number) for number in range(options.n)]
    if streams:
        print(echo, end="")
        completions = [_stream_text(stream(model, prompts[0], speculate=options.speculate))]
        print()
    else:
        completions = jllama.generate(model, prompts, speculate=options.speculate)
    for number, completion in enumerate(completions):
        prompt = prompts[number]
        seed = prompt.sampling.seed
        if options.json:
            line = {"prompt": options.prompt, "seed": seed}
            line |= result(model, options, options.prompt, prompt, completion)
            print(json.dumps(line, ensure_ascii=False))
            continue
        if not streams:
            print(f"--- text {number + 1} of {options.n}, seed {seed}\n{echo}{completion.text}")
        if options.logprobs:
            print(" log_prob      id  token")
            for token in log_probs(model, prompt, completion, echo=bool(echo)):
                value = "        -" if token["log_prob"] is None else f"{token['log_prob']:9.4f}"
                print(f"{value} {token['id']:7}  {token['text']!r}")
    return completions


def _stream_text(pieces: Generator[str, None, jllama.Completion]) -> jllama.Completion:
    """Print the pieces of a text as they come, and return its completion."""
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            return end.value
