"""``jllama plan``."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

import jllama
from jllama.commands.cli import parse
from jllama.config import LlamaConfig, MeshConfig
from jllama.errors import UsageError
from jllama.training.config import LoopConfig, TrainConfig

if TYPE_CHECKING:
    from jllama.plan.receipt import Receipt

_COMMON = ("topology", "preset", "batch_size", "seq_len", "mesh.fsdp", "mesh.tensor", "decode", "search", "json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainConfig):
    """Compile a training or decoding step for TPUs or GPUs that are not there, and say what it will need and reach.

    Examples:
        --preset llama3.2-1b --topology v5e:4x4 --seq_len 4096
        configs/llama3.1-8b.yaml --topology h100:8 --search
        --preset llama3.1-405b --topology h200:16 --decode --quantize int8 --batch_size 32 --seq_len 8192

    Args:
        topology: the devices: v5e:4x4, v5p:8x8x8, v6e:..., v4:... (TPUs, by the slice's sides), or a100, h100, h200,
            b200, gb200 with their number, as h100:64.
        preset: a released Llama, as in jllama.PRESETS, in place of the configuration's model.
        batch_size: rows in a step, over all devices; 0 takes the configuration's, with a preset one for each share.
        seq_len: tokens of each row; 0 takes the configuration's.
        decode: plan a step of decoding, with seq_len tokens in the cache of each row.
        quantize: int8 weights, for decoding.
        search: try meshes, parts of a batch and what is recomputed; take the fastest that fits.
        tokens: of a whole training run, to say how many days it takes.
        json: print the receipt as JSON.
    """

    model: LlamaConfig = dataclasses.field(default_factory=LlamaConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(data=1, fsdp=-1))
    training: LoopConfig = dataclasses.field(default_factory=lambda: LoopConfig(remat="block"))
    topology: str = ""
    preset: str = ""
    batch_size: int = 0
    seq_len: int = 0
    decode: bool = False
    quantize: str = ""
    search: bool = False
    tokens: float = 15e12
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.topology:
            raise UsageError("topology is missing: give the devices, such as v5e:4x4 or h100:8")
        if self.quantize not in ("", "int8") or (self.quantize and not self.decode):
            raise UsageError("quantize is int8, and for --decode alone")


def main(argv: Sequence[str], prog: str) -> int:
    """Plan, and print the receipt; the exit code is 1 if it does not fit."""
    options = parse(PlanOptions, argv, prog, ("config",), _COMMON)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: the compilers alone are used
    from jllama.plan.receipt import plan_decoding, plan_training

    def plan(mesh: MeshConfig, **loop: object) -> Receipt:
        if options.decode:
            rows, quantize = options.batch_size or 1, "int8" if options.quantize else None
            return plan_decoding(model, options.topology, mesh, rows, seq_len, quantize=quantize)
        training = dataclasses.replace(options.training, seq_len=seq_len, **{"batch_size": batch_size, **loop})
        config = TrainConfig(model=model, mesh=mesh, training=training, optimizer=options.optimizer)
        return plan_training(config, options.topology)

    model = jllama.preset(options.preset) if options.preset else options.model
    seq_len = options.seq_len or options.training.seq_len or model.max_seq_len
    if seq_len > model.max_seq_len:
        model = dataclasses.replace(model, max_seq_len=seq_len)
    console = Console(file=sys.stderr if options.json else sys.stdout, highlight=False, soft_wrap=True)
    shares = _shares(options)
    batch_size = options.batch_size or (shares if options.preset else options.training.batch_size)
    mesh = options.mesh
    receipt = None
    if options.search:
        tried = Table("mesh", "remat", *(Column(name, justify="right") for name in ("GiB", "MFU limit", "tokens/s")))
        best = None
        for mesh_, remat in itertools.product(_meshes(options), ("dots", "block")):
            try:
                each = plan(mesh_, remat=remat)
            except UsageError:
                continue
            sizes = " x ".join(f"{name}={size}" for name, size in each.mesh.items() if size > 1)
            needs = (each.arguments_bytes + each.temporaries_bytes) / 2**30
            speed = (f"{each.mfu_limit:.0%}", f"{each.tokens_per_s:,.0f}") if each.fits else ("does not fit", "")
            tried.add_row(sizes, remat, f"{needs:.1f}", *speed)
            if each.fits and (best is None or each.tokens_per_s > best.tokens_per_s):
                best = each
        console.print(tried)
        receipt = best
    receipt = receipt or plan(mesh)
    if options.json:
        print(json.dumps(receipt.as_dict()))
    else:
        for line in lines(receipt, options):
            console.print(line)
    return 0 if receipt.fits else 1


def _shares(options: PlanOptions) -> int:
    """How many devices have rows of their own."""
    from jllama.plan.devices import topology_devices
    from jllama.sharding import make_mesh

    mesh = make_mesh(options.mesh, topology_devices(options.topology)[1])
    return mesh.shape["data"] * mesh.shape["fsdp"]


def _meshes(options: PlanOptions) -> list[MeshConfig]:
    powers = [1, 2, 4, 8]
    return [MeshConfig(data=data, fsdp=-1, tensor=tensor) for data in (1, 4) for tensor in powers]


def lines(receipt: "Receipt", options: PlanOptions) -> list[str]:
    """The receipt for people."""
    gib = 2**30
    needs, has = receipt.arguments_bytes + receipt.temporaries_bytes, receipt.device_memory_bytes
    verdict = (
        f"fits, {(has - needs) / gib:.1f} GiB to spare"
        if receipt.fits
        else f"does not fit: {(needs - has) / gib:.1f} GiB too much"
    )
    shape = " x ".join(f"{name}={size}" for name, size in receipt.mesh.items() if size > 1) or "one device"
    others = receipt.arguments_bytes - receipt.parameters_bytes - receipt.moments_bytes
    rows = [
        f"{receipt.device}, {receipt.devices} devices, {shape}: {verdict}",
        f"  memory of a device   {needs / gib:.2f} of {has / gib:.2f} GiB",
        f"    parameters         {receipt.parameters_bytes / gib:.2f}",
        f"    moments            {receipt.moments_bytes / gib:.2f}",
        f"    {'cache and tokens  ' if options.decode else 'batch             '} {others / gib:.2f}",
        f"    temporaries        {receipt.temporaries_bytes / gib:.2f} (gradients, activations, gathered weights)",
        f"  attention            {receipt.attention or 'no kernel of its own'}",
    ]
    kinds: dict[str, float] = {}
    for row in receipt.collectives:
        kinds[row.kind] = kinds.get(row.kind, 0.0) + row.times * row.bytes_each
    rows += [f"  {kind:20} {decimal(int(size))} received by each device in a step" for kind, size in kinds.items()]
    times = {"compute": receipt.compute_s, "exchanges": receipt.interconnect_s}
    times |= {"memory": receipt.memory_s} if options.decode else {}
    said = ", ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in times.items())
    rows += [
        f"  a step               at least {said}: {max(times, key=times.__getitem__)} binds",
        f"  at most              {receipt.mfu_limit:.0%} of peak, {receipt.tokens_per_s:,.0f} tokens/s",
    ]
    if not options.decode:
        days = options.tokens / receipt.tokens_per_s / 86_400
        rows.append(f"  {options.tokens:.2g} tokens         {days:,.1f} days at that rate")
    rows += [f"  {size / gib:8.2f} GiB  {shape}  {name}" for size, shape, name in receipt.largest]
    return [*rows, f"compiled in {receipt.compile_s:.0f} s"]
