"""What several tests share."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jllama.commands import cli
from jllama.lab.checks import relative_error
from jllama.tokenizers.base import BYTE_CHARS, TokenType, Vocabulary
from jllama.tokenizers.huggingface import PRE_TOKENIZERS, HuggingFaceTokenizer
from jllama.tokenizers.tiktoken import TiktokenTokenizer, write_ranks
from jllama.training import opening, report, tracker
from jllama.training.plan import Plan

TESTS = Path(__file__).parent
FLAGS = os.environ.get("XLA_FLAGS", "")  # none where a test compiles as users do
QUICK_GENERATOR = "--xla_cpu_use_fusion_emitters=false" in FLAGS
USERS_GENERATOR = {"xla_cpu_use_fusion_emitters": True} if QUICK_GENERATOR else None
"""Compiler options that give a program the same bits as for users, and not as in quick tests."""


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run_command(*words: object, place: str | os.PathLike = ".") -> Done:
    """``python -m jllama`` with these words, by its entry function, in this process.

    It stands in the folder ``place`` and has no input. A process of its own takes seconds, and is
    for signals, kills, limits and peers.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(place),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli.main([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Runs whose configurations ask for the same programs take them from the first such run.

    ``compile_plan`` reads some parts of a plan; when a run pauses is in no program.
    """
    compiled = {}
    compile_plan = opening.compile_plan
    pauses = "eval_every save_every log_every keep_last sample_tokens patience max_skipped"
    equal: dict[str, Any] = dict.fromkeys(pauses.split(), 1) | {"save_minutes": 0.0}

    def compile_once(plan: Plan) -> Any:
        loop = dataclasses.replace(plan.options, sample_prompt="", **equal)
        lora = dataclasses.replace(plan.config.lora, init_from="")  # its rank is filled in by now
        parts = (plan.model, plan.optimizer, plan.config.mesh, lora, loop)
        key = repr((parts, plan.mesh, plan.compiler_options))
        if key not in compiled:
            compiled[key] = compile_plan(plan)
        return compiled[key]._replace(plan=plan)

    with mock.patch.object(opening, "compile_plan", compile_once):
        yield


@contextlib.contextmanager
def quick_runs() -> Iterator[None]:
    """Runs share programs, and their pages have no charts.

    Tracing a step again is most of the time of so short a run, charts a quarter of the rest.
    """

    def write_page(folders: Any, target: Any) -> None:
        with mock.patch.object(report, "_chart", lambda runs, key, title: title):
            report.write_report(folders, target)

    with shared_programs(), mock.patch.object(tracker, "write_report", write_page):
        yield


def slow_but(quick: Sequence[Any], cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test; those that are not among ``quick`` are for the slow set."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if case in quick else pytest.mark.slow))
    return found


def byte_level_bpe(
    texts: Sequence[str], vocab_size: int, pre: str
) -> tuple[list[str], list[tuple[str, str]]]:
    """Learn tokens and merges with the ``tokenizers`` library.

    Text is split by ``PRE_TOKENIZERS[pre]``.
    """
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "model": empty,
    }
    trained = tokenizers.Tokenizer.from_str(json.dumps(whole))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=BYTE_CHARS, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [
        (left, right) for left, right in model["merges"]
    ]


def trained_smollm(
    texts: Sequence[str],
    vocab_size: int,
    pre: str = "smollm",
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ends: tuple[int, int] = (1, 2),
    add_bos: bool = False,
) -> HuggingFaceTokenizer:
    """Learn a tokenizer with special tokens first, SmolLM2's if they are not given.

    Args:
        ends: the ids of BOS and EOS.
    """
    learned, merges = byte_level_bpe(texts, vocab_size, pre)
    tokens = [*special, *learned]
    kinds = [TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * len(learned)
    return HuggingFaceTokenizer.from_vocabulary(
        Vocabulary(tokens, kinds, *ends, add_bos, merges=merges, pre=pre)
    )


def trained_llama3(texts: Sequence[str], vocab_size: int) -> TiktokenTokenizer:
    """A tokenizer of the 256 bytes and then, in the order they were learned, what merges give."""
    _, merges = byte_level_bpe(texts, vocab_size, "llama-bpe")
    learned = [bytes(BYTE_CHARS.index(char) for char in left + right) for left, right in merges]
    return TiktokenTokenizer(write_ranks([bytes([byte]) for byte in range(256)] + learned))


def assert_same_bits(actual, expected) -> None:
    """Two trees of arrays, equal in structure, dtypes and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


def copies_of_state(step, state, batch) -> list[str]:
    """Compile a training step; return lines that copy an array of the state, or make one too early.

    ``state`` and ``batch`` may be abstract. A TPU reads by copies into its fast memory, and
    gradients are summed in copied zeros: neither copies the state. Too early is before the loop
    that applies the update or skips it.
    """
    program = step.lower(state, batch).compile().as_text()
    leaves = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.size > 1]
    shapes = {
        leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape for leaf in leaves
    }
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    arrays = "|".join(re.escape(f"f32[{','.join(map(str, shape))}]") for shape in shapes)
    copied = re.compile(rf" = \(?({arrays}).* (copy|copy-start)\(%(?!\S*broadcast)")
    entry = program[program.index("\nENTRY ") :].splitlines()
    early = [line for line in entry if re.search(rf"= ({arrays}).*optimizer/while/body", line)]
    assert all(f"f32[{','.join(map(str, shape))}]" in program for shape in shapes)
    return early + [
        line for line in program.splitlines() if copied.search(line) and "S(1)" not in line
    ]


def assert_gradients_match(function: Callable[..., jax.Array], *arguments: np.ndarray) -> None:
    """Compare derivatives of randomly weighted results with central differences, in float64."""
    step, tolerance = 1e-5, 1e-7
    with jax.enable_x64(True):
        values = [jnp.asarray(argument, jnp.float64) for argument in arguments]
        weights = np.random.default_rng(0).standard_normal(jax.eval_shape(function, *values).shape)
        objective = jax.jit(lambda *values: jnp.sum(function(*values) * weights))
        gradients = jax.jit(jax.grad(objective, argnums=tuple(range(len(values)))))(*values)
        for number, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            steps = step * np.eye(value.size).reshape(-1, *value.shape)

            def at(moved, number=number):
                return objective(*values[:number], moved, *values[number + 1 :])

            differences = jax.vmap(at)(value + steps) - jax.vmap(at)(value - steps)
            assert (
                relative_error(gradient, (differences / (2 * step)).reshape(value.shape))
                < tolerance
            )


def half_split_from_interleaved(x: np.ndarray) -> np.ndarray:
    """A head's channels, from interleaved pairs to half-split: all even ones, then all odd ones."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def pretend_devices(count):
    """Return the variables of a process with so many CPU devices.

    XLA has a thread for each of them, but a device may wait in two collectives at a time. With all
    threads in one of the two, the device that both lack finds none, and XLA aborts after 40 s. So
    there are more threads.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}",
    } | ({"NPROC": "64"} if count > 1 else {})


def run_on_eight_devices(script):
    """Run a script of ``tests`` with eight (pretended) devices; return its report and stderr."""
    # This jllama, not one that is installed.
    environment = os.environ | pretend_devices(8) | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, TESTS / script],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
