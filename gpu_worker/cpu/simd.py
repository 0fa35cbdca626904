"""Sixteen float32 lanes for numba: what LLVM's vectorizer will not do alone (sums kept in registers, bfloat16, exp).

LLVM splits the lanes into what the machine has: one register with AVX-512, two with AVX2, four with NEON. Addresses are
int64 numbers of bytes.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl

LANES = 16
# A division by zero gives infinity and is no Python exception; nobody calls these functions from Python or C.
jit = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


class _BFloat16(ir.Type):
    """LLVM's name of the type, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"


_F32, _BFLOAT16 = ir.FloatType(), _BFloat16()
_I16 = ir.VectorType(ir.IntType(16), LANES)
_I32 = ir.VectorType(ir.IntType(32), LANES)
_VECTOR = ir.VectorType(_F32, LANES)
_PAIRS = ir.VectorType(_BFLOAT16, 2 * LANES)

# Instructions for bfloat16; they take numbers below 1.2e-38 for zeros. numba compiles for this processor, unless its own
# variables say otherwise.
HAS_BFLOAT16 = bool(binding.get_host_cpu_features().get("avx512bf16")) and not numba.config.CPU_NAME


class Element(types.Type):
    """A type of activations; kernels are compiled once for each. In a kernel it is FLOAT32 or BFLOAT16."""

    def __init__(self, name: str, words: Any) -> None:
        super().__init__(name)
        self.words = words
        self.size = words.element.width // 8  # bytes


class _Lanes(types.Type):
    pass


lanes = _Lanes(name="lanes")


class Mark:
    """Its type is what says something: which Element a kernel is compiled for."""

    def __init__(self, element: Element) -> None:
        self.element = element


FLOAT32, BFLOAT16 = Mark(Element("float32", _I32)), Mark(Element("bfloat16", _I16))
register_model(Element)(models.OpaqueModel)


@typeof_impl.register(Mark)
def _typeof(mark: Mark, context: Any) -> Any:
    return mark.element


@lower_constant(Element)
def _no_value(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, _VECTOR)


def _defined(signature: Any, emit: Callable[..., Any]) -> Any:
    """An intrinsic of this signature; emit(builder, *values) writes its instructions."""
    count = len(signature.args)
    names = ", ".join(f"a{number}" for number in range(count))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = emit(builder, *args)
        return context.get_dummy_value() if result is None else result

    scope = {"signature": signature, "codegen": codegen}
    exec(f"def declare(typing, {names}):\n    return signature, codegen", scope)
    return intrinsic(scope["declare"])


def _llvm(builder: Any, name: str, result: Any, *args: Any) -> Any:
    function = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(result, [arg.type for arg in args]))
    return builder.call(function, args)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType())


def _all(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _broadcast(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _all(_I32, 0))


def _spread(builder: Any, count: Any) -> Any:
    return _broadcast(builder, builder.trunc(count, ir.IntType(32)))


def _as_float(builder: Any, words: Any) -> Any:
    if words.type == _I16:  # bfloat16 is the upper half of float32
        words = builder.shl(builder.zext(words, _I32), _all(_I32, 16))
    return builder.bitcast(words, _VECTOR)


def _from_float(builder: Any, value: Any, kind: Any) -> Any:
    if kind != _I16:
        return builder.bitcast(value, _I32)
    if not HAS_BFLOAT16:
        return _rounded(builder, value)
    words = _llvm(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFLOAT16, LANES), value)
    return builder.bitcast(words, _I16)


def _rounded(builder: Any, value: Any) -> Any:
    """To the nearest bfloat16, ties to even; NaN stays NaN."""
    words = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(words, _all(_I32, 16)), _all(_I32, 1))
    up = builder.lshr(builder.add(words, builder.add(odd, _all(_I32, 0x7FFF))), _all(_I32, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _all(_I32, 0x7FC0), up), _I16)


def _power_of_two(builder: Any, value: Any, exponent: Any) -> Any:
    """value * 2^exponent, for whole exponents that keep it normal."""
    shift = builder.shl(builder.fptosi(exponent, _I32), _all(_I32, 23))
    return builder.bitcast(builder.add(builder.bitcast(value, _I32), shift), _VECTOR)


def _sum(builder: Any, value: Any) -> Any:
    function = builder.module.declare_intrinsic("llvm.vector.reduce.fadd.v16f32", fnty=ir.FunctionType(_F32, [_F32, _VECTOR]))
    return builder.call(function, [ir.Constant(_F32, 0.0), value], fastmath=("reassoc",))


def _first_lanes(builder: Any, value: Any, count: Any, other: Any) -> Any:
    inside = builder.icmp_signed("<", ir.Constant(_I32, list(range(LANES))), _spread(builder, count))
    return builder.select(inside, value, other)


def _some_at(builder: Any, at: Any, count: Any, kind: Any) -> tuple[Any, Any, Any]:
    """Arguments of a masked access to the first count elements at an address: pointer, alignment, mask."""
    mask = builder.icmp_signed("<", ir.Constant(_I32, list(range(LANES))), _spread(builder, count))
    return _pointer(builder, at), ir.Constant(ir.IntType(32), kind.element.width // 8), mask


def _load_some(builder: Any, at: Any, count: Any, kind: Any) -> Any:
    pointer, align, mask = _some_at(builder, at, count, kind)
    name = f"llvm.masked.load.v{LANES}i{kind.element.width}.p0"
    return _llvm(builder, name, kind, pointer, align, mask, _all(kind, 0))


def _store_some(builder: Any, at: Any, count: Any, value: Any) -> None:
    pointer, align, mask = _some_at(builder, at, count, value.type)
    name = f"llvm.masked.store.v{LANES}i{value.type.element.width}.p0"
    _llvm(builder, name, ir.VoidType(), value, pointer, align, mask)


def _load_at_most(builder: Any, at: Any, count: Any, kind: Any) -> Any:
    """The first min(count, 16) words at an address, then zeros."""
    whole, result = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES)), []
    with builder.if_else(whole) as (then, otherwise):
        with then:
            result.append((builder.load(_pointer(builder, at), align=kind.element.width // 8, typ=kind), builder.block))
        with otherwise:
            result.append((_load_some(builder, at, count, kind), builder.block))
    words = builder.phi(kind)
    for value, block in result:
        words.add_incoming(value, block)
    return words


def _dot_in_one(builder: Any, first: Any, second: Any) -> Callable[[Any, Any], Any]:
    """Two bfloat16 products and their sum by one instruction, 32 bits of each operand a pair."""
    upper = builder.shl(builder.zext(second, _I32), _all(_I32, 16))
    rows = builder.bitcast(builder.or_(builder.zext(first, _I32), upper), _PAIRS)

    def add_to(total: Any, at: Any) -> Any:
        pair = _broadcast(builder, builder.load(_pointer(builder, at), typ=ir.IntType(32), align=2))
        return _llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, total, builder.bitcast(pair, _PAIRS), rows)

    return add_to


def _dot_in_two(builder: Any, first: Any, second: Any) -> Callable[[Any, Any], Any]:
    """The same as two fused multiplications with float32."""
    size = first.type.element.width // 8

    def factor(at: Any, number: int) -> Any:
        address = builder.add(at, ir.Constant(at.type, number * size))
        word = builder.load(_pointer(builder, address), typ=first.type.element, align=size)
        if size == 2:
            word = builder.shl(builder.zext(word, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return _broadcast(builder, builder.bitcast(word, _F32))

    rows = [_as_float(builder, row) for row in (first, second)]

    def add_to(total: Any, at: Any) -> Any:
        for number, row in enumerate(rows):
            total = _llvm(builder, "llvm.fma.v16f32", _VECTOR, factor(at, number), row, total)
        return total

    return add_to


def _for_each_sum(builder: Any, total: Any, address: Any, stride: Any, add_to: Callable[[Any, Any], Any]) -> Any:
    for number in range(total.type.count):
        total = builder.insert_value(total, add_to(builder.extract_value(total, number), address), number)
        address = builder.add(address, stride)
    return total


_f32, _i64 = types.float32, types.int64

zeros = _defined(lanes(), lambda b: _all(_VECTOR, 0.0))
broadcast = _defined(lanes(_f32), _broadcast)
add = _defined(lanes(lanes, lanes), lambda b, x, y: b.fadd(x, y))
subtract = _defined(lanes(lanes, lanes), lambda b, x, y: b.fsub(x, y))
multiply = _defined(lanes(lanes, lanes), lambda b, x, y: b.fmul(x, y))
divide = _defined(lanes(lanes, lanes), lambda b, x, y: b.fdiv(x, y))
fma = _defined(lanes(lanes, lanes, lanes), lambda b, x, y, z: _llvm(b, "llvm.fma.v16f32", _VECTOR, x, y, z))
largest = _defined(lanes(lanes, lanes), lambda b, x, y: _llvm(b, "llvm.maxnum.v16f32", _VECTOR, x, y))
smallest = _defined(lanes(lanes, lanes), lambda b, x, y: _llvm(b, "llvm.minnum.v16f32", _VECTOR, x, y))
whole = _defined(lanes(lanes), lambda b, x: _llvm(b, "llvm.rint.v16f32", _VECTOR, x))
power_of_two = _defined(lanes(lanes, lanes), _power_of_two)
at_least = _defined(lanes(lanes, lanes), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), y, x))  # NaN stays NaN
above = _defined(lanes(lanes, lanes, lanes), lambda b, x, y, z: b.select(b.fcmp_ordered(">", x, y), z, _all(_VECTOR, 0.0)))
nan_kept = _defined(lanes(lanes, lanes), lambda b, x, y: b.select(b.fcmp_unordered("uno", x, x), x, y))
first_lanes = _defined(lanes(lanes, _i64, lanes), _first_lanes)  # the first count lanes of a value, the rest of another
sum_of = _defined(_f32(lanes), _sum)
largest_of = _defined(_f32(lanes), lambda b, x: _llvm(b, "llvm.vector.reduce.fmax.v16f32", _F32, x))


def _fetch(builder: Any, at: Any) -> None:
    kinds = [ir.PointerType(), *[ir.IntType(32)] * 3]
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=ir.FunctionType(ir.VoidType(), kinds))
    read, second_level, data = (ir.Constant(ir.IntType(32), number) for number in (0, 2, 1))
    builder.call(function, [_pointer(builder, at), read, second_level, data])


fetch = _defined(types.void(_i64), _fetch)  # the cache line at an address, soon to be read; does not wait
read_int32 = _defined(_i64(_i64), lambda b, at: b.sext(b.load(_pointer(b, at), typ=ir.IntType(32)), ir.IntType(64)))
read_int64 = _defined(_i64(_i64), lambda b, at: b.load(_pointer(b, at), typ=ir.IntType(64)))


@intrinsic
def size_of(typing: Any, element: Any) -> Any:
    """Bytes of an element."""
    return _i64(element), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), element.size)


@intrinsic
def load(typing: Any, element: Any, at: Any) -> Any:
    """16 elements, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _as_float(builder, builder.load(_pointer(builder, args[1]), align=element.size, typ=element.words))

    return lanes(element, _i64), codegen


@intrinsic
def load_some(typing: Any, element: Any, at: Any, count: Any) -> Any:
    """The first count elements, then zeros."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _as_float(builder, _load_some(builder, args[1], args[2], element.words))

    return lanes(element, _i64, _i64), codegen


@intrinsic
def store(typing: Any, element: Any, at: Any, value: Any) -> Any:
    """16 elements, each rounded to the nearest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _from_float(builder, args[2], element.words)
        builder.store(words, _pointer(builder, args[1]), align=element.size)
        return context.get_dummy_value()

    return types.void(element, _i64, lanes), codegen


@intrinsic
def store_some(typing: Any, element: Any, at: Any, count: Any, value: Any) -> Any:
    """The first count elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store_some(builder, args[1], args[2], _from_float(builder, args[3], element.words))
        return context.get_dummy_value()

    return types.void(element, _i64, _i64, lanes), codegen


@intrinsic
def dot_each(typing: Any, element: Any, sums: Any, at: Any, stride: Any, first: Any, second: Any, count: Any) -> Any:
    """A tuple of sums, to each of which 16 elements at first and at second are added, times two elements of its own.

    These stand together at at, at + stride, ... Of first and second count elements are read if that is less than 16.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, address, stride, first, second, count = args[1:]
        rows = [_load_at_most(builder, row, count, element.words) for row in (first, second)]
        terms = _dot_in_one if element.words == _I16 and HAS_BFLOAT16 else _dot_in_two
        return _for_each_sum(builder, total, address, stride, terms(builder, *rows))

    return sums(element, sums, _i64, _i64, _i64, _i64, _i64), codegen


@intrinsic
def load_each(typing: Any, sums: Any, at: Any, stride: Any) -> Any:
    """As many float32 sums as the tuple has, from at, at + stride, ..."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, address = args[0], args[1]
        for number in range(sums.count):
            total = builder.insert_value(total, builder.load(_pointer(builder, address), align=4, typ=_VECTOR), number)
            address = builder.add(address, args[2])
        return total

    return sums(sums, _i64, _i64), codegen


@intrinsic
def store_each(typing: Any, sums: Any, at: Any, stride: Any) -> Any:
    """A tuple of sums as float32, at at, at + stride, ..."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = args[1]
        for number in range(sums.count):
            builder.store(builder.extract_value(args[0], number), _pointer(builder, address), align=4)
            address = builder.add(address, args[2])
        return context.get_dummy_value()

    return types.void(sums, _i64, _i64), codegen


@intrinsic
def copy_element(typing: Any, element: Any, target: Any, source: Any) -> Any:
    """One element as it is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(_pointer(builder, args[2]), typ=element.words.element)
        builder.store(word, _pointer(builder, args[1]))
        return context.get_dummy_value()

    return types.void(element, _i64, _i64), codegen


@jit
def load_part(element, at, count):
    """At most 16 of count elements."""
    return load(element, at) if count >= 16 else load_some(element, at, count)


@jit
def store_part(element, at, count, value):
    if count >= 16:
        store(element, at, value)
    else:
        store_some(element, at, count, value)


def _counter(number: int) -> Any:
    """The value of a counter at the head of a kernel's arguments, which grows by one; no two threads get the same."""

    @intrinsic
    def take(typing: Any, args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address = builder.add(builder.ptrtoint(values[0], ir.IntType(64)), ir.Constant(ir.IntType(64), 8 * number))
            return builder.atomic_rmw("add", _pointer(builder, address), ir.Constant(ir.IntType(64), 1), "monotonic")

        return _i64(args), codegen

    return take


next_task, next_thread = _counter(0), _counter(1)


@jit
def exp(x):
    """e^x within 2 units in the last place; below -87.3 it is 0 (Cephes' polynomial)."""
    lowest = broadcast(-87.3)
    clamped = largest(smallest(x, broadcast(88.0)), lowest)
    n = whole(multiply(clamped, broadcast(1.44269504088896)))
    r = fma(n, broadcast(-0.693359375), clamped)
    r = fma(n, broadcast(2.12194440e-4), r)
    p = fma(broadcast(1.9875691500e-4), r, broadcast(1.3981999507e-3))
    p = fma(p, r, broadcast(8.3334519073e-3))
    p = fma(p, r, broadcast(4.1665795894e-2))
    p = fma(p, r, broadcast(1.6666665459e-1))
    p = fma(p, r, broadcast(5.0000001201e-1))
    p = fma(multiply(p, r), r, add(r, broadcast(1.0)))
    return nan_kept(x, above(x, lowest, power_of_two(p, n)))


@jit
def power(x):
    """2^x within 4e-7 of it, for x <= 0 (a fitted polynomial); below -126.5 less than 1.2e-38, at -inf 0."""
    x = at_least(x, broadcast(-127.0))
    n = whole(x)
    r = subtract(x, n)
    p = fma(broadcast(0.001326472614891827), r, broadcast(0.009671512991189957))
    p = fma(p, r, broadcast(0.05550733581185341))
    p = fma(p, r, broadcast(0.24022242426872253))
    p = fma(p, r, broadcast(0.6931470036506653))
    return power_of_two(fma(p, r, broadcast(1.0)), n)
