"""EleutherAI's lm-eval on a jllama model: the numbers are those of lm-eval's own Hugging Face model."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from jllama.checkpoints.registry import load
from jllama.errors import JllamaError, UsageError
from jllama.evaluation.scoring import sliding_windows, token_log_probs
from jllama.files import Json
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.language_model import LanguageModel
from jllama.progress import progress
from jllama.templates.messages import find_template, template_variables
from jllama.templates.template import render

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    raise JllamaError(
        f"lm-eval's tasks need its package ({error}): pip install 'jllama[eval]'"
    ) from error

_NEW_TOKENS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # the first one given counts
_SAMPLING = tuple(vars(SamplingParams()))


class JllamaLM(TemplateLM):
    """A jllama model for lm-eval: ``lm_eval.simple_evaluate(JllamaLM("runs/quickstart"), tasks=["arc_easy"])``.

    Importing this module registers it as ``jllama``: ``simple_evaluate("jllama", model_args={"pretrained": path})``.
    BOS stands where lm-eval's Hugging Face model puts it, so that results compare: in front of every text if the
    tokenizer adds it, and alone before a continuation without context. ``loglikelihood_rolling`` puts a prefix token
    in front of what the tokenizer gives, as there: a tokenizer that adds BOS thus gives two, and the second is scored.

    ``pretrained`` is a checkpoint in any format, or a loaded model, which must have a tokenizer; ``batch_size`` rows of
    at most ``max_length`` tokens (None is the context) go through it at once; ``dtype`` is as for ``load``.
    """

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        batch_size: Any = 8,
        max_length: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.model = (
            pretrained if isinstance(pretrained, LanguageModel) else load(pretrained, dtype)
        )
        self._tokenizer, context = self.model.text_tokenizer, self.model.config.max_seq_len
        self.max_length = context if max_length is None else max_length
        if not 1 <= self.max_length <= context:
            raise UsageError(
                f"max_length is {max_length}; it must be between 1 and the model's context of {context}"
            )
        if not str(batch_size).isdecimal() or not int(batch_size):
            raise UsageError(f"batch_size is {batch_size!r}; it must be at least 1")
        self.batch_size = int(batch_size)

    # What lm-eval asks for: the token that ends a text, the one before a text without context, a name for its cache.
    eot_token_id: Any = property(lambda self: self._tokenizer.eos_id)
    prefix_token_id: Any = property(lambda self: self._tokenizer.bos_id)
    tokenizer_name: Any = property(lambda self: self._tokenizer.fingerprint())

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Ids of a text, which may spell out special tokens; behind BOS if the tokenizer adds it and there is none."""
        ids, bos = self._tokenizer.encode_with_special_tokens(string), [self._tokenizer.bos_id]
        return (
            bos + ids
            if self._tokenizer.add_bos and add_special_tokens is not False and ids[:1] != bos
            else ids
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt its last message is left open, to be continued."""
        variables = template_variables(self._tokenizer, chat_history, add_generation_prompt)
        text = render(self.chat_template(True), **variables)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].lstrip()
        last = last if last in text else last.rstrip()  # as many templates strip it
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The Jinja template that lm-eval notes with its results."""
        if isinstance(chat_template, str):
            raise UsageError(
                f"apply_chat_template is {chat_template!r}; a jllama model has one template: give True"
            )
        return find_template(self._tokenizer, self.model.chat_template) if chat_template else ""

    def _loglikelihood_tokens(
        self, requests: list[Any], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Each continuation's ``log p`` after its context, cut on the left to what fits, and whether it is greedy."""
        for (_, text), _, continuation in requests:
            if (tokens := len(continuation)) > self.max_length:
                said = f"the continuation {text[:20]!r}... has {tokens} tokens and max_length is {self.max_length}"
                raise JllamaError(
                    f"{said}: leave the task out, or take a model with a longer context"
                )
        rows = [
            (context + continuation)[-self.max_length - 1 :]
            for _, context, continuation in requests
        ]
        results = self._score(rows, [len(continuation) for _, _, continuation in requests])
        for (key, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Each whole text's ``log p``, in windows that overlap only in context."""
        texts, size = (
            [[self.prefix_token_id, *self.tok_encode(*request.args)] for request in requests],
            self.max_length,
        )
        windows = [
            (owner, *cut)
            for owner, ids in enumerate(texts)
            for cut in sliding_windows(len(ids), size, size)
        ]
        scores = self._score(
            [texts[i][start:end] for i, start, end, _ in windows], [count for *_, count in windows]
        )
        totals = [0.0] * len(requests)
        for (owner, *_), (log_prob, _) in zip(windows, scores, strict=True):
            totals[owner] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """The summed log-probability of the last tokens of each row, and whether all are the likeliest."""
        with progress("tokens scored") as move:
            scores = token_log_probs(
                self.model,
                rows,
                counts,
                batch_size=self.batch_size,
                on_progress=lambda done, total: move(completed=done, total=total),
            )
        return [
            (float(row.log_probs.sum(dtype=float)), bool(row.is_likeliest.all())) for row in scores
        ]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, without the stop string that ended it; greedy unless the task samples."""
        texts, prompts = (
            [""] * len(requests),
            [self._prompt(*cast(Any, request.args)) for request in requests],
        )
        with progress("texts generated", len(requests)) as move:
            for index, completion in completions(self.model, prompts, batch_size=self.batch_size):
                # As lm-eval's models decode: by itself, so that SentencePiece leaves out a leading space.
                loses_space = not self._tokenizer.decode(completion.ids).startswith(" ")
                texts[index] = completion.text.removeprefix(" " * loses_space)
                self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
                move(1)
        return texts

    def _prompt(self, context: str, arguments: Json) -> Prompt:
        """A context, cut on the left to leave room for new tokens; a stop string may be the name of a special token."""
        stop, max_new_tokens, sampling = generation_arguments(arguments)
        room = self.max_length - max_new_tokens
        if room < 1:
            said = f"max_gen_toks {max_new_tokens} leaves no room for a prompt in max_length {self.max_length}"
            raise JllamaError(
                f"{said}: lower it (generation_kwargs), or take a model with a longer context"
            )
        ids = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        special = self._tokenizer.special_tokens
        stop_ids = {
            *self.model.stop_ids,
            self.eot_token_id,
            *(special[text] for text in stop if text in special),
        }
        return encode_prompt(
            self.model, Prompt(ids, sampling, max_new_tokens, stop, sorted(stop_ids))
        )


register_model("jllama")(JllamaLM)


def generation_arguments(arguments: Json) -> tuple[list[str], int, SamplingParams]:
    """Turn a task's ``generation_kwargs`` into stop strings, the most new tokens, and how they are sampled.

    Greedy unless ``do_sample`` or, where that is not said, ``temperature > 0``. ``JllamaError`` for what is unknown.
    """
    remaining = {name: value for name, value in arguments.items() if value is not None}
    until, do_sample = remaining.pop("until", []), remaining.pop("do_sample", None)
    stop = [string for string in ([until] if isinstance(until, str) else until) if string]
    new_tokens = [remaining.pop(name) for name in _NEW_TOKENS if name in remaining] or [
        256
    ]  # lm-eval's own default
    sampling = {name: remaining.pop(name) for name in _SAMPLING if name in remaining}
    for name, value in remaining.items():
        if (name, value) != ("num_beams", 1):
            known = ", ".join(("until", "do_sample", *_NEW_TOKENS, *_SAMPLING))
            raise JllamaError(
                f"generation_kwargs has {name}: {value!r}, which jllama does not honor; it knows {known}"
            )
    draws = sampling.get("temperature") if do_sample is None else do_sample
    sampling["temperature"] = float(sampling.get("temperature", 1)) if draws else 0.0
    return stop, int(new_tokens[0]), SamplingParams(**sampling)


def task_manager(names: Sequence[str], include_path: str = "") -> TaskManager:
    """The index of lm-eval's tasks and those in a folder of one's own, which come first.

    ``names`` are of tasks or groups, or paths of YAML files. lm-eval's own are over ten thousand files, read only if a
    name is not among those of the folder. ``UsageError`` if there is no such folder, or a name is unknown.
    """
    if include_path:
        if not Path(include_path).is_dir():
            raise UsageError(
                f"there is no folder at include_path {include_path}: give one with tasks' YAML files"
            )
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):  # a group may be made of lm-eval's own
            return own
    manager = TaskManager(include_path=include_path or None)
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            close = difflib.get_close_matches(name, manager.all_tasks, 1)
            hint = (
                f"did you mean {close[0]}?"
                if close
                else "give one of its own, or a folder of others (include_path)"
            )
            raise UsageError(f"lm-eval has no task {name!r}; {hint}")
    return manager


def evaluate_tasks(
    lm: JllamaLM, tasks: Sequence[str], manager: TaskManager, **arguments: Any
) -> Json:
    """The results of ``lm_eval.simple_evaluate``, whose ``arguments`` these are. Its prints go to stderr.

    ``JllamaError`` with lm-eval's own message if it fails, for example because it cannot download a task's data.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            results = simple_evaluate(lm, tasks=[*tasks], task_manager=manager, **arguments)
    except JllamaError:
        raise
    except Exception as error:  # of lm-eval, or of what it reads data and computes metrics with
        raise JllamaError(
            f"lm-eval stopped with {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return dict(results or {})  # only processes other than the first get nothing


def table(results: Json) -> str:
    """lm-eval's own table of what ``evaluate_tasks`` gives."""
    return make_table(results) + (make_table(results, "groups") if results.get("groups") else "")
