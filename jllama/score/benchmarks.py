"""Scores that people know: CORE, ARC, MMLU, GSM8K and HumanEval, from files of their questions.

A question is judged by how likely the model finds its options, or by the text that the model
writes. ``benchmarks.yaml`` has the definitions. Texts are encoded, cut and put through chat
templates as lm-eval's own Hugging Face model does it.
"""

import csv
import http.client
import itertools
import operator
import random
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import yaml

from jllama.core import JllamaError, UsageError
from jllama.data.corpus import read_rows
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt, prompt_ids
from jllama.models.language_model import LanguageModel
from jllama.score.scoring import TokenScores, token_log_probs
from jllama.system import line_process
from jllama.system.errors import unknown_name
from jllama.system.files import Json, atomic_write, cache_folder, errors_as
from jllama.system.places import as_place
from jllama.system.progress import progress
from jllama.system.remote import fetch
from jllama.templates.messages import find_template, template_variables
from jllama.templates.template import render

_DEFINITIONS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined)
_WRONG = (LookupError, OSError, TypeError, ValueError, jinja2.TemplateError, yaml.YAMLError)
_FEWSHOT_SEED = 1234
_CORE_SEED = 1337
_PROGRAM_S = 10  # that a program of HumanEval may take
_PASSED = 77  # no code with which programs end
_PROGRAM = """
import contextlib, os, resource, signal, sys
PASSED, LIMIT_S, PATH = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LIMITS = {"CPU": 5, "AS": 1 << 32, "FSIZE": 0, "CORE": 0, "NOFILE": 64, "NPROC": 0}
REFUSED = ["ctypes", "os", "shutil", "signal", "socket", "subprocess"]
HARMLESS = ["os.listdir", "os.putenv", "os.scandir", "os.unsetenv"]  # what imports do

def refuse(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.partition(".")[0] in REFUSED and event not in HARMLESS):
        raise ImportError(f"a program may not use {event}")

code = compile(open(PATH, encoding="utf-8").read(), "program", "exec")
signal.alarm(LIMIT_S)  # if the process that started this one has ended
for name, limit in LIMITS.items():
    with contextlib.suppress(ValueError, OSError):  # macOS does not know all of them
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
sys.addaudithook(refuse)
exec(code, {"__name__": "program"})
os._exit(PASSED)
"""
"""What runs a program in a process of its own, with limits by which mistakes do no harm: it cannot
write files, start processes, connect, or take much time or memory. This is no sandbox against a
program that was written to break out of it."""


class Continuation(NamedTuple):
    """A context and a text after it, as tokens."""

    text: str  # both, for messages
    ids: Any  # of the context and the text
    num_scored: int  # how many of the last ``ids`` are the text's


class Question(NamedTuple):
    """A question, and solved ones that stand before it."""

    definition: Json
    groups: Sequence[str]  # whose results it counts for
    item: Json
    examples: Sequence[Json]
    delimiter: str = " "  # between a context and its continuation


def check_benchmarks(
    names: Sequence[str],
    run_programs: bool,
    num_fewshot: int | None,
    apply_chat_template: bool,
) -> None:
    """Raise ``UsageError`` if a benchmark is unknown, does not take an option of ``evaluate``, or
    runs programs and must not.
    """
    for name in names:
        if name not in _DEFINITIONS:
            raise unknown_name("benchmark", name, _DEFINITIONS)
        if name.startswith("humaneval") and not run_programs:
            raise UsageError(
                f"{name} runs on this machine, with your rights, the programs that the model "
                "writes, each in a process with limits of time, memory and files: "
                "allow it by --run_programs true"
            )
        if name == "core" and (apply_chat_template or num_fewshot is not None):
            raise UsageError(
                "core is of texts with examples of its own: leave out num_fewshot and "
                "apply_chat_template"
            )


def evaluate(
    model: LanguageModel,
    name: str,
    place: str = "",
    *,
    limit: int = 0,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    batch_size: int = 8,
) -> dict[str, Json]:
    """Ask a model the questions of a benchmark, and return its results.

    Sources: CORE of DCLM (Li et al. 2024, arXiv:2406.11794) as nanochat computes it; ARC (Clark et
    al. 2018, arXiv:1803.05457), MMLU (Hendrycks et al. 2021, arXiv:2009.03300), GSM8K (Cobbe et al.
    2021, arXiv:2110.14168) and HumanEval (Chen et al. 2021, arXiv:2107.03374) as lm-eval does.

    Args:
        model: the model, with its tokenizer.
        name: the benchmark, checked by ``check_benchmarks``, as its options. HumanEval runs
            programs that the model writes.
        place: a folder, file or URL in place of the published data.
        limit: the number of questions of each task or subject; 0 is all.
        num_fewshot: the number of solved examples before each question; None is the benchmark's.
        apply_chat_template: whether questions are messages of a chat.
        batch_size: how many options or answers go through the model at once.

    Returns:
        The results of the benchmark, and those of its tasks or subjects as ``name/task``: the
        number of ``questions``, and each metric with its standard error (``..._stderr``). CORE's
        tasks have ``centered`` as well, and its mean is that of ``core``, which also has the number
        of questions that are ``too_long``: what is scored of an option does not fit into the
        context, so they count as wrong.

    Raises:
        JllamaError: the data are missing or damaged, or the model has no tokenizer.
    """
    # 1) Read the questions.
    definition = _DEFINITIONS[name]
    path = _local(place or definition["data"])
    is_core = name == "core"
    if is_core:
        questions = [*_core_questions(path, limit)]
    else:
        questions = [*_questions(name, path, limit, num_fewshot)]
    inputs = [_inputs(model, question, apply_chat_template) for question in questions]

    # 2) Write all answers, or score all options at once.
    outputs: list[Any] = [None] * len(inputs)
    if "stop" in definition:
        with progress("answers written", len(inputs)) as move:
            for index, completion in completions(model, inputs, batch_size=batch_size):
                outputs[index] = completion.text
                move(1)
    else:
        max_length = model.config.max_seq_len
        if is_core:
            max_length -= 1  # as nanochat cuts
        options = [*itertools.chain.from_iterable(inputs)]
        scores = iter(_score(model, options, max_length, batch_size))
        outputs = [[*itertools.islice(scores, len(group))] for group in inputs]

    # 3) Judge them, and take the means.
    outcomes = defaultdict[str, list[dict[str, float]]](list)
    for question, output in zip(questions, outputs, strict=True):
        outcome: dict[str, float] = {
            metric: is_right(rule, question.item, output)
            for metric, rule in question.definition["metrics"].items()
        }
        if is_core:
            outcome["centered"] = centered(outcome["acc"], question.definition["chance"])
        for group in question.groups:
            outcomes[group].append(outcome)
    results: dict[str, Json] = {}
    for group, rows in outcomes.items():
        results[group] = {"questions": len(rows)}
        for metric in rows[0]:
            values = [outcome[metric] for outcome in rows]
            # The sample variance of one value is 0, where NumPy has no number.
            error = np.std(values, ddof=len(rows) > 1) / len(rows) ** 0.5
            results[group] |= {metric: np.mean(values).item(), f"{metric}_stderr": error.item()}
    if is_core:
        mean = np.mean([numbers["centered"] for numbers in results.values()]).item()
        too_long = outputs.count([])
        results["core"] = {"questions": len(questions), "too_long": too_long, "centered": mean}
    return results


def centered(accuracy: float, chance: float) -> float:
    """Scale an accuracy so that chance is 0 and perfect is 1.

    Source: Li et al. 2024 (DCLM), arXiv:2406.11794, section 3.5.

    Examples:
        >>> centered(0.625, 0.25)
        0.5
    """
    return (accuracy - chance) / (1 - chance)


def _local(place: str) -> Path:
    """Return the local copy of a place; a file on the web is downloaded once."""
    if not re.match("https?://", place):
        return fetch(as_place(place))
    path = cache_folder() / re.sub(r"\W+", "_", place)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            progress(f"reading {place}"),
            errors_as(f"{place} cannot be copied to {path}", OSError, http.client.HTTPException),
            atomic_write(path) as partial,
            urllib.request.urlopen(place, timeout=30) as answer,
            partial.open("wb") as file,
        ):
            shutil.copyfileobj(answer, file)
            if answer.length:
                raise OSError(f"it ends {answer.length:,} bytes too early")
    return path


def _items(definition: Json, path: Path, split: str) -> list[Json]:
    """Return the records of a file, or of a folder's files that begin with a split's name."""
    if path.is_dir():
        path /= f"{split}*"
    read = _JINJA.compile_expression(definition["item"], undefined_to_none=False)
    files = sorted(path.parent.glob(path.name))
    items = []
    for file in files:
        for where, record in read_rows(file):
            with errors_as(where, *_WRONG):
                item: Any = read(**record)
                if item["answer"] not in range(len(_pairs(item))):
                    raise ValueError(f"there is no option {item['answer']}, counted from 0")
            items.append(item)
    if not items:
        problem = "are no records in" if files else "is no file at"
        raise JllamaError(f"there {problem} {path}: give a file with some, or a folder")
    return items


def _questions(name: str, path: Path, limit: int, num_fewshot: int | None) -> Iterator[Question]:
    """Yield the questions of a benchmark that lm-eval defines."""
    definition = _DEFINITIONS[name]
    num_examples = definition["num_fewshot"] if num_fewshot is None else num_fewshot
    folder = path if path.is_dir() else path.parent
    solved = _items(definition, folder, definition["examples"]) if num_examples else []
    generator = random.Random(_FEWSHOT_SEED)
    groups_of = operator.itemgetter("groups")
    items = sorted(_items(definition, path, "test"), key=groups_of)
    for groups, members in itertools.groupby(items, groups_of):
        pool = [example for example in solved if example["groups"] == groups]
        if len(pool) < num_examples:
            raise JllamaError(
                f"{path} has {len(pool)} solved examples of one kind: lower num_fewshot"
            )
        names = [name, *(f"{name}/{group}" for group in groups)]
        for item in itertools.islice(members, limit or None):
            examples = pool[:num_examples]
            if "first" not in definition:
                examples = generator.sample(pool, num_examples)
            yield Question(definition, names, item, examples)


def _core_questions(path: Path, limit: int) -> Iterator[Question]:
    """Yield the questions of all tasks of CORE; their definitions have the accuracy of ``chance``.

    Source: nanochat's ``base_eval.py`` and ``core_eval.py``.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        errors_as(f"{path} is no bundle of CORE, or limit is too low", *_WRONG, zipfile.BadZipFile),
    ):
        # 1) Find the bundle, in a folder or a zip file.
        if path.is_file():
            zipfile.ZipFile(path).extractall(folder)  # never outside of it, whatever the names
            path = Path(folder)
        config = next(iter(path.rglob("core.yaml")), path / "core.yaml")
        table = config.with_name("eval_meta_data.csv").read_text(encoding="utf-8")
        baselines = {
            row["Eval Task"]: float(row["Random baseline"])
            for row in csv.DictReader(table.splitlines())
        }

        # 2) Shuffle each task's questions, and draw the examples of each from the others.
        for task in yaml.safe_load(config.read_text(encoding="utf-8"))["icl_tasks"]:
            group = f"core/{task['label']}"
            chance = {"chance": 0.01 * baselines[task["label"]]}
            definition = _DEFINITIONS["core"]["types"][task["icl_task_type"]] | chance
            items = _items(definition, config.parent / "eval_data" / task["dataset_uri"], "")
            random.Random(_CORE_SEED).shuffle(items)
            items = items[: limit or None]
            for index, item in enumerate(items):
                others = items[:index] + items[index + 1 :]
                num_examples = task["num_fewshot"][0]
                examples = random.Random(_FEWSHOT_SEED + index).sample(others, num_examples)
                delimiter = task.get("continuation_delimiter", " ")
                yield Question(definition, [group], item, examples, delimiter)


def _pairs(item: Json) -> list[tuple[str, str]]:
    """Return the context and the continuation of each option."""
    return [*itertools.product(item["contexts"], item["continuations"])]


def _inputs(model: LanguageModel, question: Question, as_chat: bool) -> Any:
    """Return the options of a question as ``Continuation``, or the prompt of an answer.

    There are no options of a question of CORE if one is longer than the context.
    """
    # 1) Put the examples and their answers before each context.
    definition, _, item, examples, delimiter = question
    prefix = item.get("prefix", "")
    start = [("system", item.get("description", ""), "")]
    for example in examples:
        before, answer = _pairs(example)[example["answer"]]
        start += [("user", before, delimiter), ("assistant", answer, "\n\n")]
    contexts = []
    for context in item["contexts"]:
        turns = [*start, ("user", context, ""), ("assistant", prefix, "")]
        if as_chat:
            messages = [{"role": role, "content": text} for role, text, _ in turns if text]
            contexts.append(_chat_text(model, messages, not prefix))
        else:
            contexts.append("".join(text + end for _, text, end in turns))

    # 2) Encode the prompt of an answer, cut on the left to leave room for its new tokens.
    tokenizer = model.text_tokenizer
    max_length = model.config.max_seq_len
    if "stop" in definition:
        max_new_tokens = min(definition["max_new_tokens"], max_length // 2)
        ids = prompt_ids(tokenizer, contexts[0])[max_new_tokens - max_length :]
        stop_ids = (*model.stop_ids, tokenizer.eos_id)
        greedy = SamplingParams(temperature=0)
        prompt = Prompt(ids, greedy, max_new_tokens, definition["stop"], stop_ids=stop_ids)
        return encode_prompt(model, prompt)

    # 3) Encode the options, and count the tokens of each that are scored.
    is_core = "chance" in definition

    def encode(text: str) -> list[int]:
        if is_core:
            return [tokenizer.bos_id, *tokenizer.encode(text)]
        return prompt_ids(tokenizer, text)

    space = "" if as_chat else delimiter
    texts = [
        context + space + continuation
        for context, continuation in itertools.product(contexts, item["continuations"])
    ]
    rows = [encode(text) for text in texts]
    scored = definition["scored"]
    if scored == "shared end":
        shared = commonprefix([row[::-1] for row in rows])  # noqa: RUF071 - it takes any lists
        counts = [len(shared)] * len(rows)
    else:
        start_ids = commonprefix(rows)  # noqa: RUF071
        if scored == "continuation":
            start_ids = encode((contexts[0] + space).rstrip())
        counts = [len(row) - len(start_ids) for row in rows]
    if is_core and max(counts) >= max_length:
        return []
    return [
        Continuation(text, np.array(row, np.int32), count)
        for text, row, count in zip(texts, rows, counts, strict=True)
    ]


def _chat_text(model: LanguageModel, messages: Sequence[Json], add_generation_prompt: bool) -> str:
    """Return a conversation as text, up to the next answer, or with its last message left open."""
    tokenizer = model.text_tokenizer
    template = find_template(tokenizer, model.chat_template)
    text = render(template, **template_variables(tokenizer, messages, add_generation_prompt))
    if add_generation_prompt:
        return text
    last = messages[-1]["content"].lstrip()
    if last not in text:
        last = last.rstrip()  # many templates strip it
    return text[: text.rindex(last) + len(last)]


def _score(
    model: LanguageModel, options: Sequence[Continuation], max_length: int, batch_size: int
) -> list[TokenScores]:
    """Score each text, cut on the left to what the model sees at once. A bar shows the progress.

    Raises:
        JllamaError: what is scored of a text is longer than ``max_length``.
    """
    for text, _, count in options:
        if count > max_length:
            raise JllamaError(
                f"the option ...{text[-20:]!r} has {count} tokens and the model's context is "
                f"{max_length}: take a model with a longer context"
            )
    with progress("tokens scored") as move:
        return token_log_probs(
            model,
            [option.ids[-max_length - 1 :] for option in options],
            [option.num_scored for option in options],
            batch_size=batch_size,
            on_progress=move,
        )


def is_right(rule: Any, item: Json, output: Any) -> bool:
    """Return whether an answer is right, by the rule of a metric.

    ``output`` is the scores of the options, if they fit, or the text of the answer.
    """
    if rule == "passes":
        prompt, test = item["program"]
        return passes(prompt + output + test)
    if not output:
        return False
    if rule == "greedy":
        return bool(output[0].is_likeliest.all())
    if isinstance(rule, str):
        means = []
        for (_, option), score in zip(_pairs(item), output, strict=True):
            size = {"option": 1, "character": len(option), "token": len(score.log_probs)}[rule]
            # The mean of no tokens is worse than any other.
            means.append(score.log_probs.sum(dtype=float) / size if size else -np.inf)
        return int(np.argmax(means)) == item["answer"]
    pattern, index = rule
    matches = re.findall(pattern, output) or ["[invalid]"]
    (expected,) = item["continuations"]
    return _number(matches[index]) == _number(expected)


def _number(text: str) -> str:
    return re.sub(r"\.$", "", re.sub(r",|\$|(?s:.*)#### ", "", text)).lower()


def passes(program: str) -> bool:
    """Run a program of Python that a model has written; return whether it came to its end.

    It runs in an empty folder and without the environment, under the limits of ``_PROGRAM``, where
    imports write no bytecode. Its process is killed with all that it has started.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-IB", "-c", _PROGRAM, str(_PASSED), str(_PROGRAM_S), path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            return process.wait(_PROGRAM_S) == _PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            line_process.end(process)
