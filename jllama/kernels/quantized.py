"""Products with quantized matrices on CPUs, from the bytes as they are stored.

Numba compiles them for the processor at hand, and XLA calls them (``jax.ffi``). Each row of x is
rounded to integers of 16 bits in groups of 256 numbers, ``x = unit * q`` with
``unit = max(abs(x)) / 32767``. A block of 32 weights is ``scale * v - minimum``, so a product is

    y = sum over groups of  unit * (sum over blocks of  scale * sum(q * v))
        - sum over blocks of  minimum * unit * sum(q)

Sums of four products are of integers, and exact. All others are in float32, one block or group
after the other. The first line is computed in eight lanes, of which lane i has the products 2 i,
2 i + 1, 2 i + 16 and 2 i + 17 of each block; they are added in pairs at the end. The order depends
neither on other rows nor on the number of threads: a row has the same bits in any company. Source
of the formats: ggml's ``ggml-common.h`` and ``ggml-quants.c``.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba
import numpy as np
from jaxtyping import Array, Float, Int8, UInt8
from llvmlite import binding as llvm
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

BLOCK = 32
"""Weights with one scale."""
_HALF = 16  # integers in a vector of 256 bits; those of 512 slow Intel's processors down


def _can_cache() -> bool:
    """Return whether Numba finds a folder for what it compiles."""
    try:
        numba.njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


_CAN_CACHE = _can_cache()
_compiled: Any = numba.njit(cache=_CAN_CACHE, error_model="numpy")  # C has no exceptions
_GROUP = 8  # blocks of a row of x with one unit
# A group of x, in bytes: its integers, its unit, the sums of its blocks; whole cache lines.
_UNIT = 2 * BLOCK * _GROUP
_SUMS = _UNIT + 4
_GROUP_BYTES = _UNIT + 64
_TILES = (8, 4, 1)  # rows of x that are multiplied together
_PANEL = 16  # outputs that are multiplied by all rows of x before the next ones
_AHEAD = 4096  # bytes before their use weights are asked for

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


# 2) The formats.


class _Block(NamedTuple):
    halves: Sequence[Value]  # 16 integers of 16 bits each
    scale: Value  # eight equal floats
    minimum: Value = None  # float; None: the format has none


class _Format(NamedTuple):
    num_blocks: int  # that are stored together
    num_bytes: int  # of these
    unpack: Callable[[Any, Value, int], _Block]  # of a builder, their address, and which of them
    has_minimum: bool = False


def _bytes(
    build: Any, address: Value, offset: int, count: int = _HALF, name: str = "zext"
) -> Value:
    """Load bytes as integers of 16 bits: without signs, or with them (``sext``)."""
    return _wide(build, getattr(build, name), _load(build, _I8, address, offset, count))


def _scale(build: Any, address: Value) -> Value:
    """Load a block's scale.

    It is loaded with the numbers after it. By itself it would be inserted into a register of LLVM's
    choice, and wait for what that holds.
    """
    halves = _load(build, _F16, address, 0, 4)
    return _pick(build, build.fpext(halves, ir.VectorType(_F32, 4)), [0] * _LANES)


def _signed(build: Any, address: Value, offset: int) -> list[Value]:
    """Load 32 bytes with signs as two halves."""
    return [_bytes(build, address, offset + first, name="sext") for first in (0, _HALF)]


def _int8(build: Any, address: Value, index: int) -> _Block:
    return _Block(_signed(build, address, 0), _vector(_F32, [1.0] * _LANES))


def _q8_0(build: Any, address: Value, index: int) -> _Block:
    return _Block(_signed(build, address, 2), _scale(build, address))


def _q4_0(build: Any, address: Value, index: int) -> _Block:
    packed = _bytes(build, address, 2)
    eight = _vector(_I16, [8] * _HALF)
    halves = [build.sub(_bits(build, packed, first, 4), eight) for first in (0, 4)]
    return _Block(halves, _scale(build, address))


def _q4_k(build: Any, address: Value, index: int) -> _Block:
    # Two float16, 12 bytes of scales and minima in six bits, and nibbles of two blocks together.
    packed = 16 + 32 * (index // 2)
    halves = []
    for first in (0, _HALF):
        values = _bytes(build, address, packed + first)
        halves.append(_bits(build, values, 4 * (index % 2), 4))
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
    return _Block(halves, _splat(build, scale), minimum)


def _q6_k(build: Any, address: Value, index: int) -> _Block:
    # 128 bytes of low nibbles, 64 of two high bits each, 16 scales, and a half that scales these.
    part, place = divmod(index, 4)
    scales = _bytes(build, address, 192 + 2 * index, 2, "sext")
    halves = []
    for i in (0, 1):
        low = _bytes(build, address, 64 * part + 32 * (place % 2) + _HALF * i)
        high = _bytes(build, address, 128 + 32 * part + _HALF * i)
        high = build.shl(_bits(build, high, 2 * place, 2), _vector(_I16, [4] * _HALF))
        values = build.or_(_bits(build, low, 4 * (place // 2), 4), high)
        values = build.sub(values, _vector(_I16, [32] * _HALF))
        halves.append(build.mul(values, _pick(build, scales, [i] * _HALF)))
    factor = build.fpext(_load(build, _F16, address, 208), _F32)
    return _Block(halves, _splat(build, factor))


FORMATS = {
    "int8": _Format(1, 32, _int8),
    "Q8_0": _Format(1, 34, _q8_0),
    "Q4_0": _Format(1, 18, _q4_0),
    "Q4_K": _Format(8, 144, _q4_k, True),
    "Q6_K": _Format(8, 210, _q6_k),
}
"""The formats by name, GGML's types among them."""

# 3) The inner loops. Addresses are integers; ``kind`` is a constant.


def _fetch(build: Any, address: Value, num_bytes: int) -> None:
    """Ask for the bytes that are used after the next ``_AHEAD``."""
    for offset in range(_AHEAD, _AHEAD + num_bytes, 64):
        pointer = _at(build, _I8, address, offset, 0)
        options = _I32(0), _I32(3), _I32(1)  # to read, into all caches, as data
        _call(build, "prefetch.p0i8", ir.VoidType(), pointer, *options)


def _products(build: Any, halves: Sequence[Value], x: Value, offset: int) -> Value:
    """Multiply 32 pairs of integers, and add four each; return eight floats.

    They are exact, but for Q6_K, whose integers hold a scale.
    """
    added = None
    for i, half in enumerate(halves):
        others = _load(build, _I16, x, offset + BLOCK * i, _HALF)
        factors = (_wide(build, build.sext, part, _I32) for part in (half, others))
        products = build.mul(*factors)
        pairs = build.add(*(_pick(build, products, range(i, _HALF, 2)) for i in (0, 1)))
        added = build.add(added, pairs) if added else pairs
    return build.sitofp(added, ir.VectorType(_F32, _LANES))


def _add_product(build: Any, total: Value, x: Value, y: Value) -> None:
    """Add ``x * y`` to a variable, and round once."""
    before = build.load(total)
    name = "fma.f32" if before.type == _F32 else "fma.v8f32"
    build.store(_call(build, name, before.type, x, y, before), total)


def _multiply_tile(
    build: Any,
    format_: _Format,
    num_rows: int,
    weights: Value,
    count: Value,
    x: Value,
    out: Value,
    stride: Value,
) -> None:
    """Multiply the ``count`` blocks of one output by some rows of x; write to ``out`` floats."""
    zeros = _vector(_F32, [0.0] * _LANES)
    totals = [cgutils.alloca_once_value(build, zeros) for _ in range(num_rows)]
    parts = [cgutils.alloca_once_value(build, zeros) for _ in range(num_rows)]
    minima = [cgutils.alloca_once_value(build, _F32(0.0)) for _ in range(num_rows)]
    per_group = _I64(_GROUP // format_.num_blocks)
    stored = build.sdiv(count, _I64(format_.num_blocks))
    groups = build.sdiv(build.add(count, _I64(_GROUP - 1)), _I64(_GROUP))
    with cgutils.for_range(build, groups) as group:
        x_groups = []
        for row in range(num_rows):
            place = build.add(group.index, build.mul(groups, _I64(row)))
            x_groups.append(_element(build, x, place, _GROUP_BYTES))
        first = build.mul(group.index, per_group)
        rest = build.sub(stored, first)
        is_last = build.icmp_signed("<", rest, per_group)
        with cgutils.for_range(build, build.select(is_last, rest, per_group)) as loop:
            index = build.add(first, loop.index)
            address = _element(build, weights, index, format_.num_bytes)
            _fetch(build, address, format_.num_bytes)
            number = build.mul(loop.index, _I64(format_.num_blocks))
            for within in range(format_.num_blocks):
                block = format_.unpack(build, address, within)
                for row, x_group in enumerate(x_groups):
                    integers = _element(build, x_group, number, 2 * BLOCK)
                    products = _products(build, block.halves, integers, 2 * BLOCK * within)
                    _add_product(build, parts[row], products, block.scale)
                    if format_.has_minimum:
                        sums = _element(build, x_group, number, 4)
                        x_sum = _load(build, _F32, sums, _SUMS + 4 * within)
                        _add_product(build, minima[row], block.minimum, x_sum)
        for row, x_group in enumerate(x_groups):
            unit = _splat(build, _load(build, _F32, x_group, _UNIT))
            _add_product(build, totals[row], build.load(parts[row]), unit)
            build.store(zeros, parts[row])
    for row in range(num_rows):
        total = build.load(totals[row])
        for size in (4, 2, 1):
            halves = (_pick(build, total, range(i, i + size)) for i in (0, size))
            total = build.fadd(*halves)
        total = build.extract_element(total, _I32(0))
        total = build.fsub(total, build.load(minima[row]))
        _store(build, total, _element(build, out, build.mul(stride, _I64(row)), 4))


@_intrinsic
def _dot(context: Any, kind: Any, numbers: Any) -> Any:
    """Call ``_multiply_tile`` with ``numbers``: how many rows, one of ``_TILES``, and the rest."""
    if not isinstance(kind, types.StringLiteral):
        return None

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> None:
        rows, *others = cgutils.unpack_tuple(build, arguments[1])
        for num_rows in _TILES:
            with build.if_then(build.icmp_signed("==", rows, _I64(num_rows))):
                _multiply_tile(build, FORMATS[kind.literal_value], num_rows, *others)

    return types.void(kind, numbers), generate


@_intrinsic
def _unpack(context: Any, kind: Any, weights: Any, count: Any, out: Any) -> Any:
    """Write the weights of ``count`` blocks as floats."""
    if not isinstance(kind, types.StringLiteral):
        return None
    format_ = FORMATS[kind.literal_value]

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> None:
        weights, count, out = arguments[1:]
        with cgutils.for_range(build, build.sdiv(count, _I64(format_.num_blocks))) as loop:
            address = _element(build, weights, loop.index, format_.num_bytes)
            target = _element(build, out, loop.index, 4 * BLOCK * format_.num_blocks)
            for index in range(format_.num_blocks):
                block = format_.unpack(build, address, index)
                for first in range(0, BLOCK, _LANES):
                    lanes = range(first % _HALF, first % _HALF + _LANES)
                    values = _pick(build, block.halves[first // _HALF], lanes)
                    floats = build.sitofp(values, ir.VectorType(_F32, _LANES))
                    floats = build.fmul(floats, block.scale)
                    if format_.has_minimum:
                        floats = build.fsub(floats, _splat(build, block.minimum))
                    _store(build, floats, target, 4 * (BLOCK * index + first))

    return types.void(kind, *[types.int64] * 3), generate


@_intrinsic
def _view(context: Any, address: Any, kind: Any) -> Any:
    """View memory as numbers of a type."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Value:
        return build.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), generate


@_compiled
def _words(address: int) -> Any:
    return _view(address, np.int64)


@_intrinsic
def _add(context: Any, words: Any, index: Any, number: Any) -> Any:
    """Add to an integer that threads share; return what it was before."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Value:
        words, index, number = arguments
        return build.atomic_rmw("add", build.gep(words, [index]), number, "seq_cst")

    return types.int64(words, types.int64, types.int64), generate


@_intrinsic
def _call_c(context: Any, function: Any, argument: Any) -> Any:
    """Call a C function with one argument."""

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(_I64, [_I64])
        return build.call(build.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _function(context: Any, name: Any) -> Any:
    """Return the address of a C function, whose name is a constant."""
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(_I64, [_I64])
        function = cgutils.get_or_insert_function(build.module, kind, name.literal_value)
        return build.ptrtoint(function, _I64)

    return types.int64(name), generate


# 4) Threads. XLA makes one call for a whole product. Threads of its pool take parts of the outputs
# until none is left, and the one that ends the last part tells XLA. So none waits for another.
# All layouts are in words of 64 bits. Those of XLA are in its c_api.h. The frame of a call:
_EXTENSION = 1
_API = 2
_CONTEXT = 3
_OPERANDS = 9
_RESULTS = 14
_FUTURE = 21
# The functions of an API:
_SCHEDULE = 17
_NUM_THREADS = 18
_CREATE_FUTURE = 19
_SET_AVAILABLE = 20
# The memory of a call, until its last thread leaves:
_NEXT = 0  # the first output of the next part
_READY = 1  # how many outputs are computed
_THREADS = 2  # that may use this memory
_STEP = 3  # outputs of a part
_TELL = 4  # the function that tells XLA, and its struct
_STRUCT = 8  # for other functions of XLA
_ARRAYS = 13  # the address and two sizes of the result and of the weights
_X = 19  # the address of x in 16 bits, and the bytes of a row
_CALL_BYTES = 8 * 21
_STRUCT_BYTES = 40  # XLA accepts structs that are longer than its own
_PART_BYTES = 1 << 15  # of weights, at least: to share fewer costs more time than it saves


@_compiled
def _call_xla(frame: int, function: int, struct: int) -> int:
    """Call a function of XLA's API with a struct, after its size and no extension."""
    _words(struct)[0] = _STRUCT_BYTES
    _words(struct)[1] = 0
    return _call_c(_words(_words(frame)[_API])[function], struct)


@_compiled
def _answers_version(frame: int) -> bool:
    """Answer if XLA asks which version of its interface this is, 0.3; return whether it does."""
    extension = _words(frame)[_EXTENSION]
    if extension == 0:
        return False
    _words(_words(extension)[3])[3] = 3 << 32
    return True


@_compiled
def _array(frame: int, index: int) -> tuple[int, int, int]:
    """Return the address and two sizes of the result (0) or of an operand (1, ...)."""
    buffers = _words(_words(frame)[_OPERANDS if index else _RESULTS])
    buffer = _words(buffers[max(index - 1, 0)])
    sizes = _words(buffer[5])
    return buffer[3], sizes[0], sizes[1]


@_compiled
def _round(x: int, count: int, group: int) -> None:
    """Round the ``count`` numbers of a row to 16 bits, and write its groups."""
    numbers = _view(x, np.float32)
    for first in range(0, count, BLOCK * _GROUP):
        end = min(first + BLOCK * _GROUP, count)
        # Bits without the sign are in the order of the numbers; those of NaN are the largest.
        largest = 0
        for i in range(first, end):
            largest = max(largest, _view(x, np.int32)[i] & 0x7FFFFFFF)
        unit = np.int32(largest).view(np.float32)
        # Smaller numbers count as 0. What is not finite has any integer: its unit makes it NaN.
        inverse = np.float32(32767) / unit if unit > np.float32(1e-30) else np.float32(0)
        unit *= np.float32(1 / 32767)
        _view(group + _UNIT, np.float32)[0] = unit
        for block in range(first, end, BLOCK):
            total = 0
            for i in range(block, block + BLOCK):
                integer = np.int32(np.rint(numbers[i] * inverse))
                _view(group, np.int16)[i - first] = integer
                total += integer
            _view(group + _SUMS, np.float32)[(block - first) // BLOCK] = unit * np.float32(total)
        group += _GROUP_BYTES


@_compiled
def _share(frame_address: int, task: int) -> int:
    """Round x, and let ``task`` compute the outputs in parts; return XLA's error, or 0."""
    # 1) Copy where the arrays are: XLA's frame ends when this returns, and threads may go on.
    # Round x into the memory behind that.
    frame = _words(frame_address)
    x, rows, inputs = _array(frame_address, 2)
    x_bytes = ((inputs - 1) // (BLOCK * _GROUP) + 1) * _GROUP_BYTES
    address = _call_c(_function("malloc"), _CALL_BYTES + 64 + rows * x_bytes)
    call = _words(address)
    for index in range(2):
        for place, number in enumerate(_array(frame_address, index)):
            call[_ARRAYS + 3 * index + place] = number
    call[_X] = (address + _CALL_BYTES + 63) // 64 * 64
    call[_X + 1] = x_bytes
    for row in range(rows):
        _round(x + 4 * row * inputs, inputs, call[_X] + row * x_bytes)

    # 2) About eight parts for each thread, of whole panels.
    struct_address = address + 8 * _STRUCT
    struct = _words(struct_address)
    struct[2] = frame[_CONTEXT]
    struct[3] = address + 8 * _THREADS
    error = _call_xla(frame_address, _NUM_THREADS, struct_address)
    if error != 0:
        return error
    size = call[_ARRAYS + 2]
    outputs = max(size // (8 * call[_THREADS]), _PART_BYTES // call[_ARRAYS + 5])
    call[_STEP] = (outputs // _PANEL + 1) * _PANEL
    threads = min(call[_THREADS], (size - 1) // call[_STEP] + 1)
    call[_THREADS] = threads
    call[_NEXT] = call[_READY] = 0

    # 3) What XLA waits for.
    error = _call_xla(frame_address, _CREATE_FUTURE, struct_address)
    if error != 0:
        return error
    frame[_FUTURE] = struct[2]
    call[_TELL] = _words(frame[_API])[_SET_AVAILABLE]
    call[_TELL + 1] = 24  # its size
    call[_TELL + 2] = 0
    call[_TELL + 3] = struct[2]

    # 4) Other threads, and this one. If XLA refuses one, the others do its parts.
    struct[2] = frame[_CONTEXT]
    struct[3] = task
    struct[4] = address
    for _ in range(1, threads):
        if _call_xla(frame_address, _SCHEDULE, struct_address) != 0:
            _add(call, _THREADS, -1)
    return _call_c(task, address)


# 5) What XLA calls.


def _compile_c(function: Any, suffix: str) -> Any:
    """Compile a function for C. Its name names the file in Numba's cache: each format has one."""
    function.__qualname__ += suffix
    return numba.cfunc(types.int64(types.int64), cache=_CAN_CACHE)(function)


def _handlers(kind: str) -> tuple[Any, Any, Any]:
    """Return what XLA calls for ``product`` and for ``unpack``, and the task of its threads."""
    num_blocks, num_bytes, _, _ = FORMATS[kind]
    task = f"jllama_multiply_{kind}"

    def multiply(address: int) -> int:
        call = _words(address)
        out = call[_ARRAYS]
        rows = call[_ARRAYS + 1]
        outputs = call[_ARRAYS + 2]
        weights = call[_ARRAYS + 3]
        row_bytes = call[_ARRAYS + 5]
        count = row_bytes // num_bytes * num_blocks
        while True:
            # Take the next part, if there is one.
            begin = _add(call, _NEXT, call[_STEP])
            end = min(begin + call[_STEP], outputs)
            if begin >= end:
                break
            for first in range(begin, end, _PANEL):
                last = min(first + _PANEL, end)
                row = 0
                for tile in _TILES:
                    while rows - row >= tile:
                        x = call[_X] + row * call[_X + 1]
                        for output in range(first, last):
                            w = weights + output * row_bytes
                            y = out + 4 * (row * outputs + output)
                            _dot(kind, (tile, w, count, x, y, outputs))
                        row += tile
            # Tell XLA if these were the last outputs.
            if _add(call, _READY, end - begin) == outputs - (end - begin):
                _call_c(call[_TELL], address + 8 * (_TELL + 1))
        # The last thread that may use this memory frees it.
        if _add(call, _THREADS, -1) == 1:
            _call_c(_function("free"), address)
        return 0

    multiply_task = _compile_c(multiply, task)
    llvm.add_symbol(task, multiply_task.address)

    def on_product(frame: int) -> int:
        return 0 if _answers_version(frame) else _share(frame, _function(task))

    def on_unpack(frame: int) -> int:
        if not _answers_version(frame):
            weights, rows, row_bytes = _array(frame, 1)
            count = rows * row_bytes // num_bytes * num_blocks
            _unpack(kind, weights, count, _array(frame, 0)[0])
        return 0

    return _compile_c(on_product, task), _compile_c(on_unpack, task), multiply_task


@functools.cache
def register(kind: str) -> Any:
    """Make the kernels of a format known to XLA; what is returned keeps them alive.

    A program that was stored by another process is loaded after this.
    """
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    functions = _handlers(kind)
    for name, handler in zip(("product", "unpack"), functions[:2], strict=True):
        target = capsule(handler.address, None, None)
        jax.ffi.register_ffi_target(f"jllama_{name}_{kind}", target, platform="cpu")
    return functions


def product(
    kind: str,
    x: Float[Array, "rows inputs"],
    weights: UInt8[Array, "outputs bytes"] | Int8[Array, "outputs inputs"],
) -> Float[Array, "rows outputs"]:
    """Compute ``x @ weights.T`` in float32, for weights of a format of ``FORMATS``."""
    register(kind)
    shape = jax.ShapeDtypeStruct((len(x), len(weights)), jnp.float32)
    call = jax.ffi.ffi_call(f"jllama_product_{kind}", shape)
    return call(weights, x.astype(jnp.float32))


def unpack(kind: str, weights: UInt8[Array, "*lead bytes"]) -> Float[Array, "*lead inputs"]:
    """Compute the weights of some rows in float32."""
    register(kind)
    format_ = FORMATS[kind]
    inputs = weights.shape[-1] // format_.num_bytes * format_.num_blocks * BLOCK
    flat = weights.reshape(-1, weights.shape[-1])
    shape = jax.ShapeDtypeStruct((len(flat), inputs), jnp.float32)
    floats = jax.ffi.ffi_call(f"jllama_unpack_{kind}", shape)(flat)
    return floats.reshape(*weights.shape[:-1], inputs)
