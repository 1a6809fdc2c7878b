"""``resolve``: all that a run needs is decided, before anything is written."""

import dataclasses
import math
import operator
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict
from rich.console import Console

from jllama.core import UsageError, check_fields
from jllama.core.config import LlamaConfig
from jllama.data.batches import num_epoch_rows
from jllama.data.chats import data_task, prepare_chats
from jllama.data.config import DataConfig
from jllama.data.datasets import BatchSource, Dataset
from jllama.data.prompts import prepare_prompts
from jllama.data.tokens import is_stream, prepare_data
from jllama.formats.registry import open_checkpoint
from jllama.formats.run import read_config
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.formats.tensors import Checkpoint
from jllama.formats.upcycling import upcycle
from jllama.generation.text import prompt_ids
from jllama.models.build import check_attention
from jllama.models.language_model import LanguageModel
from jllama.models.presets import preset
from jllama.parallel import distributed
from jllama.system.errors import no_tokenizer, shell_command
from jllama.system.files import CHECKPOINTS, CONFIG, METRICS, read_lines
from jllama.system.places import name_of
from jllama.templates.messages import chat_format, find_template, with_date
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.loading import load_tokenizer
from jllama.training import run_folder
from jllama.training.config import TrainConfig
from jllama.training.loggers import check_logger
from jllama.training.metrics import Evaluation, is_out_of_patience
from jllama.training.optimizer import make_optimizer
from jllama.training.plan import Plan, autotuning_options, decide


def resolve(
    config: TrainConfig, own_data: BatchSource | None, console: Console
) -> Plan | Evaluation:
    """Return the plan of a run; or the final evaluation of its folder's, if that is finished.

    Prints what has changed since the run that goes on, or how to continue one that is finished.

    Args:
        config: the configuration, in which sizes, steps and the architecture may be left open.
        own_data: batches that replace ``config.data``.
        console: to print on.

    Raises:
        UsageError: the options do not fit each other, the folder, the data, the checkpoint or the
            devices.
        JllamaError: the data or the checkpoint cannot be read, or an option must not change.
    """
    # Problems that show before any data or weights are read.
    folder = Path(config.run_dir)
    distributed.check_same(flatten_dict(run_folder.config_fields(config), sep="."))
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(
            f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto"
        )
    make_optimizer(config.optimizer, config.training.steps)
    check_attention(config.training.attention, backward=True)
    check_logger(config.logger)

    # Whether the run begins, goes on, or takes the place of another one.
    steps = []
    if (folder / CHECKPOINTS).exists():
        steps = RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    replaces = bool(steps) and config.resume == "never"
    if replaces:
        run_folder.confirm_overwrite(config)
    resumes = bool(steps) and not replaces
    step = steps[-1] if resumes else 0

    # The complete configuration, and whether anything is left to do.
    existing = folder if resumes else None
    config, data, origin, language_model = complete(config, existing, own_data)
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow")
        final = final_evaluation(config, step, console)
        if final is not None:
            return final
    return decide(
        config,
        None,
        autotuning_options(config),
        data=data,
        origin=origin,
        language_model=language_model,
        step=step,
        resumes=resumes,
        replaces=replaces,
    )


def final_evaluation(config: TrainConfig, step: int, console: Console) -> Evaluation | None:
    """Return the final evaluation if nothing is left to do, and print how to continue."""
    folder = Path(config.run_dir)
    num_steps = config.training.steps
    lines = read_lines(folder / METRICS, "final")
    has_all_steps = step >= num_steps
    if not lines or not (has_all_steps or is_out_of_patience(folder, config.training.patience)):
        return None
    options = ["--training.patience", 0]
    if has_all_steps:
        options = ["--training.steps", 2 * step, "--resume_with_changes", "true"]
    name = name_of(folder)
    go_on = shell_command("train", "--resume", name, *options)
    console.print(f"{name} is finished (step {step:,} of {num_steps:,}). To go on: {go_on}")
    # Runs of 0.1 name the figures after the preference objective.
    figures = lines[-1]["final"].items()
    return Evaluation(**{name.replace("preference", "figures"): value for name, value in figures})


# What a configuration leaves open


def complete(
    config: TrainConfig, folder: Path | None, source: BatchSource | None = None
) -> tuple[TrainConfig, Any, Checkpoint | None, LanguageModel]:
    """Return the complete configuration, its data, the checkpoint to begin from, and the model.

    The checkpoint is None if there is none; the model has no weights.

    Args:
        config: the configuration, in which sizes, steps and the architecture may be left open.
        folder: that of the run to resume, if any.
        source: batches that replace ``config.data``.

    Raises:
        UsageError: the options do not fit each other, the data or the checkpoint.
        JllamaError: the data or the checkpoint cannot be read.
    """
    # The model and the tokenizer.
    task = "batches" if source else data_task(config.data)
    if config.reward:
        task = "prompt"
    elif config.training.objective == "grpo" and not source:
        raise UsageError(
            "reward is empty; it must say how answers are rewarded, since training.objective is "
            "grpo"
        )
    if task != "text":
        check_fields(config.data, "data.", "stream", operator.not_, "false, as only text is one")
    if task in ("chat", "preference") and not config.init_from:
        raise UsageError(
            f"init_from is empty; it must be a model to begin from, since data.task is {task}"
        )
    origin = None
    tokenizer = None
    if config.init_from:
        # Adapters need their base again, and rewards the reference model.
        needs_origin = config.trains_adapters or config.has_reference
        origin = _open_origin(config, None if needs_origin else folder)
        if config.model.num_experts and not origin.config.num_experts:
            check_fields(
                config.lora, "lora.", "rank init_from", operator.not_, "left out with num_experts"
            )
            origin = upcycle(origin, config.model, config.seed)
        tokenizer = origin.tokenizer
    elif folder and config.data.tokenizer == "bpe":
        # A later version may train another tokenizer on the same text.
        tokenizer = load_tokenizer(folder)
    config = _with_model(config, origin)

    # Data that bring or make the tokenizer, the sizes, and the model without weights.
    data: Any = source
    if source:
        if config.data != DataConfig():
            raise UsageError(f"data is {config.data}; it must be left out with your own batches")
        if config.training.epochs:
            raise UsageError(
                f"training.epochs is {config.training.epochs}; "
                "it must be 0 with your own batches: give training.steps"
            )
    elif task == "text" and is_stream(config.data):
        from jllama.data.streams import prepare_stream

        check_fields(
            config.training,
            "training.",
            "epochs",
            operator.not_,
            "0 with a stream: give training.steps",
        )
        data = prepare_stream(config.data, tokenizer)
    elif task == "text":
        data = prepare_data(config.data, tokenizer)
    if data:
        tokenizer = data.tokenizer
    assert tokenizer is not None
    config = _with_sizes(config, tokenizer, origin)
    template, stop_ids = None, ()
    if origin:
        template, stop_ids = chat_format(tokenizer, origin.chat_template, origin.stop_ids)
    model = LanguageModel(config.model, {}, tokenizer, template, stop_ids)

    # Data that need these, and how many rows an epoch has.
    num_rows = 0
    seq_len = config.training.seq_len
    if isinstance(data, Dataset):
        num_rows = len(data.train) / seq_len
    elif data:
        pass  # steps are given
    elif task == "prompt":
        grpo = config.training.grpo
        max_prompt_tokens = seq_len + 1 - grpo.max_answer_tokens
        check_fields(
            grpo,
            "training.grpo.",
            "max_answer_tokens",
            lambda _: max_prompt_tokens >= 1,
            f"at most training.seq_len, {seq_len}, which prompt and answer share",
        )
        data = prepare_prompts(config.data, tokenizer, template, max_prompt_tokens)
        num_rows = len(data.train) * grpo.group_size
    else:
        data = prepare_chats(config.data, tokenizer, template, stop_ids, seq_len)
        num_rows = num_epoch_rows(
            data.train, seq_len=seq_len, seed=config.seed, packing=config.data.packing
        )
    return _with_steps(config, num_rows, folder), data, origin, model


def _open_origin(config: TrainConfig, existing: Path | None) -> Checkpoint:
    """Open the checkpoint to begin from; the folder of an existing run replaces ``init_from``."""
    path = existing or config.init_from
    origin = open_checkpoint(path, None if existing else config.rope_factor)
    if config.data.tokenizer != "bpe":
        raise UsageError(
            f"data.tokenizer is {config.data.tokenizer}; "
            "it must be left out: init_from brings its own"
        )
    if config.trains_adapters and origin.adapter:
        raise UsageError(
            f"{path} is a run with adapters of {origin.adapter.base}: to go on with them, give "
            f"init_from {origin.adapter.base} and lora.init_from {path}; to train others, merge "
            "them first, by jllama convert"
        )
    if config.lora.init_from:
        adapted = open_checkpoint(path, config.rope_factor, adapter=config.lora.init_from)
        origin = dataclasses.replace(
            origin,
            adapter=adapted.adapter,
            chat_template=adapted.chat_template,
            stop_ids=adapted.stop_ids,
        )
    if origin.tokenizer is None:
        raise no_tokenizer(path)
    if config.data.chat_template and not existing:  # an existing run's folder has the template
        template = find_template(origin.tokenizer, None, config.data.chat_template)
        origin = dataclasses.replace(origin, chat_template=template)
    if origin.chat_template:
        origin = dataclasses.replace(origin, chat_template=with_date(origin.chat_template))
    return origin


def _with_model(config: TrainConfig, origin: Checkpoint | None) -> TrainConfig:
    """Fill in the architecture of the preset, or of the checkpoint to begin from."""
    if config.preset and origin:
        raise UsageError(f"preset is {config.preset}; it must be left out with init_from")
    model = config.model
    if config.preset:
        model = preset(config.preset)
    if origin:
        model = origin.config
    _check_taken("model", config.model, model, config.init_from or config.preset)
    lora = config.lora
    if origin and lora.init_from:
        lora = dataclasses.replace(origin.adapter.lora, base=lora.base, init_from=lora.init_from)
        _check_taken("lora", config.lora, lora, lora.init_from)
    return dataclasses.replace(config, model=model, lora=lora)


def _check_taken(group: str, options: Any, taken: Any, source: str) -> None:
    """Raise ``UsageError`` if an option is neither left out nor what is taken from ``source``."""
    default = type(options)()
    if group == "model" and options.num_experts == taken.num_experts:
        default = LlamaConfig(num_experts=taken.num_experts)  # which other fields follow
    for name, value in vars(taken).items():
        field = getattr(options, name)
        if field not in (value, getattr(default, name)):
            raise UsageError(
                f"{group}.{name} is {field}; it must be {value}, as in {source}, or left out with "
                "it"
            )


def _with_sizes(
    config: TrainConfig, tokenizer: Tokenizer, origin: Checkpoint | None
) -> TrainConfig:
    """Fill in the vocabulary, the sequence length and the number of sampled tokens."""
    model = config.model
    options = config.training
    num_tokens = tokenizer.vocab_size
    if model.vocab_size and model.vocab_size < num_tokens:
        raise UsageError(
            f"model.vocab_size is {model.vocab_size}; "
            f"it must be 0, or at least the {num_tokens} tokens of the tokenizer"
        )
    context = model.max_seq_len
    default = min(context, 1024) if origin or config.preset else context
    if options.seq_len > context:
        raise UsageError(
            f"training.seq_len is {options.seq_len}; "
            f"it must be at most model.max_seq_len, {context}"
        )
    limit = context - len(prompt_ids(tokenizer, options.sample_prompt))
    sample_tokens = options.sample_tokens
    if sample_tokens is None:
        sample_tokens = max(min(128, limit), 0)
    options = dataclasses.replace(
        options, seq_len=options.seq_len or default, sample_tokens=sample_tokens
    )
    if sample_tokens > limit:
        raise UsageError(
            f"training.sample_tokens is {sample_tokens}; it must be at most {limit}, "
            "which is what training.sample_prompt leaves of model.max_seq_len"
        )
    model = dataclasses.replace(model, vocab_size=model.vocab_size or num_tokens)
    return dataclasses.replace(config, model=model, training=options)


def _with_steps(config: TrainConfig, num_rows: float, folder: Path | None) -> TrainConfig:
    """Fill in the steps of all epochs, of ``num_rows`` rows each, and of the warm-up."""
    options = config.training
    optimizer = config.optimizer
    steps = math.ceil(options.epochs * num_rows / options.batch_size) or options.steps
    if config.reward:
        steps += -steps % options.grpo.updates
    options = dataclasses.replace(options, steps=steps, epochs=0.0)
    if optimizer.schedule != "cosine" and not optimizer.warmup_steps:
        # A resumed run keeps the steps of its warm-up, so that more steps change no past learning
        # rate.
        saved = read_config(folder).fields.get("optimizer", {}) if folder else {}
        computed = math.ceil(optimizer.warmup_fraction * steps)
        warmup_steps = saved.get("warmup_steps") or computed
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup_steps)
    return dataclasses.replace(config, training=options, optimizer=optimizer)
