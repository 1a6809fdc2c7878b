"""What a run is about: the model that it starts from, its data, and its configuration with nothing left open."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jllama import distributed
from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.run import read_config
from jllama.checkpoints.tensors import Checkpoint
from jllama.config import LlamaConfig
from jllama.data.batches import chat_validation_batches, rows_an_epoch
from jllama.data.chats import data_task, prepare_chats
from jllama.data.tokens import SPLITS, Dataset, prepare_data
from jllama.errors import check_fields, no_tokenizer
from jllama.files import fault_of, written_whole
from jllama.generation.text import prompt_ids
from jllama.presets import preset
from jllama.progress import progress
from jllama.templates.messages import conversing, find_template
from jllama.tokenizers import Tokenizer, load_tokenizer
from jllama.training.config import TrainConfig
from jllama.training.step import Training, TrainState, on_devices

REFERENCE = "reference.npz"


def resolved(config: TrainConfig, folder: Path | None) -> tuple[TrainConfig, Dataset, Checkpoint | None]:
    """The configuration with nothing left open, its data, and the checkpoint to begin from, if any; ``folder`` is that
    of a run that goes on.
    """
    task = data_task(config.data)
    if task != "text":
        check_fields(config, "", "init_from", bool, f"a model to begin from, since data.task is {task}")
    origin = _origin(config, None if config.lora.rank else folder) if config.init_from else None
    tokenizer = origin.tokenizer if origin else None
    check_fields(config, "", "preset", lambda name: not (name and origin), "left out with init_from")
    model = config.model
    if config.preset:
        model = preset(config.preset)
    if origin:
        model = origin.config
    for name, value in vars(model).items():
        allowed, said = (value, getattr(LlamaConfig(), name)), f"{value}, as in {config.init_from or config.preset}"
        check_fields(config.model, "model.", name, allowed.__contains__, f"{said}, or left out with it")
    config = dataclasses.replace(config, model=model)
    if folder and not origin and config.data.tokenizer == "bpe":  # a later version may train another on the same text
        tokenizer = load_tokenizer(folder)
    if task == "text":
        data = prepare_data(config.data, tokenizer)
        config = _with_sizes(config, data.tokenizer, origin)
        rows = len(data.train) / config.training.seq_len
    else:
        assert origin is not None and tokenizer is not None  # noqa: PT018
        config = _with_sizes(config, tokenizer, origin)
        talk, seq_len = conversing(tokenizer, origin.chat_template, origin.stop_ids), config.training.seq_len
        data = prepare_chats(config.data, tokenizer, *talk, seq_len)
        rows = rows_an_epoch(data.train, seq_len=seq_len, seed=config.seed, packing=config.data.packing)
    steps = math.ceil(config.training.epochs * rows / config.training.batch_size) or config.training.steps
    options = dataclasses.replace(config.training, steps=steps, epochs=0.0)
    optimizer = config.optimizer
    if optimizer.schedule != "cosine" and not optimizer.warmup_steps:
        # The rate will stay, so the warm-up keeps its steps: going on with more steps changes no past rate.
        begun = read_config(folder).fields.get("optimizer", {}).get("warmup_steps") if folder else 0
        optimizer = dataclasses.replace(optimizer, warmup_steps=begun or math.ceil(optimizer.warmup_fraction * steps))
    return dataclasses.replace(config, training=options, optimizer=optimizer), data, origin


def batches_of(data: Dataset, config: TrainConfig, training: Training) -> Any:
    """Batches forever, as NumPy arrays, of which this process reads the rows of its own devices."""
    options = config.training
    num_rows = options.batch_size * (2 if data.preference else 1)
    parts = training.batch_sharding.addressable_devices_indices_map((num_rows,)).values()
    rows = np.unique([np.arange(num_rows)[part] for part in parts]).tolist()
    size: Any = {"batch_size": options.batch_size, "seq_len": options.seq_len, "seed": config.seed, "rows": rows}
    return data.training_batches(**size, packing=config.data.packing)


def first_question(data: Dataset) -> list[int]:
    """The ids before the first token that counts in the first conversation that is held out."""
    held_out = data.validation
    start, size = held_out.starts[0], held_out.sizes[0]
    counted = held_out.counted[start : start + size]
    return held_out.tokens[start : start + counted.argmax()].tolist()


def with_references(
    data: Dataset, folder: Path, config: TrainConfig, training: Training, state: TrainState | None
) -> Dataset:
    """Pairs with the log-probabilities of their answers by a state before training, which the run's folder keeps; of a
    run that goes on, without a state, they are read there.
    """
    references: dict[str, Any] = {}
    if state is None:
        with fault_of(f"{folder / REFERENCE} is part of this run: put it back", OSError, ValueError, KeyError):
            stored = np.load(folder / REFERENCE)
            references = {split: stored[split] for split in SPLITS}
    else:
        size: Any = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len}
        total = sum(data.counts[split]["conversations"] for split in SPLITS)
        with progress("reading the answers before training", total) as move:
            for split in SPLITS:
                pairs, found = getattr(data, split), []
                for rows in chat_validation_batches(pairs, **size):
                    sums = training.log_probs(state.params, on_devices(rows, training.batch_sharding), state.base)
                    found.append(np.asarray(multihost_utils.process_allgather(sums, tiled=True)))
                    move(len(sums))
                references[split] = np.concatenate(found)[: len(pairs.sizes)]
        if distributed.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with written_whole(folder / REFERENCE) as partial, partial.open("wb") as file:
                np.savez(file, **references)
    splits = {split: dataclasses.replace(getattr(data, split), reference=references[split]) for split in SPLITS}
    return dataclasses.replace(data, **splits)


def _origin(config: TrainConfig, existing: Path | None) -> Checkpoint:
    """The checkpoint to begin from, opened; an existing run's folder stands in for ``init_from``."""
    path = existing or config.init_from
    origin = open_checkpoint(path, None if existing else config.rope_factor)
    check_fields(config.data, "data.", "tokenizer", lambda name: name == "bpe", "left out: init_from brings its own")
    if origin.tokenizer is None:
        raise no_tokenizer(path)
    if config.data.chat_template and not existing:  # an existing run's folder has it
        template = find_template(origin.tokenizer, None, config.data.chat_template)
        origin = dataclasses.replace(origin, chat_template=template)
    return origin


def _with_sizes(config: TrainConfig, tokenizer: Tokenizer, origin: Checkpoint | None) -> TrainConfig:
    """The configuration with the architecture, the vocabulary and the window filled in."""
    model, options = config.model, config.training
    num_tokens, context = tokenizer.vocab_size, model.max_seq_len
    said = f"0, or at least the {num_tokens} tokens of the tokenizer"
    check_fields(model, "model.", "vocab_size", lambda size: size == 0 or size >= num_tokens, said)
    seq_len = options.seq_len or min(context, 1024 if origin or config.preset else context)
    check_fields(options, "training.", "seq_len", lambda size: size <= context, f"at most model.max_seq_len, {context}")
    sample_limit = context - len(prompt_ids(tokenizer, options.sample_prompt))
    if options.sample_tokens is None:
        options = dataclasses.replace(options, sample_tokens=max(min(128, sample_limit), 0))
    said = f"at most {sample_limit}, which is what training.sample_prompt leaves of model.max_seq_len"
    check_fields(options, "training.", "sample_tokens", lambda count: count <= sample_limit, said)
    model = dataclasses.replace(model, vocab_size=model.vocab_size or num_tokens)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(options, seq_len=seq_len))
