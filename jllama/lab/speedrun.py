"""The stages of ``jllama speedrun``: their sizes by depth, their plan, and their commands."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from rich.filesize import decimal

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.data.batches import text_batch
from jllama.data.config import DataConfig
from jllama.data.tasks import CHATS, PROMPTS
from jllama.data.tokens import find_tokenizer
from jllama.kernels.shapes import power_of_two_at_least
from jllama.lab.plan_receipt import plan_training
from jllama.system.files import atomic_write_text, errors_as
from jllama.system.memory import program_bytes
from jllama.training.compiling import compile_training
from jllama.training.config import TrainConfig
from jllama.training.metrics import training_flops_per_token
from jllama.training.opening import check_memory

STAGES = ("base", "chat", "rewards")
"""The runs, in their order, and the folders that they are in."""
TASKS = "lists"
_MEASURED_TOKENS = 4096  # of a device, in the step that is measured


# The rules of the depth, see docs/speedrun.md: each returns options by name.


def shapes(options: Any) -> dict[str, object]:
    """Return where the stages read and write, and the sizes of the model."""
    # The folders, the text and the chats.
    folder = Path(options.run_dir)
    base, chat, rewards = (folder / stage for stage in STAGES)
    tasks = folder / TASKS
    result: dict[str, object] = {
        "base.run_dir": base,
        "base.data.path": options.corpus,
        "chat.run_dir": chat,
        "chat.init_from": base,
        "rewards.run_dir": rewards,
        "rewards.init_from": chat,
        "rewards.data.path": tasks / PROMPTS,
    }
    has_own_chats = options.chat.data.path != DataConfig().path
    if not has_own_chats:
        shares = {options.chats: 1, str(tasks / CHATS): 2}
        result["chat.data.mixture"] = json.dumps(shares)

    # The model.
    depth = options.depth
    head_dim = 64 if depth < 12 else 128
    num_heads = math.ceil(64 * depth / head_dim)
    embed_dim = num_heads * head_dim
    context = min(power_of_two_at_least(embed_dim, 256), 2048)
    return result | {
        "base.model.num_layers": depth,
        "base.model.embed_dim": embed_dim,
        "base.model.num_heads": num_heads,
        "base.model.max_seq_len": context,
        "base.data.vocab_size": min(power_of_two_at_least(512 * depth, 1024), 32_768),
        "chat.training.seq_len": min(context, 1024),
    }


def horizon(options: Any) -> dict[str, object]:
    """Return the steps, the batches and the learning rates, from the sizes of the model."""
    model = model_of(options.base)
    seq_len = options.base.training.seq_len or model.max_seq_len
    num_parameters = training_flops_per_token(model, 0) / 6
    num_tokens = options.tokens_per_parameter * num_parameters
    flops = 6 * num_parameters * num_tokens
    batch_tokens = 0.292 * flops**0.3271
    rows = 2 ** round(math.log2(max(batch_tokens / seq_len, 8)))
    learning_rate = 0.3118 * flops**-0.125
    muon_rate = 1.5 * learning_rate
    chat_rate = 0.2 * learning_rate
    rewards_rate = 1e-4 * (192 / model.embed_dim) ** 2
    return {
        "base.optimizer.learning_rate": f"{muon_rate:.2g}",
        "base.training.batch_size": rows,
        "base.training.steps": math.ceil(num_tokens / rows / seq_len),
        "chat.optimizer.learning_rate": f"{chat_rate:.2g}",
        "rewards.optimizer.learning_rate": f"{rewards_rate:.2g}",
    }


RULES = (shapes, horizon)


def model_of(config: TrainConfig) -> LlamaConfig:
    """Return the architecture, with the vocabulary that it will have."""
    vocab_size = config.model.vocab_size
    if not vocab_size:
        vocab_size = config.data.vocab_size
        if config.data.tokenizer != "bpe":
            vocab_size = find_tokenizer(config.data.tokenizer).vocab_size
    return dataclasses.replace(config.model, vocab_size=vocab_size)


# The plan


def plan_stages(options: Any) -> Iterator[str]:
    """Yield a line for people on what each stage takes: on this machine by a measured step.

    With ``options.topology`` the steps are compiled for absent devices, and their times are those
    that their plans expect, or the least at the published rates.

    Raises:
        UsageError: a stage does not fit its devices.
    """
    model = model_of(options.base)
    num_parameters = count_parameters(model)
    total_s = 0.0
    rate = 0.0
    memory_bytes = 0
    for stage in STAGES:
        loop = dataclasses.replace(getattr(options, stage).training, objective="auto")
        config = dataclasses.replace(options.base, model=model, training=loop)
        seq_len = loop.seq_len or model.max_seq_len
        tokens = loop.steps * loop.batch_size * seq_len
        flops = tokens * training_flops(model, seq_len)
        verdict = ""
        with errors_as(f"the stage {stage}", kind=UsageError):
            if options.topology:
                receipt = plan_training(config, options.topology)
                memory_bytes = receipt.needed_bytes
                verdict = "" if receipt.fits else ", does not fit"
                step_s = receipt.expected_s or max(receipt.times_s.values())
                rate = flops / loop.steps / step_s
            elif stage == "base":
                rate, memory_bytes = measure(config)
        flops = tokens * training_flops(model, seq_len, stage == "rewards")
        total_s += flops / rate
        # Weights and two moments, in two checkpoints.
        disk = decimal(2 * 12 * num_parameters)
        yield (
            f"{stage:8} {num_parameters:,} parameters, {tokens:,} tokens, {flops:.2g} FLOPs, "
            f"{flops / rate / 60:.1f} min, {decimal(memory_bytes)} of memory{verdict}, "
            f"{disk} on disk"
        )
    cost = options.price * total_s / 3600
    price = f", {cost:,.2f} at {options.price:g} an hour" if options.price else ""
    yield f"in all about {total_s / 60:.0f} min{price}"


def training_flops(model: LlamaConfig, seq_len: int, from_rewards: bool = False) -> float:
    """Return the FLOPs of a training step per token.

    A token that is learned from rewards has two more forward passes: one draws it, and one computes
    its log-probability.
    """
    flops = training_flops_per_token(model, seq_len)
    return flops * 5 / 3 if from_rewards else flops


def measure(config: TrainConfig) -> tuple[float, int]:
    """Return the FLOPs a second of a small step on this machine, and the bytes of a whole one."""
    # The bytes.
    training = compile_training(config)
    check_memory(training)
    options = training.plan.options
    state = jax.eval_shape(training.init, jax.random.key(0))
    batch = _random_batch(config, options.batch_size, options.seq_len)
    memory_bytes = sum(program_bytes(training.step.program.lower(state, batch).compile()))

    # The time.
    rows = training.mesh.size * max(1, _MEASURED_TOKENS // options.seq_len)
    batch = _random_batch(config, rows, options.seq_len)
    small = dataclasses.replace(config.training, batch_size=rows, accumulation=1)
    training = compile_training(dataclasses.replace(config, training=small))
    state = training.init(jax.random.key(0))
    times_s = []
    for _ in range(4):
        start_s = time.perf_counter()
        state, metrics = training.step(state, batch)
        jax.block_until_ready(metrics.loss)
        times_s.append(time.perf_counter() - start_s)
    flops = training_flops(config.model, options.seq_len) * rows * options.seq_len
    return flops / sorted(times_s)[1], memory_bytes


def _random_batch(config: TrainConfig, rows: int, seq_len: int) -> Any:
    shape = (rows, seq_len + 1)
    return text_batch(np.random.default_rng(0).integers(3, config.model.vocab_size, shape), 1)


# The stages


def write_stages(options: Any) -> Iterator[tuple[str, Sequence[object]]]:
    """Write the configurations of the runs, and yield each stage's name and command.

    Raises:
        UsageError: a run that is there has other data.
    """
    folder = Path(options.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    yield "tasks", ["data", TASKS, folder / TASKS]
    for stage in STAGES:
        config = dataclasses.replace(getattr(options, stage), resume="auto")
        fields = json.loads(json.dumps(dataclasses.asdict(config)))
        file = folder / f"{stage}.yaml"
        if (folder / stage).exists():
            # A finished run does not look at its data again.
            before = yaml.safe_load(file.read_text())["data"]
            for name, value in fields["data"].items():
                if before.get(name, value) != value:
                    raise UsageError(
                        f"{stage}.data.{name} was {before[name]} and is {value}: leave out what "
                        "has changed, or begin anew with another run_dir"
                    )
        atomic_write_text(file, yaml.safe_dump(fields, sort_keys=False))
        yield stage, ["train", "--config", file]
    for target, form in (("model.gguf", "gguf"), ("hf", "hf")):
        words = ["convert", folder / STAGES[-1], folder / target, "--to", form, "--overwrite"]
        yield form, words
    yield "report card", ["report", folder]
