"""``jllama plan``."""

import dataclasses
import json
import math
import os
from collections import Counter
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.filesize import decimal

import jllama
from jllama.commands.cli import parse
from jllama.config import MeshConfig
from jllama.errors import UsageError, check_fields
from jllama.training.config import LoopConfig, TrainConfig

if TYPE_CHECKING:
    from jllama.plan.receipt import Receipt

_GIB = 2**30
_COMMON = (
    "topology",
    "preset",
    "batch_size",
    "seq_len",
    "mesh.fsdp",
    "mesh.tensor",
    "decode",
    "search",
    "json",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainConfig):
    """Compile a training or decoding step for TPUs or GPUs that are not there, and say what it will need and reach.

    Examples:
        --preset llama3.2-1b --topology v5e:4x4 --seq_len 4096
        configs/llama3.1-8b.yaml --topology h100:8 --search
        --preset llama3.1-405b --topology h200:16 --decode --quantize int8 --batch_size 32 --seq_len 8192

    Args:
        topology: the devices: v5e:4x4, v5p:8x8x8, v6e:..., v4:... (TPUs, by the slice's sides or, as v5e:16, by the
            number of chips), or a100, h100, h200, b200, gb200 with their number, as h100:64.
        preset: a released Llama, as in jllama.PRESETS, in place of the configuration's model.
        batch_size: rows in a step, over all devices; 0 takes the configuration's, with a preset one for each share.
        seq_len: tokens of each row; 0 takes the configuration's.
        decode: plan a step of decoding, with seq_len tokens in the cache of each row.
        quantize: int8 weights, for decoding: on a GPU or TPU they save memory and no time.
        search: try meshes, parts of a batch and what is recomputed; take the fastest that fits.
        tokens: of a whole training run, to say how many days it takes.
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
        check_fields(
            self,
            "",
            "batch_size seq_len",
            lambda size: 0 <= size < 2**31,
            "positive, or 0 for the usual",
        )
        check_fields(self, "", "tokens", lambda count: 0 < count < math.inf, "positive")
        if self.quantize and not self.decode:
            raise UsageError("quantize is int8, and for --decode alone")
        if self.search and self.decode:
            raise UsageError("search is for training alone: leave out --search or --decode")


def main(argv: list[str], prog: str) -> int:
    """Plan, and print the receipt; the exit code is 1 if it does not fit."""
    options = parse(PlanOptions, argv, prog, ("config",), _COMMON)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: the compilers alone are used
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "3"
    )  # of what they say, the receipt holds what counts
    from jllama.plan.devices import topology_devices, usual_topology
    from jllama.plan.receipt import describe, plan_decoding, plan_training
    from jllama.plan.search import search
    from jllama.sharding import make_mesh

    options = dataclasses.replace(options, topology=usual_topology(options.topology))
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    model = jllama.preset(options.preset) if options.preset else options.model
    seq_len = options.seq_len or options.training.seq_len or model.max_seq_len
    model = dataclasses.replace(model, max_seq_len=max(seq_len, model.max_seq_len))
    mesh = make_mesh(options.mesh, topology_devices(options.topology)[1]).shape
    batch_size = options.batch_size or (
        mesh["data"] * mesh["fsdp"] if options.preset else options.training.batch_size
    )
    loop = dataclasses.replace(options.training, seq_len=seq_len, batch_size=batch_size)
    config = dataclasses.replace(options, model=model, training=loop)
    if options.decode:
        receipt = plan_decoding(
            model, options.topology, options.mesh, batch_size, seq_len, options.quantize
        )
    elif options.search:
        tried = search(
            config, options.topology, bool(options.batch_size or not options.preset), progress.print
        )
        for _, each in tried:
            speed = (
                f"MFU {each.mfu_limit:6.1%}, {each.tokens_per_s:,.0f} tokens/s"
                if each.fits
                else "does not fit"
            )
            console.print(
                f"{each.needed_bytes / _GIB:8.2f} GiB  {speed:33}  {describe(each.mesh, each.settings)}"
            )
        receipt = tried[0][1]
    else:
        receipt = plan_training(config, options.topology)
    if options.json:
        print(json.dumps(receipt.as_dict()))
    else:
        title = f"{receipt.device}, {describe(receipt.mesh, receipt.settings)}"
        console.print("\n".join(lines(receipt, title, options.decode, options.tokens)))
    return 0 if receipt.fits else 1


def lines(receipt: "Receipt", title: str, decode: bool, tokens: float) -> list[str]:
    """The receipt for people."""
    needs, has = receipt.most_bytes, receipt.device_memory_bytes
    state, temporaries = receipt.parameters_bytes + receipt.moments_bytes, receipt.temporaries_bytes
    too_much = f"does not fit: {(needs - has) / _GIB:.2f} GiB too much"
    verdict = f"fits, {(has - needs) / _GIB:.2f} GiB to spare" if receipt.fits else too_much
    rows = {"memory of a device": f"{receipt.needed_bytes / _GIB:8.2f} of {has / _GIB:.2f} GiB"}
    parts = {
        "parameters": receipt.parameters_bytes,
        "moments": receipt.moments_bytes,
        "cache and tokens" if decode else "batch": receipt.arguments_bytes - state,
        "gradients": receipt.gradients_bytes,
        "activations and what the compiler needs": temporaries - receipt.gradients_bytes,
    }
    rows |= {f"  {name}": f"{size / _GIB:8.2f}" for name, size in parts.items() if size}
    if receipt.starting_bytes:
        rows["while weights are read and quantized"] = f"{receipt.starting_bytes / _GIB:8.2f}"
    if receipt.fits:
        received: Counter[str] = Counter()
        for row in receipt.collectives:
            received[row.kind] += int(row.times * row.bytes_each)
        said = ", ".join(
            f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in receipt.times_s.items()
        )
        least_s = receipt.least_bytes / receipt.traffic_bytes * receipt.memory_s
        bandwidth = least_s / max(receipt.times_s.values())
        share = (
            f"{bandwidth:.1%} of the memory's rate" if decode else f"{receipt.mfu_limit:.1%} MFU"
        )
        rows["attention kernel"] = receipt.attention or "none"
        rows["FLOPs of a device in a step"] = (
            f"{receipt.flops:.3g}, computed {receipt.recomputed:.2f} times"
        )
        rows["read and written in its memory"] = decimal(int(receipt.traffic_bytes))
        if decode:
            rows["weights and keys alone"] = (
                f"{decimal(receipt.least_bytes)}, {1e3 * least_s:,.2f} ms"
            )
            rows["launches in a step"] = f"{receipt.launches:,}"
        rows |= {f"received in {kind}": decimal(size) for kind, size in received.items()}
        rows["a step at the published rates"] = f"{said}: {receipt.binds} binds"
        rows["at most"] = f"{share}, {receipt.tokens_per_s:,.0f} tokens/s"
        if receipt.expected_s and not decode:
            speed = f"{receipt.expected_mfu:.1%} MFU, {receipt.tokens / receipt.expected_s:,.0f} tokens/s"
            rows["expected, by rates measured on an H100"] = speed
        if not decode:
            rows[f"{tokens:.3g} tokens".replace("e+", "e")] = (
                f"{tokens / receipt.tokens_per_s / 86_400:,.1f} days"
            )
    return [
        f"{title}: {verdict}",
        *(f"  {name:41}{said}" for name, said in rows.items()),
        *(f"  {size / _GIB:8.2f} GiB  {shape}  {name}" for size, shape, name in receipt.largest),
        *(f"  to make it fit: {tip}" for tip in receipt.advice),
        f"compiled in {receipt.compile_s:.0f} s",
    ]
