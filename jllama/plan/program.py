"""What a compiled program does, read from its text: collectives, memory traffic, kernels and large buffers.

The text is XLA's optimized HLO, as ``jax.stages.Compiled.as_text`` gives it for every platform.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+[a-z0-9]*)\[[\d,]*\]")
_CLOSER = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d\)[^}]*\}")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
}
_PARTS = {
    "dynamic-slice": -1,
    "gather": -1,
    "dynamic-update-slice": 1,
    "scatter": 2,
}  # where they name the part
ATTENTION_KERNELS = {
    "splash": "splash_m",
    "paged": "%paged_attention",
    "cudnn": "__cudnn$fmha",
    "tokamax": "tokamax",
    "triton": "mha_forward",
}
"""The custom call by which a program shows each attention implementation that is a kernel of its own."""


class Instruction(NamedTuple):
    """One line: its name, the arrays of its result, its operation, and the text behind (operands and attributes)."""

    name: str
    result: str
    operation: str
    others: str


class Collective(NamedTuple):
    """Exchanges of one kind and size between the devices of a group, as often as a step does them."""

    kind: str
    shape: str
    devices: int
    near: int  # devices of a group that are in one node
    times: int
    bytes_each: float  # that a device receives, at the least that the kind needs


class Program(NamedTuple):
    """A program's computations by name, each a list of instructions, and the name of the one that runs first."""

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int


def parse(text: str) -> Program:
    """Read the text of an optimized program."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            current.append(Instruction(*match.groups()))
        elif (match := _HEADER.match(line)) and not line.startswith("HloModule"):
            current = computations[match[1]] = []
            entry = match[1] if line.startswith("ENTRY") else entry
    devices = re.search(r"num_partitions=(\d+)", text)
    return Program(computations, entry, int(devices[1]) if devices else 1)


def array_bytes(shapes: str) -> float:
    """The bytes of all arrays in a result's text, such as ``(bf16[8,128]{1,0}, f32[])``."""
    total = 0.0
    for array in _ARRAY.findall(shapes):
        kind, dims = array.removesuffix("]").split("[")
        bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
        total += math.prod(int(dim) for dim in dims.split(",") if dim) * bits / 8
    return total


def executed(program: Program) -> Iterator[tuple[Instruction, int, str]]:
    """Each instruction with how often a run executes it, and its computation.

    Loops count as their conditions say, and every branch of a condition; of fusions, the collectives inside them.
    """

    def walk(name: str, times: int) -> Iterator[tuple[Instruction, int, str]]:
        for instruction in program.computations.get(name, ()):
            yield instruction, times, name
            called = dict(
                re.findall(r"(condition|body|to_apply|calls)=%?([\w.-]+)", instruction.others)
            )
            if instruction.operation == "while":
                yield from walk(
                    called["body"], times * _trips(program, instruction.others, called["condition"])
                )
            elif instruction.operation == "call":
                yield from walk(called["to_apply"], times)
            elif instruction.operation == "conditional":
                for branch in {*re.findall(r"[\w.-]+", instruction.others)} & {
                    *program.computations
                }:
                    yield from walk(branch, times)
            elif "calls" in called and not instruction.operation.endswith(("-update", "-done")):
                inner = walk(called["calls"], times)
                yield from (
                    (each, n, called["calls"]) for each, n, _ in inner if _kind(each.operation)
                )

    return walk(program.entry, 1)


def _trips(program: Program, attributes: str, condition: str) -> int:
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', attributes):
        return int(known[1])
    text = " ".join(each.operation + "(" + each.others for each in program.computations[condition])
    return max((int(number) for number in re.findall(r"constant\((\d+)\)", text)), default=1)


def _kind(operation: str) -> str | None:
    kind = operation.removesuffix("-start")
    return kind if kind in _COLLECTIVES else None


def collectives(program: Program, node: int) -> list[Collective]:
    """All exchanges between devices in nodes of so many, equal ones added up, the largest in bytes first."""
    counts: Counter[tuple[str, str, int, int, float]] = Counter()
    chains: set[str] = (
        set()
    )  # an exchange that a TPU takes in several fusions, each of which shows it
    for instruction, times, computation in executed(program):
        chain = re.search(r'chain_id="\d+"', instruction.others)
        if not (kind := _kind(instruction.operation)) or (chain and chain[0] in chains):
            continue
        chains |= {chain[0]} if chain else set()
        arrays = _ARRAY.findall(instruction.result)
        if (
            instruction.operation.endswith("-start") and kind != "all-reduce"
        ):  # (operands, results, scalars)
            arrays = [array for array in arrays if "[]" not in array]
            arrays = arrays[len(arrays) // 2 :]
        result = ", ".join(arrays)
        group = _first_group(instruction.others) or range(program.devices)
        devices, near, size = (
            len(group),
            sum(each // node == group[0] // node for each in group),
            array_bytes(result),
        )
        if (
            kind == "all-reduce" and "all-reduce-scatter" in computation
        ):  # the form that reduce-scatter has on TPUs
            kind, size = "reduce-scatter", size / devices
        factor = {
            "all-reduce": 2 * (devices - 1) / devices,
            "reduce-scatter": devices - 1,
            "collective-permute": 1,
        }
        counts[kind, result, devices, near, size * factor.get(kind, (devices - 1) / devices)] += (
            times
        )
    rows = [Collective(*key[:4], times, key[4]) for key, times in counts.items()]
    return sorted(rows, key=lambda row: -row.times * row.bytes_each)


def _first_group(attributes: str) -> list[int]:
    if iota := re.search(
        r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        dims = [int(each) for each in iota[2].split(",")]
        order = [int(each) for each in iota[3].split(",")] if iota[3] else range(len(dims))
        return (
            np.arange(math.prod(dims))
            .reshape(dims)
            .transpose(order)
            .ravel()[: int(iota[1])]
            .tolist()
        )
    groups = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes)
    return [int(each) for each in groups[1].split(",")] if groups else []


def traffic_bytes(program: Program) -> float:
    """The bytes that a run reads and writes in memory: each instruction's operands and results, of slices only those.

    Arrays that a TPU holds closer than its memory are left out; caches, and what a fusion reads twice, are not known.
    """
    total = 0.0
    sizes = {
        name: {each.name: array_bytes(_CLOSER.sub("", each.result)) for each in body}
        for name, body in program.computations.items()
    }
    for instruction, times, computation in executed(program):
        if not _works(instruction.operation):
            continue
        if instruction.operation.endswith(
            "-start"
        ):  # of a copy: the result begins with both of its ends
            total += times * sum(map(array_bytes, _ARRAY.findall(instruction.result)[1:2]))
            continue
        operands = re.findall(r"%([\w.-]+)", instruction.others.split("), ")[0])
        moved = [sizes[computation].get(name, 0.0) for name in operands] + [
            sizes[computation][instruction.name]
        ]
        called = re.search(r"calls=%?([\w.-]+)", instruction.others)
        inner = called[1] if called else computation
        for each in program.computations[inner] if called else [instruction]:
            if each.operation in _PARTS:  # it does not touch the whole
                names = [*re.findall(r"%([\w.-]+)", each.others), each.name]
                whole, part = (
                    sizes[inner].get(names[index], 0.0) for index in (0, _PARTS[each.operation])
                )
                moved = [part if size == whole else size for size in moved]
        total += times * sum(moved)
    return total


def launches(program: Program) -> int:
    """How many kernels and copies a run starts."""
    return sum(
        times for instruction, times, _ in executed(program) if _works(instruction.operation)
    )


def _works(operation: str) -> bool:
    return not (operation in _FREE or _kind(operation) or operation.endswith("-done"))


def kernels(text: str) -> list[str]:
    """The attention kernels in a program, by the names of ``functional.ATTENTION``."""
    return [name for name, mark in ATTENTION_KERNELS.items() if mark in text]


def largest_buffers(program: Program) -> list[tuple[float, str, str]]:
    """``(bytes, shape, name)`` of the ten largest arguments and results: what fills the memory."""
    rows: dict[str, tuple[float, str, str]] = {}
    for instruction, _, computation in executed(program):
        argument = instruction.operation == "parameter" and computation == program.entry
        if argument or instruction.operation not in _FREE:
            named = re.search(r'op_name="([^"]*)"', instruction.others)
            name = re.sub(
                r"jit\(\w+\)/|shard_map/|while/body/|closed_call/|\\", "", named[1] if named else ""
            )
            for shape in _ARRAY.findall(_CLOSER.sub("", instruction.result)):
                key = name if argument else shape
                if (
                    "/" not in rows.get(key, ("", "", ""))[2]
                ):  # what makes it, better than where it begins as zeros
                    rows[key] = array_bytes(shape), shape, name or instruction.name
    return sorted(rows.values(), reverse=True)[:10]
