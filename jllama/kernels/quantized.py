"""Products with quantized matrices on CPUs, from the bytes as they are stored.

Numba compiles them for the processor at hand, and XLA calls them (``jax.ffi``). Each row of x is
rounded to integers of 16 bits in groups of 256 numbers, ``x = unit * q`` with
``unit = max(abs(x)) / 32767``. A block of 32 weights is ``scale * v - minimum``, so a product is

    y = sum over groups of  unit * (sum over blocks of  scale * sum(q * v))
        - sum over blocks of  minimum * unit * sum(q)

Sums within a block are of integers, and exact. All others are in float32, one block or group after
the other. The first line is computed in eight lanes, of which lane i has the products 2 i,
2 i + 1, 2 i + 16 and 2 i + 17 of each block; they are added in pairs at the end. The order depends
neither on other rows nor on the number of threads: a row has the same bits in any company. Source
of the formats: ggml's ``ggml-common.h`` and ``ggml-quants.c``.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jaxtyping import Array, Float, Int8, Int16, UInt8
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

BLOCK = 32
"""Weights with one scale."""
_GROUP = 8  # blocks of a row of x with one unit
_TILE = 4  # rows of x that a block of weights is multiplied by at once
_PANEL = 16  # outputs that are multiplied by all rows of x before the next ones
_AHEAD = 2048  # bytes from weights that are used to those that are asked for

# 1) The program that is built: LLVM's types, and instructions that take several of LLVM's.
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16 = ir.HalfType()
_F32 = ir.FloatType()
_LANES = 8
_intrinsic: Any = extending.intrinsic  # a function that builds a part of the program
Value = Any  # a number, a vector or an address in that program


def _vector(type_: Any, numbers: Sequence[float]) -> Value:
    return ir.Constant(ir.VectorType(type_, len(numbers)), list(numbers))


def _at(build: Any, type_: Any, address: Value, offset: int, count: int) -> Value:
    """Make a pointer to a number, or to a vector of ``count`` numbers."""
    kind = ir.VectorType(type_, count) if count else type_
    return build.inttoptr(build.add(address, _I64(offset)), kind.as_pointer())


def _load(build: Any, type_: Any, address: Value, offset: int = 0, count: int = 0) -> Value:
    return build.load(_at(build, type_, address, offset, count), align=1)


def _store(build: Any, value: Value, address: Value, offset: int = 0) -> None:
    build.store(value, _at(build, value.type, address, offset, 0), align=1)


def _element(build: Any, address: Value, index: Value, size: int) -> Value:
    """Compute the address of an element of an array."""
    return build.add(address, build.mul(index, _I64(size)))


def _pick(build: Any, vector: Value, elements: Sequence[int]) -> Value:
    return build.shuffle_vector(vector, vector, _vector(_I32, elements))


def _splat(build: Any, number: Value) -> Value:
    vector = ir.Constant(ir.VectorType(number.type, _LANES), ir.Undefined)
    return _pick(build, build.insert_element(vector, number, _I32(0)), [0] * _LANES)


def _call(build: Any, name: str, result: Any, *arguments: Value) -> Value:
    """Call a function of LLVM itself."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(build.module, signature, f"llvm.{name}")
    return build.call(function, arguments)


def _wide(build: Any, extend: Callable[..., Value], values: Value, type_: Any = _I16) -> Value:
    return extend(values, ir.VectorType(type_, values.type.count))


def _bits(build: Any, values: Value, first: int, count: int) -> Value:
    """Cut some bits out of integers of 16 bits."""
    shifted = build.lshr(values, _vector(_I16, [first] * values.type.count))
    return build.and_(shifted, _vector(_I16, [2**count - 1] * values.type.count))


def _less(build: Any, values: Value, number: int) -> Value:
    return build.sub(values, _vector(_I16, [number] * BLOCK))


# 2) The formats.


class _Block(NamedTuple):
    values: Value  # 32 integers of 16 bits
    scale: Value  # eight equal floats
    minimum: Value = None  # float; None: the format has none


class _Format(NamedTuple):
    num_blocks: int  # that are stored together
    num_bytes: int  # of these
    unpack: Callable[[Any, Value, int], _Block]  # of a builder, their address, and which of them
    has_minimum: bool = False


def _bytes(build: Any, address: Value, offset: int, count: int) -> Value:
    """Load bytes without signs as integers of 16 bits."""
    return _wide(build, build.zext, _load(build, _I8, address, offset, count))


def _scale(build: Any, address: Value) -> Value:
    """Load a block's scale.

    It is loaded with the numbers after it. By itself it would be inserted into a register of LLVM's
    choice, and wait for what that holds.
    """
    halves = _load(build, _F16, address, 0, 4)
    return _pick(build, build.fpext(halves, ir.VectorType(_F32, 4)), [0] * _LANES)


def _int8(build: Any, address: Value, index: int) -> _Block:
    values = _load(build, _I8, address, 0, BLOCK)
    return _Block(_wide(build, build.sext, values), _vector(_F32, [1.0] * _LANES))


def _q8_0(build: Any, address: Value, index: int) -> _Block:
    values = _load(build, _I8, address, 2, BLOCK)
    return _Block(_wide(build, build.sext, values), _scale(build, address))


def _q4_0(build: Any, address: Value, index: int) -> _Block:
    packed = _bytes(build, address, 2, 16)
    halves = (_bits(build, packed, first, 4) for first in (0, 4))
    values = build.shuffle_vector(*halves, _vector(_I32, range(BLOCK)))
    return _Block(_less(build, values, 8), _scale(build, address))


def _q4_k(build: Any, address: Value, index: int) -> _Block:
    # Two halves, 12 bytes of scales and minima in six bits, and nibbles of two blocks together.
    packed = _bytes(build, address, 16 + 32 * (index // 2), BLOCK)
    factors = []
    for place in (0, 1):  # the scale, the minimum
        factor = _bytes(build, address, 4 + index % 4 + 4 * place, 1)
        if index < 4:
            factor = _bits(build, factor, 0, 6)
        else:
            low = _bits(build, _bytes(build, address, 8 + index, 1), 4 * place, 4)
            factor = build.or_(low, build.shl(_bits(build, factor, 6, 2), _vector(_I16, [4])))
        half = build.fpext(_load(build, _F16, address, 2 * place), _F32)
        integer = build.extract_element(factor, _I32(0))
        factors.append(build.fmul(half, build.uitofp(integer, _F32)))
    scale, minimum = factors
    return _Block(_bits(build, packed, 4 * (index % 2), 4), _splat(build, scale), minimum)


def _q6_k(build: Any, address: Value, index: int) -> _Block:
    # 128 bytes of low nibbles, 64 of two high bits each, 16 scales, and a half that scales these.
    part, place = divmod(index, 4)
    low = _bytes(build, address, 64 * part + 32 * (place % 2), BLOCK)
    high = _bits(build, _bytes(build, address, 128 + 32 * part, BLOCK), 2 * place, 2)
    high = build.shl(high, _vector(_I16, [4] * BLOCK))
    values = _less(build, build.or_(_bits(build, low, 4 * (place // 2), 4), high), 32)
    scales = _wide(build, build.sext, _load(build, _I8, address, 192 + 2 * index, 2))
    values = build.mul(values, _pick(build, scales, [0] * 16 + [1] * 16))
    half = build.fpext(_load(build, _F16, address, 208), _F32)
    return _Block(values, _splat(build, half))


FORMATS = {
    "int8": _Format(1, 32, _int8),
    "Q8_0": _Format(1, 34, _q8_0),
    "Q4_0": _Format(1, 18, _q4_0),
    "Q4_K": _Format(8, 144, _q4_k, True),
    "Q6_K": _Format(8, 210, _q6_k),
}
"""The formats by name, GGML's types among them."""
_ORDER = list(FORMATS.values())

# 3) The inner loops. Addresses are integers; ``kind`` and ``rows`` are constants.


def _fetch(build: Any, address: Value, num_bytes: int) -> None:
    """Ask for the bytes that are used after the next 2,048."""
    for offset in range(_AHEAD, _AHEAD + num_bytes, 64):
        pointer = _at(build, _I8, address, offset, 0)
        options = _I32(0), _I32(3), _I32(1)  # to read, into all caches, as data
        _call(build, "prefetch.p0i8", ir.VoidType(), pointer, *options)


def _products(build: Any, values: Value, x: Value) -> Value:
    """Multiply 32 pairs of integers, and add four each: eight floats, which are exact."""
    products = build.mul(*(_wide(build, build.sext, part, _I32) for part in (values, x)))
    pairs = build.add(*(_pick(build, products, range(i, BLOCK, 2)) for i in (0, 1)))
    added = build.add(*(_pick(build, pairs, range(i, i + _LANES)) for i in (0, _LANES)))
    return build.sitofp(added, ir.VectorType(_F32, _LANES))


@_intrinsic
def _dot(
    context: Any,
    kind: Any,
    rows: Any,
    weights: Any,
    count: Any,
    q: Any,
    units: Any,
    sums: Any,
    out: Any,
    stride: Any,
) -> Any:
    """Multiply the ``count`` blocks of one output by some rows of x; write to ``out`` floats."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    format_ = _ORDER[kind.literal_value]
    num_rows = rows.literal_value
    lanes = ir.VectorType(_F32, _LANES)

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> None:
        weights, count, q, units, sums, out, stride = arguments[2:]
        zeros = _vector(_F32, [0.0] * _LANES)
        totals = [cgutils.alloca_once_value(build, zeros) for _ in range(num_rows)]
        parts = [cgutils.alloca_once_value(build, zeros) for _ in range(num_rows)]
        minima = [cgutils.alloca_once_value(build, _F32(0.0)) for _ in range(num_rows)]
        per_group = _I64(_GROUP // format_.num_blocks)
        stored = build.sdiv(count, _I64(format_.num_blocks))
        groups = build.sdiv(build.add(count, _I64(_GROUP - 1)), _I64(_GROUP))
        row_blocks = build.mul(groups, _I64(_GROUP))
        with cgutils.for_range(build, groups) as group:
            first = build.mul(group.index, per_group)
            rest = build.sub(stored, first)
            is_last = build.icmp_signed("<", rest, per_group)
            with cgutils.for_range(build, build.select(is_last, rest, per_group)) as loop:
                index = build.add(first, loop.index)
                address = _element(build, weights, index, format_.num_bytes)
                _fetch(build, address, format_.num_bytes)
                for within in range(format_.num_blocks):
                    block = format_.unpack(build, address, within)
                    number = build.mul(index, _I64(format_.num_blocks))
                    for row in range(num_rows):
                        place = build.add(number, build.mul(row_blocks, _I64(row)))
                        x_address = _element(build, q, place, 2 * BLOCK)
                        x = _load(build, _I16, x_address, 2 * BLOCK * within, BLOCK)
                        numbers = _products(build, block.values, x), block.scale
                        part = _call(build, "fma.v8f32", lanes, *numbers, build.load(parts[row]))
                        build.store(part, parts[row])
                        if format_.has_minimum:
                            sum_address = _element(build, sums, place, 4)
                            numbers = block.minimum, _load(build, _F32, sum_address, 4 * within)
                            less = _call(build, "fma.f32", _F32, *numbers, build.load(minima[row]))
                            build.store(less, minima[row])
            for row in range(num_rows):
                place = build.add(group.index, build.mul(groups, _I64(row)))
                unit = _splat(build, _load(build, _F32, _element(build, units, place, 4)))
                numbers = build.load(parts[row]), unit, build.load(totals[row])
                build.store(_call(build, "fma.v8f32", lanes, *numbers), totals[row])
                build.store(zeros, parts[row])
        for row in range(num_rows):
            total = build.load(totals[row])
            for size in (4, 2, 1):
                halves = (_pick(build, total, range(i, i + size)) for i in (0, size))
                total = build.fadd(*halves)
            total = build.extract_element(total, _I32(0))
            total = build.fsub(total, build.load(minima[row]))
            _store(build, total, _element(build, out, build.mul(stride, _I64(row)), 4))

    return types.void(kind, rows, *[types.int64] * 7), generate


@_intrinsic
def _unpack(context: Any, kind: Any, weights: Any, count: Any, out: Any) -> Any:
    """Write the weights of ``count`` blocks as floats."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    format_ = _ORDER[kind.literal_value]

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> None:
        weights, count, out = arguments[1:]
        with cgutils.for_range(build, build.sdiv(count, _I64(format_.num_blocks))) as loop:
            address = _element(build, weights, loop.index, format_.num_bytes)
            target = _element(build, out, loop.index, 4 * BLOCK * format_.num_blocks)
            for index in range(format_.num_blocks):
                block = format_.unpack(build, address, index)
                for first in range(0, BLOCK, _LANES):
                    values = _pick(build, block.values, range(first, first + _LANES))
                    floats = build.sitofp(values, ir.VectorType(_F32, _LANES))
                    floats = build.fmul(floats, block.scale)
                    if format_.has_minimum:
                        floats = build.fsub(floats, _splat(build, block.minimum))
                    _store(build, floats, target, 4 * (BLOCK * index + first))

    return types.void(kind, *[types.int64] * 3), generate


@_intrinsic
def _read(context: Any, address: Any) -> Any:
    """Read an integer of 64 bits."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Value:
        return _load(build, _I64, arguments[0])

    return types.int64(types.int64), generate


@_intrinsic
def _write(context: Any, address: Any, number: Any) -> Any:
    """Write a number."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> None:
        _store(build, arguments[1], arguments[0])

    return types.void(types.int64, number), generate


# 4) What XLA calls. The layouts are those of XLA_FFI_CallFrame and XLA_FFI_Buffer in its c_api.h.


@numba.njit(cache=True)
def _answers_version(frame: int) -> bool:
    """Answer if XLA asks which version of its interface this is; return whether it does."""
    extension = _read(frame + 8)
    if extension == 0:
        return False
    version = _read(extension + 24) + 8
    _write(version + 16, np.int32(0))
    _write(version + 20, np.int32(3))
    return True


@numba.njit(cache=True)
def _array(buffers: int, index: int) -> tuple[int, int, int]:
    """Return the address of an array's numbers, and its sizes along two axes."""
    buffer = _read(buffers + 8 * index)
    sizes = _read(buffer + 40)
    return _read(buffer + 24), _read(sizes), _read(sizes + 8)


def _handlers(kind: int) -> tuple[Any, Any]:
    """Return the handlers of ``product`` and of ``unpack`` for a format."""
    num_blocks, num_bytes, _, _ = _ORDER[kind]

    @numba.cfunc(types.int64(types.int64), cache=True)
    def on_product(frame: int) -> int:
        if _answers_version(frame):
            return 0
        operands = _read(frame + 72)
        q, rows, _ = _array(operands, 0)
        units, _, groups = _array(operands, 1)
        sums, _, _ = _array(operands, 2)
        weights, _, row_bytes = _array(operands, 3)
        first = _read(_array(operands, 4)[0]) << 32 >> 32  # of 32 bits
        out, _, outputs = _array(_read(frame + 112), 0)
        count = row_bytes // num_bytes * num_blocks
        for begin in range(0, outputs, _PANEL):
            end = min(begin + _PANEL, outputs)
            row = 0
            while row < rows:
                xq = q + 2 * BLOCK * _GROUP * row * groups
                xu = units + 4 * row * groups
                xs = sums + 4 * _GROUP * row * groups
                is_tile = rows - row >= _TILE
                for output in range(begin, end):
                    w = weights + (first + output) * row_bytes
                    y = out + 4 * (row * outputs + output)
                    if is_tile:
                        _dot(kind, _TILE, w, count, xq, xu, xs, y, outputs)
                    else:
                        _dot(kind, 1, w, count, xq, xu, xs, y, outputs)
                row += _TILE if is_tile else 1
        return 0

    @numba.cfunc(types.int64(types.int64), cache=True)
    def on_unpack(frame: int) -> int:
        if not _answers_version(frame):
            weights, rows, row_bytes = _array(_read(frame + 72), 0)
            count = rows * row_bytes // num_bytes * num_blocks
            _unpack(kind, weights, count, _array(_read(frame + 112), 0)[0])
        return 0

    return on_product, on_unpack


@functools.cache
def register(kind: str) -> tuple[Any, Any]:
    """Make the kernels of a format known to XLA; what is returned keeps them alive.

    A program that was stored by another process is loaded after this.
    """
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    handlers = _handlers(list(FORMATS).index(kind))
    for name, handler in zip(("product", "unpack"), handlers, strict=True):
        target = capsule(handler.address, None, None)
        jax.ffi.register_ffi_target(f"jllama_{name}_{kind}", target, platform="cpu")
    return handlers


def product(
    kind: str,
    x: Float[Array, "rows inputs"],
    weights: UInt8[Array, "outputs bytes"] | Int8[Array, "outputs inputs"],
) -> Float[Array, "rows outputs"]:
    """Compute ``x @ weights.T`` in float32, for weights of a format of ``FORMATS``.

    Each core computes some of the outputs.
    """
    register(kind)
    rounded = round_rows(x)
    results = []
    for first, last in itertools.pairwise(_edges(len(weights))):
        shape = jax.ShapeDtypeStruct((len(x), last - first), jnp.float32)
        call = jax.ffi.ffi_call(f"jllama_product_{kind}", shape)
        results.append(call(*rounded, weights, np.int32(first)))
    return jnp.concatenate(results, axis=1)


def _edges(size: int) -> list[int]:
    """Divide a matrix's outputs into parts: the first of each, and the end.

    XLA (0.10) calls functions on several threads only if more than about ten can be called at once:
    on two cores 16 parts take half the time of eight.
    """
    parts = min(max(16, 2 * (os.cpu_count() or 1)), size)
    return [size * index // parts for index in range(parts + 1)]


def round_rows(
    x: Float[Array, "rows inputs"],
) -> tuple[Int16[Array, "rows padded"], Float[Array, "rows groups"], Float[Array, "rows blocks"]]:
    """Round x to 16 bits: integers, the unit of each group, and the sum of each block.

    Rows are filled up with zeros to whole groups.
    """
    size = BLOCK * _GROUP
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -x.shape[1] % size)])
    groups = padded.reshape(len(x), -1, size)
    largest = jnp.max(jnp.abs(groups), axis=2, keepdims=True)
    inverse = jnp.where(largest > 1e-30, 32767 / largest, 0)
    integers = jnp.round(groups * inverse).astype(jnp.int16)
    units = largest * np.float32(1 / 32767)
    blocks = integers.reshape(len(x), -1, _GROUP, BLOCK)
    sums = units * jnp.sum(blocks, axis=3, dtype=jnp.int32).astype(jnp.float32)
    return integers.reshape(padded.shape), units[..., 0], sums.reshape(len(x), -1)


def unpack(
    kind: str, weights: UInt8[Array, "*lead bytes"], after: Array | None = None
) -> Float[Array, "*lead inputs"]:
    """Compute the weights of some rows in float32, not before ``after`` is computed."""
    register(kind)
    format_ = FORMATS[kind]
    inputs = weights.shape[-1] // format_.num_bytes * format_.num_blocks * BLOCK
    flat = weights.reshape(-1, weights.shape[-1])
    waits = [] if after is None else [after.ravel()[:1]]
    results = []
    for first, last in itertools.pairwise(_edges(len(flat))):
        shape = jax.ShapeDtypeStruct((last - first, inputs), jnp.float32)
        call = jax.ffi.ffi_call(f"jllama_unpack_{kind}", shape)
        results.append(call(flat[first:last], *waits))
    return jnp.concatenate(results).reshape(*weights.shape[:-1], inputs)
