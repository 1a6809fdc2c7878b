"""The configuration of a training run: what YAML files and the command line fill in."""

import dataclasses
import functools
import math
import operator
from typing import Literal

from jllama.core import UsageError, check_fields
from jllama.core.config import LlamaConfig
from jllama.data.config import DataConfig
from jllama.generation.sampling_params import SamplingParams
from jllama.models.config import LoraConfig
from jllama.parallel.config import DistributedConfig, MeshConfig
from jllama.system.places import as_place


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and the schedule of its learning rate.

    Args:
        name: ``adamw`` (arXiv:1711.05101; stores two moments), ``lion`` (arXiv:2302.06675; stores
            one, use a fifth of the learning rate), ``adafactor`` (arXiv:1804.04235; stores one,
            factored into rows and columns) or ``muon`` (Jordan et al. 2024, arXiv:2502.16982;
            stores one for each layer's matrices, and is AdamW for all else; use up to 4 times the
            learning rate).
        learning_rate: the peak, after the warm-up.
        final_fraction: the learning rate at the end, as a fraction of the peak.
        warmup_fraction: the fraction of all steps in which the learning rate rises linearly, unless
            ``warmup_steps`` is set.
        beta1: decay of the running mean of gradients (``adamw``), or the mean's weight in a step
            (``lion``). ``muon`` uses it, ``beta2`` and ``epsilon`` for its AdamW part; its own
            momentum has decay 0.95.
        beta2: decay of the running mean of squared gradients (``adamw``) or of gradients
            (``lion``).
        epsilon: added to the root of the mean squared gradient (``adamw``).
        weight_decay: per unit of learning rate, on matrices only (never on norms).
        clip_norm: a gradient whose global norm is larger is scaled down to this norm.
        moment_dtype: dtype in which moments are stored between steps; bfloat16 halves their memory
            and needs ``beta2`` of at most 0.99.
        schedule: after the warm-up the learning rate follows half a ``cosine`` down, stays
            ``constant``, or stays and then falls linearly at the end (``wsd``: warm-up, stable,
            decay). A run with one of the last two can be resumed with more steps.
        decay_fraction: the fraction of all steps in which ``wsd`` falls at the end.
        warmup_steps: steps of the warm-up; 0 computes them from ``warmup_fraction``. Unless the
            schedule is ``cosine``, a resumed run keeps its number.

    >>> jllama.OptimizerConfig(name="lion", learning_rate=1e-4).name
    'lion'
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
        if self.moment_dtype == "bfloat16":  # its 8 bits would round a decay of 1 in 1,000 away
            check(
                "beta2",
                lambda value: value <= 0.99,
                "at most 0.99 with optimizer.moment_dtype bfloat16",
            )


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

    Args:
        group_size: answers to each prompt. ``training.batch_size`` counts answers.
        max_answer_tokens: the maximum number of tokens of an answer.
        advantage: an answer's reward minus the mean of its group, divided by the standard deviation
            (``group``) or not (``centered``, Dr. GRPO, arXiv:2503.20783), or minus the mean of the
            others (``rloo``, arXiv:2402.14740).
        normalization: the loss is the mean over all ``tokens`` (DAPO, arXiv:2503.14476), the mean
            over ``answers`` of the mean over their tokens (GRPO), or the sum divided by the
            ``constant`` number of answers times ``max_answer_tokens`` (Dr. GRPO).
        clip_low: a ratio of probabilities below 1 minus this has no gradient.
        clip_high: a ratio above 1 plus this has no gradient; DAPO takes 0.28.
        kl: weight of the divergence from the model before training; 0 keeps no such model.
        importance_cap: if positive, a token's loss is multiplied by the ratio of its probability in
            the trainer to that in the sampler, at most this (Yao et al. 2025).
        updates: updates from each batch of answers.
        mask_overlong: whether answers that ``max_answer_tokens`` cut off have no gradient.
        eval_prompts: held-out prompts that an evaluation answers; 0 is all.
        reward_limit_s: seconds that the reward of one prompt's answers may take.
        reward_processes: processes that compute rewards of a Python file.

    >>> jllama.GrpoConfig(group_size=16, kl=0.01).advantage
    'group'
    """

    group_size: int = 8
    max_answer_tokens: int = 256
    advantage: Literal["group", "centered", "rloo"] = "group"
    normalization: Literal["tokens", "answers", "constant"] = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    importance_cap: float = 0.0
    updates: int = 1
    mask_overlong: bool = True
    eval_prompts: int = 64
    reward_limit_s: float = 60.0
    reward_processes: int = 1

    def __post_init__(self) -> None:
        check = functools.partial(check_fields, self, "training.grpo.")
        check("group_size", lambda size: size >= 2, "at least 2, to compare answers")
        counts = "max_answer_tokens updates reward_processes"
        check(counts, lambda value: value >= 1, "at least 1")
        check("kl importance_cap eval_prompts", lambda value: 0 <= value < 2**31, "0 or positive")
        check("clip_low", lambda value: 0 <= value <= 1, "between 0 and 1")
        check("clip_high", lambda value: 0 <= value < math.inf, "0 or positive, and finite")
        check("reward_limit_s", lambda value: 0 < value < math.inf, "positive and finite")


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long to train, on how much at a time, and what to do in between.

    Args:
        batch_size: rows in each step, over all devices.
        seq_len: tokens in each row; 0 means ``model.max_seq_len``, and with ``init_from`` or
            ``preset`` at most 1,024.
        steps: updates, unless ``epochs`` is set.
        epochs: passes over the training data, instead of ``steps``.
        accumulation: parts of a batch that are computed one after another to save memory; the
            result is the same.
        eval_every: steps between evaluations, each followed by a sample; there is one after the
            last step, too.
        save_every: steps between checkpoints; 0 means ``eval_every``. The best one is chosen among
            those evaluated.
        save_minutes: save as well as soon as the last checkpoint is this old, such as 10 on a
            machine that may be taken away; 0 never does.
        eval_tokens: evenly spaced validation tokens per evaluation (the last one uses all); 0 means
            all.
        log_every: steps between two lines in ``metrics.jsonl``.
        keep_last: checkpoints that are kept besides the best one.
        objective: what is minimized, a name in ``training.objectives.OBJECTIVES``; ``auto`` is
            ``preference`` for pairs of answers, and ``next_token`` otherwise.
        trainable: patterns for the names of the parameters that are trained, such as
            ``["layers/*/w_down", "layers/1[0-5]/*", "embed"]``. The others never change and have no
            optimizer state. If empty, everything is trained.
        ema: if positive, the decay of a running mean of what is trained. The mean is evaluated,
            sampled and saved as the model. In the first steps the decay is lower, see
            ``core.step.update``.
        spike_factor: a step is skipped if its gradient norm is over this many times the norm's
            running mean; 0 never skips.
        z_loss: weight of the squared log-normalizer in the loss.
        balance_loss: weight of the loss by which experts get equal shares of tokens
            (arXiv:2101.03961, eq. 4), of each layer with experts.
        router_z_loss: weight of the squared log-normalizer of the choice of experts
            (arXiv:2202.08906, eq. 5).
        dpo_beta: weight of the log-probabilities against the reference model in preference training
            (arXiv:2305.18290, eq. 7); the higher, the nearer the model stays to where it began.
        grpo: how to learn from rewards.
        dtype: of activations, and of weights in matrix products; ``auto`` is bfloat16 on GPU and
            TPU, float32 on CPU.
        attention: ``reference``, ``blocked`` or another name in ``functional.ATTENTION``;
            ``auto`` chooses, and the run says what.
        deterministic: whether two equal runs on GPUs have the same bits; ``auto`` where the
            attention allows it. On CPUs and TPUs they always have.
        remat: what the backward pass recomputes of each layer: ``none`` nothing, ``dots``
            everything but products with weights, ``block`` the whole layer, ``offload`` the whole
            layer from inputs stored in host memory; ``auto`` is ``dots`` if its step fits the
            device, else ``block``.
        reduce_dtype: dtype in which gradients are summed over devices and stored; bfloat16 halves
            what is exchanged.
        compiler_options: XLA's, by name, such as ``{"xla_gpu_enable_pipelined_reduce_scatter":
            false}``.
        sample_prompt: what the text sampled at each evaluation begins with. In a run on chats it is
            asked as a question; if empty there, a question of the validation data is asked.
        sample_tokens: number of tokens to sample; 0 samples nothing. If not set, 128 or as many as
            the context leaves.
        questions: asked at each evaluation instead of ``sample_prompt``, and answered with the
            likeliest tokens.
        patience: end after this many evaluations without a lower validation loss; 0 never does.
        max_skipped: end with an error after this many skipped steps in a row, whose loss or
            gradient was not finite or a spike.
        profile: steps to record, FIRST:LAST, both included, such as ``10:15``: a trace in the run's
            folder ``profile``, for TensorBoard and Perfetto.

    >>> jllama.LoopConfig(batch_size=8, seq_len=64, steps=30).batch_size
    8
    """

    batch_size: int = 16
    seq_len: int = 0
    steps: int = 1000
    epochs: float = 0.0
    accumulation: int = 1
    eval_every: int = 250
    save_every: int = 0
    save_minutes: float = 0.0
    eval_tokens: int = 65_536
    log_every: int = 10
    keep_last: int = 1
    objective: str = "auto"
    trainable: list[str] = dataclasses.field(default_factory=list)
    ema: float = 0.0
    spike_factor: float = 0.0
    z_loss: float = 0.0
    balance_loss: float = 0.01
    router_z_loss: float = 0.0
    dpo_beta: float = 0.1
    grpo: GrpoConfig = dataclasses.field(default_factory=GrpoConfig)
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
    profile: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.remat, bool):  # runs of 0.1 have a Boolean
            vars(self)["remat"] = "block" if self.remat else "dots"
        check = functools.partial(check_fields, self, "training.")
        counts = "batch_size accumulation eval_every log_every keep_last max_skipped"
        check(counts, lambda value: value >= 1, "at least 1")
        sizes = "seq_len steps epochs eval_tokens save_every save_minutes z_loss sample_tokens"
        sizes += " patience balance_loss router_z_loss"
        check(sizes, lambda value: value is None or 0 <= value < 2**31, "from 0 to below 2**31")
        check("steps", lambda steps: bool(steps or self.epochs), "positive, or training.epochs")
        if self.epochs:
            check(
                "steps",
                lambda steps: steps in (0, LoopConfig.steps),
                f"0 or left out, since training.epochs is {self.epochs}",
            )
        check("ema", lambda decay: 0 <= decay < 1, "at least 0 and below 1")
        check("spike_factor", lambda factor: factor == 0 or factor > 1, "0, or over 1")
        check("dpo_beta", lambda beta: beta > 0, "positive")
        divisor = f"a divisor of training.batch_size, {self.batch_size}"
        check("accumulation", lambda parts: self.batch_size % parts == 0, divisor)
        if self.profile:
            from jllama.training.profile import profiled_steps

            profiled_steps(self.profile)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Examples:
        quickstart
        configs/quickstart.yaml --data.path my_texts/ --run_dir runs/mine --overwrite
        --init_from smollm2.gguf --data.path chats.txt --training.steps 100

    Args:
        model: the architecture; with ``init_from`` that of the checkpoint is used instead.
        init_from: a checkpoint to begin from, by folder, file or hub id; commands then take batch
            size 4, learning rate 2e-5.
        preset: a released Llama instead of ``model``: ``llama3.2-1b``.
        rope_factor: with ``init_from``, the RoPE scaling factor, which Meta's params.json does not
            have.
        run_dir: the folder of the run.
        seed: of the initial weights, the order of the data, and the samples.
        resume: ``auto`` continues a run in ``run_dir``, a folder the run in it, and ``never``
            refuses.
        resume_with_changes: continue although the learning rate, the steps or another option that
            affects the outcome has changed.
        overwrite: remove the run in ``run_dir``; asks for its name first.
        yes: overwrite without asking.
        sampling: how the text sampled at each evaluation is drawn.
        reward: how answers to the prompts of ``data.path`` are rewarded, which trains by
            ``training.grpo``: a function in a file (``my_rewards.py:score``), ``exact``,
            ``number``, ``regex``, ``json``, ``expression`` or ``length``; or several with their
            weights (``{"number": 1, "length:200": 0.1}``).
        logger: where metrics also go, as they come: ``tensorboard``, ``wandb``, ``trackio``, or
            nowhere.
        lora: train adapters of the weights of ``init_from``, instead of the weights.

    >>> model = jllama.LlamaConfig(512, num_layers=2, embed_dim=64, num_heads=4)
    >>> config = jllama.TrainConfig(model, run_dir="runs/mine")
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
    reward: str | dict[str, float] = ""
    logger: str = ""
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", "run_dir", bool, "the folder that will hold the run")
        for place in (self.run_dir, self.resume, self.init_from, self.lora.init_from):
            as_place(place)
        if self.resume not in ("never", "auto"):
            if self.run_dir not in (self.resume, TrainConfig.run_dir):
                raise UsageError(
                    f"resume is {self.resume} but run_dir is {self.run_dir}: leave one of them out"
                )
            vars(self)["run_dir"] = self.resume
        if not self.init_from:
            expected = "left out without init_from, whose weights are adapted"
            check_fields(self.lora, "lora.", "rank init_from", operator.not_, expected)
            check_fields(
                self, "", "rope_factor", lambda factor: factor is None, "left out without init_from"
            )
        are_left_out = self.lora.targets == LoraConfig.targets and not self.lora.init_from
        if self.model.num_experts and are_left_out:
            of_attention = dataclasses.replace(self.lora, targets=self.lora.targets[:4])
            vars(self)["lora"] = of_attention
        if self.reward:
            self._check_rewards()
        check_fields(self, "", "seed", lambda seed: 0 <= seed < 2**32, "between 0 and 2**32 - 1")

    def _check_rewards(self) -> None:
        """Raise ``UsageError`` if the options do not fit training from rewards."""
        check_fields(self, "", "init_from", bool, "the model that answers, since reward is given")
        expected = "finite numbers by the names of rewards"
        check_fields(
            self,
            "",
            "reward",
            lambda _: all(math.isfinite(weight) for weight in self.rewards.values()),
            expected,
        )
        check = functools.partial(check_fields, self.training, "training.")
        check("objective", lambda name: name in ("auto", "grpo"), "auto or grpo, with reward")
        size = self.training.grpo.group_size
        check(
            "batch_size",
            lambda answers: answers % size == 0,
            f"a multiple of training.grpo.group_size, {size}: it counts answers",
        )
        updates = self.training.grpo.updates
        check(
            "steps eval_every save_every",
            lambda steps: steps % updates == 0,
            f"a multiple of training.grpo.updates, {updates}, so that no batch is left half used",
        )

    @property
    def rewards(self) -> dict[str, float]:
        """The weights of rewards by their specifications; empty without ``reward``."""
        if isinstance(self.reward, str):
            return {self.reward: 1.0} if self.reward else {}
        return self.reward

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return bool(self.lora.rank or self.lora.init_from)

    @property
    def has_reference(self) -> bool:
        """Whether rewards are weighed against the divergence from a reference model."""
        return bool(self.reward) and self.training.grpo.kl > 0
