"""EleutherAI's lm-eval on a jllama model, with the numbers of lm-eval's own Hugging Face model."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from jllama.core import JllamaError, UsageError
from jllama.formats.registry import load
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.models.language_model import LanguageModel
from jllama.score.benchmarks import (
    Continuation,
    chat_text,
    encode_cut_prompt,
    score_continuations,
)
from jllama.score.scoring import sliding_windows
from jllama.system.files import Json
from jllama.system.progress import progress
from jllama.templates.messages import find_template

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

# Names for the number of new tokens, of which the first one present counts.
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = tuple(vars(SamplingParams()))


class JllamaLM(TemplateLM):
    """A jllama model for lm-eval.

    Example::

        lm_eval.simple_evaluate(JllamaLM("runs/quickstart"), tasks=["arc_easy"])
        lm_eval.simple_evaluate("jllama", model_args={"pretrained": path}, tasks=["arc_easy"])

    The second form needs this module to be imported, which registers the name.

    BOS stands where lm-eval's Hugging Face model puts it, so that results compare: before every
    text if the tokenizer adds it, and alone before a continuation without context.
    ``loglikelihood_rolling`` puts a prefix token before the tokenizer's ids, as that model does: a
    tokenizer that adds BOS thus gives two, and the second is scored.

    Args:
        pretrained: a checkpoint in any format, or a loaded model, which must have a tokenizer.
        batch_size: how many rows go through the model at once.
        max_length: tokens of a row at most; None is the context.
        dtype: as for ``load``.
    """

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        batch_size: Any = 8,
        max_length: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, LanguageModel):
            pretrained = load(pretrained, dtype)
        self.model = pretrained
        self._tokenizer = pretrained.text_tokenizer
        context = pretrained.config.max_seq_len
        self.max_length = context if max_length is None else max_length
        if not 1 <= self.max_length <= context:
            raise UsageError(
                f"max_length is {max_length}; "
                f"it must be between 1 and the model's context of {context}"
            )
        if not str(batch_size).isdecimal() or not int(batch_size):
            raise UsageError(f"batch_size is {batch_size!r}; it must be at least 1")
        self.batch_size = int(batch_size)

    @property
    def eot_token_id(self) -> Any:
        """The token that ends a text."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> Any:
        """The token before a text without context."""
        return self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> Any:
        """A name for lm-eval's cache."""
        return self._tokenizer.fingerprint()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Encode a text, in which special tokens may be spelled out, with at most one BOS."""
        ids = self._tokenizer.encode_with_special_tokens(string)
        bos = [self._tokenizer.bos_id]
        if self._tokenizer.add_bos and add_special_tokens is not False and ids[:1] != bos:
            return bos + ids
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, by default up to the next answer, else left open."""
        return chat_text(self.model, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the Jinja template that lm-eval notes with its results."""
        if isinstance(chat_template, str):
            raise UsageError(
                f"apply_chat_template is {chat_template!r}; "
                "a jllama model has one template: give True"
            )
        return find_template(self._tokenizer, self.model.chat_template) if chat_template else ""

    def _loglikelihood_tokens(
        self, requests: list[Any], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's ``log p`` after its context, and whether it is greedy.

        A context that is too long is cut on the left.
        """
        results = self._score(
            [
                Continuation(text, context + continuation, len(continuation))
                for (_, text), context, continuation in requests
            ]
        )
        for (key, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each whole text's ``log p``, in windows that overlap only in context."""
        size = self.max_length
        owners = []  # the request that a window belongs to
        windows = []
        for owner, request in enumerate(requests):
            ids = [self.prefix_token_id, *self.tok_encode(*request.args)]
            for start, end, count in sliding_windows(len(ids), size, size):
                owners.append(owner)
                windows.append(Continuation("", ids[start:end], count))
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._score(windows), strict=True):
            totals[owner] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _score(self, continuations: Sequence[Continuation]) -> list[tuple[float, bool]]:
        """Return the log-probability of each text, and if all of its tokens are likeliest."""
        scores = score_continuations(self.model, continuations, self.max_length, self.batch_size)
        return [
            (float(row.log_probs.sum(dtype=float)), bool(row.is_likeliest.all())) for row in scores
        ]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop string; greedy unless the task samples."""
        texts = [""] * len(requests)
        prompts = [self._prompt(*cast(Any, request.args)) for request in requests]
        with progress("texts generated", len(requests)) as move:
            for index, completion in completions(self.model, prompts, batch_size=self.batch_size):
                text = completion.text
                # lm-eval's models decode a continuation by itself, where SentencePiece drops a
                # leading space.
                if not self._tokenizer.decode(completion.ids).startswith(" "):
                    text = text.removeprefix(" ")
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                move(1)
        return texts

    def _prompt(self, context: str, arguments: Json) -> Prompt:
        """Return a context as a prompt, cut on the left to leave room for new tokens."""
        stop, max_new_tokens, sampling = generation_arguments(arguments)
        if max_new_tokens >= self.max_length:
            raise JllamaError(
                f"max_gen_toks {max_new_tokens} leaves no room for a prompt in max_length "
                f"{self.max_length}: lower it (generation_kwargs), "
                "or take a model with a longer context"
            )
        prompt = Prompt(context, sampling, max_new_tokens, stop)
        return encode_cut_prompt(self.model, prompt, self.max_length)


register_model("jllama")(JllamaLM)


def generation_arguments(arguments: Json) -> tuple[list[str], int, SamplingParams]:
    """Turn ``generation_kwargs`` into stop strings, a number of new tokens, and sampling.

    Sampling is greedy unless ``do_sample`` is true or, if it is not set, ``temperature > 0``.

    Examples:
        >>> generation_arguments({"until": ["Q:"], "max_gen_toks": 32})[:2]
        (['Q:'], 32)

    Raises:
        JllamaError: an argument is unknown.
    """
    remaining = {name: value for name, value in arguments.items() if value is not None}
    until = remaining.pop("until", [])
    if isinstance(until, str):
        until = [until]
    do_sample = remaining.pop("do_sample", None)
    counts = [remaining.pop(name) for name in _NEW_TOKENS if name in remaining]
    counts.append(256)  # lm-eval's own default
    sampling = {name: remaining.pop(name) for name in _SAMPLING if name in remaining}
    if remaining.get("num_beams") == 1:
        del remaining["num_beams"]
    for name, value in remaining.items():
        known = ", ".join(("until", "do_sample", *_NEW_TOKENS, *_SAMPLING))
        raise JllamaError(
            f"generation_kwargs has {name}: {value!r}, which jllama does not honor; "
            f"it knows {known}"
        )
    samples = sampling.get("temperature") if do_sample is None else do_sample
    sampling["temperature"] = float(sampling.get("temperature", 1)) if samples else 0.0
    return [text for text in until if text], int(counts[0]), SamplingParams(**sampling)


def task_manager(names: Sequence[str], include_path: str = "") -> TaskManager:
    """Return the index of lm-eval's tasks and those in your own folder, which come first.

    lm-eval's own are over ten thousand files, which are read only if a name is not in the folder.

    Args:
        names: tasks or groups, or paths of YAML files.
        include_path: the folder of your own tasks, if any.

    Raises:
        UsageError: there is no such folder, or a name is unknown.
    """
    if include_path:
        if not Path(include_path).is_dir():
            raise UsageError(
                f"there is no folder at include_path {include_path}: "
                "give one with tasks' YAML files"
            )
        own = TaskManager(include_path=include_path, include_defaults=False)
        # A group in the folder may consist of lm-eval's tasks, so only the folder's tasks count
        # here.
        if set(names) <= set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=include_path or None)
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            close = difflib.get_close_matches(name, manager.all_tasks, 1)
            hint = "give one of its own, or a folder of others (include_path)"
            if close:
                hint = f"did you mean {close[0]}?"
            raise UsageError(f"lm-eval has no task {name!r}; {hint}")
    return manager


def evaluate_tasks(
    lm: JllamaLM, tasks: Sequence[str], manager: TaskManager, **arguments: Any
) -> Json:
    """Return the results of ``lm_eval.simple_evaluate(**arguments)``; its prints go to stderr.

    Raises:
        JllamaError: it failed, for example because it cannot download a task's data; the message is
            lm-eval's.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            results = simple_evaluate(lm, tasks=[*tasks], task_manager=manager, **arguments)
    except JllamaError:
        raise
    except Exception as error:  # lm-eval, its data sets and its metrics raise anything
        message = " ".join(str(error).split())
        raise JllamaError(f"lm-eval stopped with {type(error).__name__}: {message}") from error
    return dict(results or {})  # only the first process gets results


def table(results: Json) -> str:
    """Format the results of ``evaluate_tasks`` as lm-eval's own table."""
    text = make_table(results)
    if results.get("groups"):
        text += make_table(results, "groups")
    return text
