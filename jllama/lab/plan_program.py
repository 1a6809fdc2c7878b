"""The collectives, memory traffic, kernels and large buffers of a compiled program.

They are read from the program's text, XLA's optimized HLO, which ``jax.stages.Compiled.as_text``
gives for every platform.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+[a-z0-9]*)\[[\d,]*\]")
# An array that a TPU holds closer than its memory: S(1) is a memory space.
_CLOSER = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d\)[^}]*\}")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Operations that start no kernel and move no data.
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
# Operations on a part of their first operand, and the index of the part among operands and result.
_PARTS = {
    "dynamic-slice": -1,
    "gather": -1,
    "dynamic-update-slice": 1,
    "scatter": 2,
}
ATTENTION_KERNELS = {
    "splash": "splash_m",
    "paged": "%paged_attention",
    "cudnn": "__cudnn$fmha",
    "tokamax": "tokamax",
    "triton": "mha_forward",
}
"""The text of the custom call by which a program shows each attention kernel."""


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        name: of the instruction.
        result: the arrays of its result.
        operation: such as ``fusion``.
        others: the text that follows: operands and attributes.
    """

    name: str
    result: str
    operation: str
    others: str


class Collective(NamedTuple):
    """Exchanges of one kind and size between the devices of a group.

    Attributes:
        kind: such as ``all-gather``.
        shape: the arrays of the result.
        devices: in a group.
        near: devices of a group that are in one node.
        times: how often a step does this exchange.
        bytes_each: what a device receives each time, at the least that the kind needs.
    """

    kind: str
    shape: str
    devices: int
    near: int
    times: int
    bytes_each: float


class Program(NamedTuple):
    """A program.

    Attributes:
        computations: lists of instructions by the names of computations.
        entry: the name of the computation that runs first.
        devices: the number of devices.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int


def parse(text: str) -> Program:
    """Read the text of an optimized program."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current = []
    for line in text.splitlines():
        instruction = _INSTRUCTION.match(line)
        header = _HEADER.match(line)
        if instruction:
            current.append(Instruction(*instruction.groups()))
        elif header and not line.startswith("HloModule"):
            current = computations[header[1]] = []
            if line.startswith("ENTRY"):
                entry = header[1]
    devices = re.search(r"num_partitions=(\d+)", text)
    return Program(computations, entry, int(devices[1]) if devices else 1)


def array_bytes(shapes: str) -> float:
    """Compute the bytes of all arrays in a result's text.

    Examples:
        >>> array_bytes("(bf16[8,128]{1,0}, f32[])")
        2052.0
    """
    total = 0.0
    for array in _ARRAY.findall(shapes):
        kind, dims = array.removesuffix("]").split("[")
        bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
        total += math.prod(int(dim) for dim in dims.split(",") if dim) * bits / 8
    return total


def executed(program: Program) -> Iterator[tuple[Instruction, int, str]]:
    """Yield each instruction, how often a run executes it, and the name of its computation.

    A loop counts as often as its condition says, and every branch of a conditional counts. A fusion
    is one instruction; the collectives inside it follow.
    """
    return _walk(program, program.entry, 1)


def _walk(program: Program, name: str, times: int) -> Iterator[tuple[Instruction, int, str]]:
    for instruction in program.computations.get(name, ()):
        yield instruction, times, name
        operation = instruction.operation
        attributes = instruction.others
        called = dict(re.findall(r"(condition|body|to_apply|calls)=%?([\w.-]+)", attributes))
        if operation == "while":
            num_trips = _num_trips(program, attributes, called["condition"])
            yield from _walk(program, called["body"], times * num_trips)
        elif operation == "call":
            yield from _walk(program, called["to_apply"], times)
        elif operation == "conditional":
            names = set(re.findall(r"[\w.-]+", attributes))
            for branch in names & program.computations.keys():
                yield from _walk(program, branch, times)
        elif "calls" in called and not operation.endswith(("-update", "-done")):
            for inner, inner_times, _ in _walk(program, called["calls"], times):
                if _collective_kind(inner.operation):
                    yield inner, inner_times, called["calls"]


def _num_trips(program: Program, attributes: str, condition: str) -> int:
    """Return how often a loop runs: as noted, else the largest constant of its condition."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', attributes)
    if known:
        return int(known[1])
    steps = program.computations[condition]
    text = " ".join(f"{step.operation}({step.others}" for step in steps)
    return max(map(int, re.findall(r"constant\((\d+)\)", text)), default=1)


def _collective_kind(operation: str) -> str | None:
    kind = operation.removesuffix("-start")
    return kind if kind in _COLLECTIVES else None


def collectives(program: Program, node: int) -> list[Collective]:
    """Return all exchanges between devices, equal ones added up, the largest in bytes first.

    ``node`` is the number of devices in a node.
    """
    counts: Counter[tuple[str, str, int, int, float]] = Counter()
    # A TPU may take an exchange in several fusions of one chain, each of which shows it.
    chains: set[str] = set()
    for instruction, times, computation in executed(program):
        kind = _collective_kind(instruction.operation)
        chain = re.search(r'chain_id="\d+"', instruction.others)
        if not kind or (chain and chain[0] in chains):
            continue
        if chain:
            chains.add(chain[0])
        arrays = _ARRAY.findall(instruction.result)
        if instruction.operation.endswith("-start") and kind != "all-reduce":
            # The result is (operands, results, scalars).
            arrays = [array for array in arrays if "[]" not in array]
            arrays = arrays[len(arrays) // 2 :]
        result = ", ".join(arrays)
        size = array_bytes(result)
        group = _first_group(instruction.others) or range(program.devices)
        devices = len(group)
        near = sum(device // node == group[0] // node for device in group)
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            # The form of a reduce-scatter on TPUs.
            kind = "reduce-scatter"
            size /= devices
        factors = {
            "all-reduce": 2 * (devices - 1) / devices,
            "reduce-scatter": devices - 1,
            "collective-permute": 1,
        }
        received = size * factors.get(kind, (devices - 1) / devices)
        counts[kind, result, devices, near, received] += times
    rows = [Collective(*key[:4], times, key[4]) for key, times in counts.items()]
    return sorted(rows, key=lambda row: -row.times * row.bytes_each)


def _first_group(attributes: str) -> list[int]:
    """Return the devices of a collective's first group; none if it has one group of all devices."""
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        dims = [int(dim) for dim in iota[2].split(",")]
        devices = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            devices = devices.transpose([int(axis) for axis in iota[3].split(",")])
        return devices.ravel()[: int(iota[1])].tolist()
    groups = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes)
    return [int(device) for device in groups[1].split(",")] if groups else []


def traffic_bytes(program: Program) -> float:
    """Compute the bytes that a run reads and writes in memory.

    These are each instruction's operands and results, of slices only the slice. Arrays that a TPU
    holds closer than its memory are left out. Caches, and what a fusion reads twice, are not known.
    """
    total = 0.0
    sizes = {
        name: {step.name: array_bytes(_CLOSER.sub("", step.result)) for step in instructions}
        for name, instructions in program.computations.items()
    }
    for instruction, times, computation in executed(program):
        if not _does_work(instruction.operation):
            continue
        if instruction.operation.endswith("-start"):
            # The result of a copy begins with both of its ends.
            total += times * sum(map(array_bytes, _ARRAY.findall(instruction.result)[1:2]))
            continue
        operands = re.findall(r"%([\w.-]+)", instruction.others.split("), ")[0])
        moved = [sizes[computation].get(name, 0.0) for name in operands]
        moved.append(sizes[computation][instruction.name])
        called = re.search(r"calls=%?([\w.-]+)", instruction.others)
        inside = sizes[computation]
        steps = [instruction]
        if called:
            inside = sizes[called[1]]
            steps = program.computations[called[1]]
        for step in steps:
            if step.operation in _PARTS:
                names = [*re.findall(r"%([\w.-]+)", step.others), step.name]
                whole = inside.get(names[0], 0.0)
                part = inside.get(names[_PARTS[step.operation]], 0.0)
                moved = [part if size == whole else size for size in moved]
        total += times * sum(moved)
    return total


def launches(program: Program) -> int:
    """Count the kernels and copies that a run starts."""
    return sum(times for step, times, _ in executed(program) if _does_work(step.operation))


def _does_work(operation: str) -> bool:
    """Whether an operation starts a kernel or a copy."""
    is_exchange = _collective_kind(operation) is not None
    return not (operation in _FREE or is_exchange or operation.endswith("-done"))


def kernels(text: str) -> list[str]:
    """Return the attention kernels in a program, by the names of ``functional.ATTENTION``."""
    return [name for name, mark in ATTENTION_KERNELS.items() if mark in text]


def largest_buffers(program: Program) -> list[tuple[float, str, str]]:
    """Return ``(bytes, shape, name)`` of the ten largest arguments and results."""
    rows: dict[str, tuple[float, str, str]] = {}
    for instruction, _, computation in executed(program):
        is_argument = instruction.operation == "parameter" and computation == program.entry
        if not is_argument and instruction.operation in _FREE:
            continue
        match = re.search(r'op_name="([^"]*)"', instruction.others)
        name = match[1] if match else ""
        name = re.sub(r"jit\(\w+\)/|shard_map/|while/body/|closed_call/|\\", "", name)
        for shape in _ARRAY.findall(_CLOSER.sub("", instruction.result)):
            key = name if is_argument else shape
            # A name with a slash says what makes the buffer, better than where it begins as zeros.
            if key not in rows or "/" not in rows[key][2]:
                rows[key] = array_bytes(shape), shape, name or instruction.name
    return sorted(rows.values(), reverse=True)[:10]
