"""The stages of ``jllama speedrun``: their sizes by depth, their plan, and their commands."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from rich.filesize import decimal

from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.data.batches import text_batch
from jllama.data.tasks import CHATS, PROMPTS
from jllama.kernels.shapes import power_of_two_at_least
from jllama.lab.plan_receipt import plan_training
from jllama.system.files import SPEEDRUN, atomic_write_text, write_json
from jllama.system.memory import program_bytes
from jllama.training.compiling import compile_training
from jllama.training.config import TrainConfig
from jllama.training.metrics import training_flops_per_token
from jllama.training.run_folder import config_fields

STAGES = ("base", "chat", "rewards")
"""The runs, in their order, and the folders that they are in."""
LISTS = "lists"


class StagePlan(NamedTuple):
    """What a stage will take; bytes are those of a device."""

    parameters: int
    tokens: int
    flops: float
    seconds: float
    memory_bytes: int
    disk_bytes: int


# The rules of the depth, see docs/speedrun.md: each returns options by name.


def places(options: Any) -> dict[str, object]:
    """Return where the stages read and write."""
    folder = Path(options.run_dir)
    base, chat, rewards = (folder / stage for stage in STAGES)
    lists = folder / LISTS
    return {
        "base.run_dir": base,
        "base.data.path": options.corpus,
        "chat.run_dir": chat,
        "chat.init_from": base,
        "chat.data.mixture": yaml.safe_dump({options.chats: 1, str(lists / CHATS): 2}),
        "rewards.run_dir": rewards,
        "rewards.init_from": chat,
        "rewards.data.path": lists / PROMPTS,
    }


def shapes(options: Any) -> dict[str, object]:
    """Return the sizes of the model."""
    depth = options.depth
    head_dim = 64 if depth < 12 else 128
    num_heads = math.ceil(64 * depth / head_dim)
    embed_dim = num_heads * head_dim
    return {
        "base.model.num_layers": depth,
        "base.model.embed_dim": embed_dim,
        "base.model.num_heads": num_heads,
        "base.model.max_seq_len": min(power_of_two_at_least(embed_dim, 256), 2048),
        "base.data.vocab_size": min(power_of_two_at_least(512 * depth, 1024), 32_768),
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
    rewards_rate = 3e-4 * (192 / model.embed_dim) ** 2
    return {
        "base.optimizer.learning_rate": f"{muon_rate:.2g}",
        "base.training.batch_size": rows,
        "base.training.steps": math.ceil(num_tokens / rows / seq_len),
        "chat.optimizer.learning_rate": f"{learning_rate / 5:.2g}",
        "rewards.optimizer.learning_rate": f"{rewards_rate:.2g}",
    }


RULES = (places, shapes, horizon)


def model_of(config: TrainConfig) -> LlamaConfig:
    """Return the architecture, with the vocabulary that will be learned."""
    return dataclasses.replace(config.model, vocab_size=config.data.vocab_size)


# The plan


def plan_stages(options: Any) -> dict[str, StagePlan]:
    """Return what each stage will take: on this machine by a measured step of the base.

    With ``options.topology`` the steps are compiled for absent devices, and their least times are
    those at the published rates.
    """
    plans = {}
    model = model_of(options.base)
    rate = 0.0
    memory_bytes = 0
    for stage in STAGES:
        loop = dataclasses.replace(getattr(options, stage).training, objective="auto")
        config = dataclasses.replace(options.base, model=model, training=loop)
        seq_len = loop.seq_len or model.max_seq_len
        tokens = loop.steps * loop.batch_size * seq_len
        flops = tokens * training_flops(model, seq_len)
        if options.topology:
            receipt = plan_training(config, options.topology)
            memory_bytes = receipt.needed_bytes
            rate = flops / loop.steps / (receipt.expected_s or max(receipt.times_s.values()))
        elif stage == "base":
            rate, memory_bytes = measure(config)
        flops = tokens * training_flops(model, seq_len, stage == "rewards")
        seconds = flops / rate
        num_parameters = count_parameters(model)
        # Weights and two moments, in two checkpoints.
        disk_bytes = 2 * 12 * num_parameters
        plans[stage] = StagePlan(num_parameters, tokens, flops, seconds, memory_bytes, disk_bytes)
    return plans


def training_flops(model: LlamaConfig, seq_len: int, from_rewards: bool = False) -> float:
    """Return the FLOPs of a training step per token.

    A token that is learned from rewards has two more forward passes: one draws it, and one computes
    its log-probability.
    """
    flops = training_flops_per_token(model, seq_len)
    return flops * 5 / 3 if from_rewards else flops


def measure(config: TrainConfig) -> tuple[float, int]:
    """Return the FLOPs a second of a training step on this machine, and the step's bytes."""
    training = compile_training(config)
    options = training.plan.options
    state = training.init(jax.random.key(0))
    shape = (options.batch_size, options.seq_len + 1)
    windows = np.random.default_rng(0).integers(3, config.model.vocab_size, shape)
    batch = text_batch(windows, 1)
    program = training.step.program.lower(state, batch).compile()
    times_s = []
    for _ in range(4):
        start_s = time.perf_counter()
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics.loss)
        times_s.append(time.perf_counter() - start_s)
    flops = training_flops_per_token(config.model, options.seq_len)
    rate = flops * options.batch_size * options.seq_len / sorted(times_s)[1]
    return rate, sum(program_bytes(program))


def describe(plans: Mapping[str, StagePlan], price: float) -> Iterator[str]:
    """Yield the lines of a plan for people."""
    total_s = 0.0
    for stage, plan in plans.items():
        total_s += plan.seconds
        yield (
            f"{stage:8} {plan.parameters:,} parameters, {plan.tokens:,} tokens, "
            f"{plan.flops:.2g} FLOPs, {plan.seconds / 60:.1f} min, "
            f"{decimal(plan.memory_bytes)} of memory, {decimal(plan.disk_bytes)} on disk"
        )
    cost = f", {price * total_s / 3600:,.2f} at {price:g} an hour" if price else ""
    yield f"in all about {total_s / 60:.0f} min{cost}"


# The stages


def write_stages(options: Any) -> list[tuple[str, Sequence[object], Path | None]]:
    """Write the configurations of the runs, and return each stage's name, command and result.

    The result is None where the command itself knows what is done.
    """
    folder = Path(options.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lists = folder / LISTS
    stages: list[Any] = [("lists", ["data", "lists", lists], lists / PROMPTS)]
    for stage in STAGES:
        file = folder / f"{stage}.yaml"
        fields = config_fields(getattr(options, stage)) | {"resume": "auto"}
        atomic_write_text(file, yaml.safe_dump(fields, sort_keys=False))
        stages.append((stage, ["train", "--config", file], None))
    for name, form in (("model.gguf", "gguf"), ("hf", "hf")):
        target = folder / name
        words = ["convert", folder / STAGES[-1], target, "--to", form]
        stages.append((form, words, target))
    write_json(folder / SPEEDRUN, {"depth": options.depth})
    return [*stages, ("report card", ["report", folder], None)]
