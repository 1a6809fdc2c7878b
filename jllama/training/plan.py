"""``Plan``: all that is decided about a training before it is compiled."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jllama.core import UsageError, check_fields
from jllama.core.config import LlamaConfig
from jllama.functional import choose_attention
from jllama.generation.sampling_params import SamplingParams
from jllama.models.build import check_attention
from jllama.parallel import distributed
from jllama.parallel.exchange import BY_HAND
from jllama.parallel.sharding import make_mesh, ruleset
from jllama.parallel.shards import row_ways
from jllama.system.errors import unknown_name
from jllama.system.files import AUTOTUNING, CHECKPOINTS, METRICS, SAMPLES
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.objectives import OBJECTIVES
from jllama.training.trainable import FullWeights, trainable_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is decided about a training before it is compiled.

    ``decide`` makes it from a configuration; ``resolve`` makes that of a run, which also has data.

    Attributes:
        config: what ``config.yaml`` says, complete. What opens a run, writes its files and
            rewards answers reads it; the programs and the loop do not.
        folder: the run's.
        model: the architecture.
        options: of the loop, and of the objective.
        optimizer: the optimizer and its schedule, which has ``options.steps`` steps.
        sampling: how samples and answers are drawn.
        seed: of the initial weights, the order of the data, and the samples.
        packing: whether rows hold several conversations.
        mesh: the devices.
        rules: which mesh axes split which axes of the weights.
        dtype: of activations and products.
        attention: the name of the implementation.
        remat: what the backward pass recomputes. ``auto`` is ``dots`` until its step turns out not
            to fit; the loop then goes on with ``block``.
        trainable: what is trained.
        compiler_options: XLA's.
        intervals: the steps between two evaluations (``METRICS``), samples (``SAMPLES``) and
            checkpoints (``CHECKPOINTS``).
        data: what the run learns from.
        origin: the ``Checkpoint`` to begin from, if any.
        language_model: what is trained, without weights: its tokenizer, template and stop ids.
        resumes: whether the run goes on from its checkpoint of ``step``.
        replaces: whether another run's folder is cleared.
    """

    config: TrainConfig
    folder: Path
    model: LlamaConfig
    options: LoopConfig
    optimizer: OptimizerConfig
    sampling: SamplingParams
    seed: int
    packing: bool
    mesh: Mesh
    rules: Mapping[str, Sequence[str]]
    dtype: np.dtype[Any]
    attention: str
    remat: str
    trainable: FullWeights
    compiler_options: dict[str, Any]
    intervals: Mapping[str, int]
    data: Any = None
    origin: Any = None
    language_model: Any = None
    step: int = 0
    resumes: bool = False
    replaces: bool = False


def decide(
    config: TrainConfig,
    mesh: Mesh | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **of_run: Any,
) -> Plan:
    """Decide what a configuration leaves open.

    Args:
        config: the configuration, whose model has its ``vocab_size``.
        mesh: the devices; None makes a mesh by ``config.mesh``.
        compiler_options: XLA's, added to those of ``config.training``.
        of_run: the attributes that only a run's plan has, from ``data`` on.

    Raises:
        UsageError: the configuration does not fit the devices, or names something unknown.
    """
    # The devices, and what they compute with.
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    options = config.training
    seq_len = options.seq_len or config.model.max_seq_len
    options = dataclasses.replace(options, seq_len=seq_len)
    device = mesh.devices.flat[0]
    platform = device.platform
    sums_by_hand = any(mesh.shape[name] > 1 for name in BY_HAND)
    if platform == "cpu" and sums_by_hand and options.reduce_dtype != "float32":
        raise UsageError(
            f"training.reduce_dtype is {options.reduce_dtype}; "
            "it must be float32 on CPUs, where XLA sums no other"
        )
    if options.objective not in OBJECTIVES:
        raise unknown_name("objective", options.objective, OBJECTIVES)
    dtype = compute_dtype(options.dtype, platform)

    # Attention.
    check_attention(options.attention, platform, backward=True)
    attention = options.attention
    if attention == "auto":
        window = config.model.sliding_window > 0
        attention = choose_attention(
            seq_len, seq_len, platform=platform, dtype=dtype, window=window
        )
        # These two take no queries from inside a row.
        if mesh.shape["sequence"] > 1 and attention in ("tokamax", "triton"):
            attention = "blocked"

    # The options of the compiler, and whether a GPU must repeat its bits.
    xla_options = {**options.compiler_options, **(compiler_options or {})}
    repeats_bits = platform == "gpu" and options.deterministic is not False
    if repeats_bits and attention == "cudnn":  # its backward pass adds in any order
        if options.deterministic is True:
            raise UsageError(
                "training.deterministic is true, and training.attention cudnn is not: "
                "take another, or auto"
            )
        repeats_bits = False
    if repeats_bits and device in jax.devices():
        # Kernels are only timed where the device is present; for an absent one XLA finds none that
        # it may exclude.
        xla_options.setdefault("xla_gpu_exclude_nondeterministic_ops", True)
    return Plan(
        config=config,
        folder=Path(config.run_dir),
        model=config.model,
        options=options,
        optimizer=config.optimizer,
        sampling=config.sampling,
        seed=config.seed,
        packing=config.data.packing,
        mesh=mesh,
        rules=ruleset(config.mesh),
        dtype=dtype,
        attention=attention,
        remat=str(options.remat),
        trainable=trainable_of(config, dtype, mesh.shape),
        compiler_options=xla_options,
        intervals={
            METRICS: options.eval_every,
            SAMPLES: options.eval_every,
            CHECKPOINTS: options.save_every or options.eval_every,
        },
        **of_run,
    )


def compute_dtype(name: str, platform: str) -> np.dtype[Any]:
    """Return the dtype of activations and products: as configured, or by the platform."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def autotuning_options(config: TrainConfig) -> dict[str, Any]:
    """Return XLA's options that keep a GPU's choices of kernels in the run's folder.

    XLA chooses by timing, so a resumed run would otherwise choose others. JAX's cache of compiled
    programs keeps the choices by the same options.
    """
    if jax.default_backend() != "gpu" or config.training.deterministic is False:
        return {}
    mode = "UPDATE" if distributed.process_index() == 0 else "READ"
    folder = Path(config.run_dir) / AUTOTUNING
    return {
        "xla_gpu_per_fusion_autotune_cache_dir": str(folder.absolute()),
        "xla_gpu_experimental_autotune_cache_mode": f"AUTOTUNE_CACHE_MODE_{mode}",
    }


def check_batch_divides(plan: Plan) -> None:
    """Raise ``UsageError`` if rows of a batch, or tokens of a row, do not divide over the mesh."""
    options = plan.options
    sizes = plan.mesh.shape
    num_devices = row_ways(sizes)
    divisor = num_devices * options.accumulation
    expected = f"a multiple of {num_devices} device(s) times {options.accumulation} part(s)"
    check_fields(options, "training.", "batch_size", lambda size: size % divisor == 0, expected)
    ways = sizes["sequence"]
    expected = f"a multiple of mesh.sequence, {ways}"
    check_fields(options, "training.", "seq_len", lambda size: size % ways == 0, expected)
