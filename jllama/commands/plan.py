"""``jllama plan``: predict the memory and speed of a step on devices that are absent."""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.filesize import decimal

import jllama
from jllama.commands.cli import parse
from jllama.core import UsageError, check_fields
from jllama.parallel.config import MeshConfig
from jllama.training.config import LoopConfig, TrainConfig

if TYPE_CHECKING:
    from jllama.lab.plan_receipt import Receipt

_GIB = 2**30
_COMMON = "topology preset batch_size seq_len mesh.fsdp mesh.tensor decode search json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainConfig):
    """Predict the memory and speed of a training or decoding step on TPUs or GPUs that are absent.

    The step is compiled for these devices, and not run.

    Examples:
        --preset llama3.2-1b --topology v5e:4x4 --seq_len 4096
        llama3.1-8b_h100-8 --topology h100:8 --search
        --preset llama3.1-70b --topology h200:8 --decode --batch_size 32 --seq_len 8192

    Args:
        topology: the devices. TPUs are written with the sides of the slice or the number of
            chips, as v5e:4x4 or v5e:16 (v4, v5e, v5p, v6e); GPUs with their number, as h100:64
            (a100, h100, h200, b200, gb200).
        preset: a released Llama, as in jllama.PRESETS, in place of the configuration's model.
        batch_size: the rows of a step on all devices together; 0 takes the configuration's, or
            with a preset one row for each data shard.
        seq_len: the tokens of a row; 0 takes the configuration's.
        decode: plan a decoding step, with seq_len tokens in the cache of each row.
        quantize: int8 weights, for decoding; on a GPU or TPU they save memory and no time.
        search: try meshes, accumulation and remat settings, and take the fastest that fits.
        tokens: the tokens of a whole training run, to compute its days.
        json: print the receipt as JSON.
    """

    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(data=1, fsdp=-1))
    training: LoopConfig = dataclasses.field(default_factory=lambda: LoopConfig(remat="block"))
    topology: str = ""
    preset: str = ""
    batch_size: int = 0
    seq_len: int = 0
    decode: bool = False
    quantize: Literal["int8"] | None = None
    search: bool = False
    tokens: float = 15e12
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.topology:
            raise UsageError("topology is missing: give the devices, such as v5e:4x4 or h100:8")
        expected = "positive, or 0 for the default"
        check_fields(self, "", "batch_size seq_len", lambda size: 0 <= size < 2**31, expected)
        check_fields(self, "", "tokens", lambda count: 0 < count < math.inf, "positive")
        if self.quantize and not self.decode:
            raise UsageError("quantize int8 is for --decode alone: leave it out, or add --decode")
        if self.search and self.decode:
            raise UsageError("search is for training alone: leave out --search or --decode")


def main(argv: list[str], prog: str) -> int:
    """Compile the step and print the receipt; return 1 if the step does not fit."""
    options = parse(PlanOptions, argv, prog, ("config",), _COMMON)
    # Only the compilers are used: nothing is run. The receipt has what counts of their messages.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jllama.lab.plan_devices import topology_devices, usual_topology
    from jllama.lab.plan_receipt import describe, plan_decoding, plan_training
    from jllama.lab.plan_search import search
    from jllama.parallel.sharding import make_mesh
    from jllama.parallel.shards import row_ways

    # Resolve the sizes that the options leave open.
    topology = usual_topology(options.topology)
    model = jllama.preset(options.preset) if options.preset else options.model
    seq_len = options.seq_len or options.training.seq_len or model.max_seq_len
    model = dataclasses.replace(model, max_seq_len=max(seq_len, model.max_seq_len))
    accelerator, devices = topology_devices(topology)
    if not accelerator.kind and (options.search or options.decode):
        raise UsageError("search and decode need the packages: only training has a formula")
    mesh = make_mesh(options.mesh, devices).shape
    batch_size = options.batch_size
    if not batch_size:
        shards = row_ways(mesh)
        batch_size = shards if options.preset else options.training.batch_size
    training = dataclasses.replace(options.training, seq_len=seq_len, batch_size=batch_size)
    config = dataclasses.replace(options, topology=topology, model=model, training=training)

    # Compile a decoding step, the steps of a search, or one training step.
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    if options.decode:
        receipt = plan_decoding(
            model, topology, options.mesh, batch_size, seq_len, options.quantize
        )
    elif options.search:
        progress = Console(stderr=True, highlight=False, soft_wrap=True)
        has_batch = bool(options.batch_size) or not options.preset
        receipts = [tried for _, tried in search(config, topology, has_batch, progress.print)]
        for tried in receipts:
            speed = "does not fit"
            if tried.fits:
                speed = f"MFU {tried.mfu_limit:6.1%}, {tried.tokens_per_s:,.0f} tokens/s"
            settings = describe(tried.mesh, tried.settings)
            console.print(f"{tried.needed_bytes / _GIB:8.2f} GiB  {speed:33}  {settings}")
        receipt = receipts[0]
    else:
        receipt = plan_training(config, topology)

    # Print the receipt.
    if options.json:
        print(json.dumps(receipt.as_dict()))
    else:
        title = f"{receipt.device}, {describe(receipt.mesh, receipt.settings)}"
        console.print("\n".join(_lines(receipt, title, options.decode, options.tokens)))
    return 0 if receipt.fits else 1


def _lines(receipt: "Receipt", title: str, decode: bool, tokens: float) -> Iterator[str]:
    """Yield the lines of a printed receipt."""
    spare = (receipt.device_memory_bytes - receipt.max_bytes) / _GIB
    verdict = f"fits, {spare:.2f} GiB to spare"
    rows = _memory_rows(receipt, decode)
    if receipt.fits and receipt.traffic_bytes:  # nothing was compiled without
        rows |= _speed_rows(receipt, decode, tokens)
    elif not receipt.fits:
        verdict = f"does not fit: {-spare:.2f} GiB too much"
    yield f"{title}: {verdict}"
    yield from (f"  {name:41}{value}" for name, value in rows.items())
    for size, shape, name in receipt.largest:
        yield f"  {size / _GIB:8.2f} GiB  {shape}  {name}"
    yield from (f"  to make it fit: {tip}" for tip in receipt.advice)
    yield f"compiled in {receipt.compile_s:.0f} s"


def _memory_rows(receipt: "Receipt", decode: bool) -> dict[str, str]:
    """Return the memory of a device and its parts, in GiB."""
    others = receipt.arguments_bytes - receipt.parameters_bytes - receipt.moments_bytes
    sizes = {
        "  parameters": receipt.parameters_bytes,
        "  moments": receipt.moments_bytes,
        "  cache and tokens" if decode else "  batch": others,
        "  gradients": receipt.gradients_bytes,
        "  activations and what the compiler needs": (
            receipt.temporaries_bytes - receipt.gradients_bytes
        ),
        "while weights are read and quantized": receipt.starting_bytes,
    }
    limit = f"{receipt.device_memory_bytes / _GIB:.2f} GiB"
    rows = {"memory of a device": f"{receipt.needed_bytes / _GIB:8.2f} of {limit}"}
    return rows | {name: f"{size / _GIB:8.2f}" for name, size in sizes.items() if size}


def _speed_rows(receipt: "Receipt", decode: bool, tokens: float) -> dict[str, str]:
    """Return what a step computes and moves, and its speed at the published rates."""
    rows = {
        "attention kernel": receipt.attention or "none",
        "FLOPs of a device in a step": (
            f"{receipt.flops:.3g}, computed {receipt.recomputed:.2f} times"
        ),
        "read and written in its memory": decimal(int(receipt.traffic_bytes)),
    }
    share = f"{receipt.mfu_limit:.1%} MFU"
    if decode:
        min_s = receipt.least_bytes / receipt.traffic_bytes * receipt.memory_s
        share = f"{min_s / max(receipt.times_s.values()):.1%} of the memory's rate"
        rows["weights and keys alone"] = f"{decimal(receipt.least_bytes)}, {1e3 * min_s:,.2f} ms"
        rows["launches in a step"] = f"{receipt.launches:,}"
    received: Counter[str] = Counter()
    for row in receipt.collectives:
        received[f"received in {row.kind}"] += int(row.times * row.bytes_each)
    rows |= {name: decimal(size) for name, size in received.items()}
    times = [f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in receipt.times_s.items()]
    rows["a step at the published rates"] = f"{', '.join(times)}: {receipt.binds} binds"
    rows["at most"] = f"{share}, {receipt.tokens_per_s:,.0f} tokens/s"
    if decode:
        return rows
    if receipt.expected_s:
        speed = f"{receipt.tokens / receipt.expected_s:,.0f} tokens/s"
        rows["expected, by rates measured on an H100"] = f"{receipt.expected_mfu:.1%} MFU, {speed}"
    days = tokens / receipt.tokens_per_s / 86_400
    rows[f"{tokens:.3g} tokens".replace("e+", "e")] = f"{days:,.1f} days"
    return rows
