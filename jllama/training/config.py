"""Everything that decides a training run, as data: what the YAML files and the command line fill
in.
"""

import dataclasses
import functools
import math
from typing import Literal

from jllama.config import DistributedConfig, LlamaConfig, LoraConfig, MeshConfig
from jllama.data.config import DataConfig
from jllama.errors import UsageError, check_fields
from jllama.generation.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and the schedule of its learning rate.

    Args:
        name: ``adamw`` (arXiv:1711.05101), ``lion`` (arXiv:2302.06675, at a fifth of the rate),
            ``adafactor`` (arXiv:1804.04235), which hold two moments, one, and rows and columns of
            one alone, or ``muon`` (Jordan et al. 2024, arXiv:2502.16982; up to 4 times the rate):
            one of each layer's matrices, and AdamW of all else.
        learning_rate: the peak, after the warm-up.
        final_fraction: the learning rate ends at this share of the peak.
        warmup_fraction: the share of all steps over which the learning rate rises linearly, unless
            ``warmup_steps`` is given.
        beta1: decay of the gradient's running mean (``adamw``), or its share in a step (``lion``).
            ``muon`` takes this, ``beta2`` and ``epsilon`` for what AdamW has; its own momentum
            decays by 0.95.
        beta2: decay of the squared gradient's running mean (``adamw``), or of the gradient's
            (``lion``).
        epsilon: added to the root of the squared gradient's mean (``adamw``).
        weight_decay: per unit of learning rate, on matrices only (never on norms).
        clip_norm: gradients are scaled down to this global norm if theirs is larger.
        moment_dtype: in which moments are kept between steps; bfloat16, with ``beta2`` up to 0.99,
            halves their memory.
        schedule: after the warm-up the learning rate falls as half a ``cosine``, stays
            ``constant``, or stays and falls in a straight line at the end (``wsd``: warm-up,
            stable, decay). With the last two a run can go on with more steps.
        decay_fraction: the share of all steps over which it falls at the end, with ``wsd``.
        warmup_steps: the steps of the warm-up; 0 takes ``warmup_fraction`` of all. A run that is
            not on a ``cosine`` keeps the number that it began with.
    """

    name: str = "adamw"
    learning_rate: float = 3e-4
    final_fraction: float = 0.1
    warmup_fraction: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    decay_fraction: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check = functools.partial(check_fields, self, "optimizer.")
        check(
            "learning_rate epsilon clip_norm",
            lambda value: 0 < value < math.inf,
            "positive and finite",
        )
        check(
            "final_fraction warmup_fraction decay_fraction",
            lambda value: 0 <= value <= 1,
            "between 0 and 1",
        )
        check("beta1 beta2", lambda value: 0 <= value < 1, "at least 0 and below 1")
        check(
            "weight_decay warmup_steps",
            lambda value: 0 <= value < math.inf,
            "0 or positive, and finite",
        )
        if self.moment_dtype == "bfloat16":  # whose 8 bits would round a decay of 1 in 1,000 away
            check(
                "beta2",
                lambda value: value <= 0.99,
                "at most 0.99 with optimizer.moment_dtype bfloat16",
            )


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long to train and on how much at a time.

    Args:
        batch_size: windows in each step, over all devices.
        seq_len: tokens in each window; 0 means ``model.max_seq_len``, with ``init_from`` or
            ``preset`` at most 1,024.
        steps: updates, unless ``epochs`` is given.
        epochs: passes over the training text, in place of ``steps``.
        accumulation: parts that a batch is taken in, one after the other, to save memory; the
            result is the same.
        eval_every: steps between evaluations, each followed by a sample; the last step has one too.
        save_every: steps between checkpoints; 0 means ``eval_every``. The best is chosen among
            those evaluated, too.
        eval_tokens: evenly spaced validation tokens per evaluation (the last one uses all); 0 is
            all of them.
        log_every: steps between two lines in ``metrics.jsonl``.
        keep_last: checkpoints kept besides the best one.
        objective: what is minimized, by its name in ``training.objectives.OBJECTIVES``; ``auto`` is
            ``preference`` for pairs of answers, else ``next_token``.
        trainable: what is trained, by patterns of names: ``["layers/*/w_down", "layers/1[0-5]/*",
            "embed"]``; all the rest stays as it is, and the optimizer keeps nothing of it. Without
            any, everything is trained.
        ema: over 0, the decay of a running mean of what is trained, which is then evaluated,
            sampled and saved as the model; the first steps have a lower one, see ``step.apply_update``.
        spike_factor: a step whose gradient norm is over this many times its running mean is
            skipped; 0 for none.
        z_loss: weight of the squared log-normalizer in the loss.
        dpo_beta: how fast preference training leaves the model that it began from
            (arXiv:2305.18290, eq. 7).
        dtype: of activations and of weights in matrix products; ``auto`` is bfloat16 on GPU and
            TPU, float32 on CPU.
        attention: ``reference``, ``blocked``, ``xla`` or another of ``functional.ATTENTION``;
            ``auto`` says its choice.
        deterministic: whether two equal runs on GPUs have the same bits: ``auto`` where the
            attention allows it. On CPUs and TPUs they always have.
        remat: what the backward pass finds kept of each layer: ``none`` recomputes nothing,
            ``dots`` all but products with weights, ``block`` the whole layer, ``offload`` too, from
            inputs kept in the host's memory; ``auto`` is ``dots`` where its step fits the device,
            else ``block``.
        reduce_dtype: in which gradients are summed over devices and kept; bfloat16 halves what is
            exchanged.
        compiler_options: XLA's, by name, such as ``{"xla_gpu_enable_pipelined_reduce_scatter":
            false}``.
        sample_prompt: what the text sampled at each evaluation begins with; in a run on chats what
            is asked then, without it a question that is held out.
        sample_tokens: how many tokens to sample then, 0 for none; without it 128, or as many as the
            context leaves.
        questions: what is asked at each evaluation instead, answered with the likeliest tokens.
        patience: end after so many evaluations without a lower validation loss; 0 never does.
        max_skipped: end with an error after so many steps in a row that had to be left out, as not
            finite or a spike.
    """

    batch_size: int = 16
    seq_len: int = 0
    steps: int = 1000
    epochs: float = 0.0
    accumulation: int = 1
    eval_every: int = 250
    save_every: int = 0
    eval_tokens: int = 65_536
    log_every: int = 10
    keep_last: int = 1
    objective: str = "auto"
    trainable: list[str] = dataclasses.field(default_factory=list)
    ema: float = 0.0
    spike_factor: float = 0.0
    z_loss: float = 0.0
    dpo_beta: float = 0.1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: str = "auto"
    deterministic: bool | Literal["auto"] = "auto"
    remat: bool | Literal["auto", "none", "dots", "block", "offload"] = "auto"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    compiler_options: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    sample_prompt: str = ""
    sample_tokens: int | None = None
    questions: list[str] = dataclasses.field(default_factory=list)
    patience: int = 0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.remat, bool):  # as runs of 0.1 have it
            object.__setattr__(self, "remat", "block" if self.remat else "dots")
        check = functools.partial(check_fields, self, "training.")
        counts = "batch_size accumulation eval_every log_every keep_last max_skipped"
        check(counts, lambda value: value >= 1, "at least 1")
        sizes = "seq_len steps epochs eval_tokens save_every z_loss sample_tokens patience"
        check(sizes, lambda value: value is None or 0 <= value < 2**31, "from 0 to below 2**31")
        check("steps", lambda steps: bool(steps or self.epochs), "positive, or training.epochs")
        if self.epochs:
            check(
                "steps",
                (0, LoopConfig.steps).__contains__,
                f"0 or left out, since training.epochs is {self.epochs}",
            )
        check("ema", lambda decay: 0 <= decay < 1, "at least 0 and below 1")
        check("spike_factor", lambda factor: factor == 0 or factor > 1, "0, or over 1")
        check("dpo_beta", lambda beta: beta > 0, "positive")
        divisor = f"a divisor of training.batch_size, {self.batch_size}"
        check("accumulation", lambda parts: self.batch_size % parts == 0, divisor)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Examples:
        quickstart
        configs/quickstart.yaml --data.path my_texts/ --run_dir runs/mine --overwrite
        --init_from smollm2.gguf --data.path chats.txt --training.steps 100

    Args:
        model: the architecture; with ``init_from`` the checkpoint's own is taken, and this one is
            not.
        init_from: begin from a checkpoint, by folder, file or hub id; at the command line with
            batch size 4 and learning rate 2e-5, unless they are given.
        preset: a released Llama in place of ``model``: ``llama3.2-1b``.
        rope_factor: with ``init_from``, the RoPE scaling factor that Meta's params.json leaves out.
        run_dir: the folder of the run.
        seed: of the initial weights, the order of the data and the samples.
        resume: ``auto`` continues the run in ``run_dir``, if any, a folder the run in it; ``never``
            refuses.
        resume_with_changes: go on although the learning rate, the steps or another option of the
            outcome has changed.
        overwrite: remove the run in ``run_dir``, unless it is resumed; its name is asked for, or
            give ``yes``.
        yes: overwrite without asking.
        sampling: how the text sampled at each evaluation is drawn.
        logger: where else metrics go as they come: ``tensorboard``, ``wandb``, ``trackio``, or
            nowhere.
        lora: train adapters of the weights that ``init_from`` brings, in place of the weights.
    """

    model: LlamaConfig
    init_from: str = ""
    preset: str = ""
    rope_factor: float | None = None
    run_dir: str = "runs/default"
    seed: int = 0
    resume: str = "never"
    resume_with_changes: bool = False
    overwrite: bool = False
    yes: bool = False
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    sampling: SamplingParams = dataclasses.field(
        default_factory=lambda: SamplingParams(temperature=0.8, top_p=0.95)
    )
    logger: str = ""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", "run_dir", bool, "the folder that will hold the run")
        if self.resume not in ("never", "auto"):
            if self.run_dir not in (self.resume, TrainConfig.run_dir):
                raise UsageError(
                    f"resume is {self.resume} but run_dir is {self.run_dir}: leave one of them out"
                )
            object.__setattr__(self, "run_dir", self.resume)
        if not self.init_from:
            check_fields(
                self.lora, "lora.", "rank", lambda rank: not rank, "0 or left out without init_from"
            )
            check_fields(
                self, "", "rope_factor", lambda factor: factor is None, "left out without init_from"
            )
        check_fields(self, "", "seed", lambda seed: 0 <= seed < 2**32, "between 0 and 2**32 - 1")

    trains_adapters = property(
        lambda self: self.lora.rank > 0, doc="Whether adapters are all that is trained."
    )
