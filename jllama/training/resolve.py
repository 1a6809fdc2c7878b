"""What a run is about: the model that it starts from, its data, and its configuration with nothing left open."""

import dataclasses
import math
from pathlib import Path

from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.run import read_config
from jllama.checkpoints.tensors import Checkpoint
from jllama.config import LlamaConfig
from jllama.data.batches import rows_an_epoch
from jllama.data.chats import data_task, prepare_chats
from jllama.data.config import DataConfig
from jllama.data.datasets import BatchSource, TrainingData
from jllama.data.tokens import prepare_data
from jllama.errors import check_fields, no_tokenizer
from jllama.generation.text import prompt_ids
from jllama.presets import preset
from jllama.templates.messages import conversing, find_template
from jllama.tokenizers import Tokenizer, load_tokenizer
from jllama.training.config import TrainConfig


def resolved(
    config: TrainConfig, folder: Path | None, source: BatchSource | None = None
) -> tuple[TrainConfig, TrainingData, Checkpoint | None]:
    """The configuration with nothing left open, its data, and the checkpoint to begin from, if any.

    ``folder`` is that of a run that goes on; ``source`` is in place of ``config.data``.
    """
    task = "batches" if source else data_task(config.data)
    if task in ("chat", "preference"):
        check_fields(
            config, "", "init_from", bool, f"a model to begin from, since data.task is {task}"
        )
    origin = (
        _origin(config, None if config.trains_adapters else folder) if config.init_from else None
    )
    tokenizer = origin.tokenizer if origin else None
    config = _with_model(config, origin)
    if (
        folder and not origin and config.data.tokenizer == "bpe"
    ):  # a later version may train another on the same text
        tokenizer = load_tokenizer(folder)

    # The data, and how many rows an epoch of it has.
    if source:
        check_fields(
            config,
            "",
            "data",
            lambda given: given == DataConfig(),
            "left out with batches of one's own",
        )
        said = "0 with batches of one's own: give training.steps"
        check_fields(config.training, "training.", "epochs", lambda epochs: not epochs, said)
        data, rows = source, 0
        config = _with_sizes(config, source.tokenizer, origin)
    elif task == "text":
        data = prepare_data(config.data, tokenizer)
        config = _with_sizes(config, data.tokenizer, origin)
        rows = len(data.train) / config.training.seq_len
    else:
        assert origin is not None and tokenizer is not None  # noqa: PT018
        config = _with_sizes(config, tokenizer, origin)
        talk, seq_len = (
            conversing(tokenizer, origin.chat_template, origin.stop_ids),
            config.training.seq_len,
        )
        data = prepare_chats(config.data, tokenizer, *talk, seq_len)
        rows = rows_an_epoch(
            data.train, seq_len=seq_len, seed=config.seed, packing=config.data.packing
        )
    return _with_steps(config, rows, folder), data, origin


def _with_model(config: TrainConfig, origin: Checkpoint | None) -> TrainConfig:
    """The configuration with the architecture of its preset, or of the checkpoint to begin from."""
    check_fields(
        config, "", "preset", lambda name: not (name and origin), "left out with init_from"
    )
    model = config.model
    if config.preset:
        model = preset(config.preset)
    if origin:
        model = origin.config
    for name, value in vars(model).items():
        allowed, said = (
            (value, getattr(LlamaConfig(), name)),
            f"{value}, as in {config.init_from or config.preset}",
        )
        check_fields(
            config.model, "model.", name, allowed.__contains__, f"{said}, or left out with it"
        )
    return dataclasses.replace(config, model=model)


def _with_steps(config: TrainConfig, rows: float, folder: Path | None) -> TrainConfig:
    """The configuration with the steps of its epochs, of so many rows each, and of its warm-up."""
    steps = (
        math.ceil(config.training.epochs * rows / config.training.batch_size)
        or config.training.steps
    )
    options = dataclasses.replace(config.training, steps=steps, epochs=0.0)
    optimizer = config.optimizer
    if optimizer.schedule != "cosine" and not optimizer.warmup_steps:
        # The rate will stay, so the warm-up keeps its steps: going on with more steps changes no past rate.
        begun = read_config(folder).fields.get("optimizer", {}).get("warmup_steps") if folder else 0
        optimizer = dataclasses.replace(
            optimizer, warmup_steps=begun or math.ceil(optimizer.warmup_fraction * steps)
        )
    return dataclasses.replace(config, training=options, optimizer=optimizer)


def _origin(config: TrainConfig, existing: Path | None) -> Checkpoint:
    """The checkpoint to begin from, opened; an existing run's folder stands in for ``init_from``."""
    path = existing or config.init_from
    origin = open_checkpoint(path, None if existing else config.rope_factor)
    check_fields(
        config.data,
        "data.",
        "tokenizer",
        lambda name: name == "bpe",
        "left out: init_from brings its own",
    )
    if origin.tokenizer is None:
        raise no_tokenizer(path)
    if config.data.chat_template and not existing:  # an existing run's folder has it
        template = find_template(origin.tokenizer, None, config.data.chat_template)
        origin = dataclasses.replace(origin, chat_template=template)
    return origin


def _with_sizes(
    config: TrainConfig, tokenizer: Tokenizer, origin: Checkpoint | None
) -> TrainConfig:
    """The configuration with the architecture, the vocabulary and the window filled in."""
    model, options = config.model, config.training
    num_tokens, context = tokenizer.vocab_size, model.max_seq_len
    said = f"0, or at least the {num_tokens} tokens of the tokenizer"
    check_fields(model, "model.", "vocab_size", lambda size: size == 0 or size >= num_tokens, said)
    seq_len = options.seq_len or min(context, 1024 if origin or config.preset else context)
    check_fields(
        options,
        "training.",
        "seq_len",
        lambda size: size <= context,
        f"at most model.max_seq_len, {context}",
    )
    sample_limit = context - len(prompt_ids(tokenizer, options.sample_prompt))
    if options.sample_tokens is None:
        options = dataclasses.replace(options, sample_tokens=max(min(128, sample_limit), 0))
    said = (
        f"at most {sample_limit}, which is what training.sample_prompt leaves of model.max_seq_len"
    )
    check_fields(options, "training.", "sample_tokens", lambda count: count <= sample_limit, said)
    model = dataclasses.replace(model, vocab_size=model.vocab_size or num_tokens)
    return dataclasses.replace(
        config, model=model, training=dataclasses.replace(options, seq_len=seq_len)
    )
