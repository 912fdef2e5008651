"""LLVM's instructions in the compiled loops, of a number or of a vector of them.

Numba looks at the files of the loops alone to see whether what it has cached is stale: after a change here, change
these files too.
"""

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils
from numba.extending import intrinsic


def loop(function):
    """Have Numba compile a loop over tiles, which holds no lock of Python's.

    LLVM may reorder sums and take no number for NaN, so that it can vectorise maxima and sums. The caller sees to NaN.
    """
    fast = {"nnan", "ninf", "nsz", "contract", "reassoc"}
    return njit(nogil=True, fastmath=fast, error_model="numpy", no_cfunc_wrapper=True)(function)


def register_bytes(context):
    """Bytes of a vector register of the processor that code is compiled for."""
    features = context.codegen().magic_tuple()[2].split(",")
    return 64 if "+avx512f" in features else 16 if "+neon" in features else 32


def array(context, builder, signature, arguments, k):
    """The array that argument k of an intrinsic is, with ``data`` and ``shape``."""
    return context.make_array(signature.args[k])(context, builder, value=arguments[k])


def at(builder, a, b, c):
    """a · b + c, of indices."""
    return builder.add(builder.mul(a, b), c)


def load(builder, data, offset, kind):
    """The number, or the vector, that begins at an offset of an array's data."""
    return builder.load(_pointer(builder, data, offset, kind), align=_itemsize(kind))


def store(builder, value, data, offset):
    builder.store(value, _pointer(builder, data, offset, value.type), align=_itemsize(value.type))


def _pointer(builder, data, offset, kind):
    return builder.bitcast(builder.gep(data, [offset]), kind.as_pointer())


def _itemsize(kind):
    return 4 if isinstance(getattr(kind, "element", kind), ir.FloatType) else 8


def call(builder, name, arguments, flags):
    """Call what LLVM has for every type of the last argument; the result's type is that of the first."""
    kind = arguments[-1].type
    suffix = (f"v{kind.count}" if isinstance(kind, ir.VectorType) else "") + f"f{8 * _itemsize(kind)}"
    function = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function, f"{name}.{suffix}")
    return builder.call(function, arguments, fastmath=flags)


def zeros(builder, vector, count):
    """Vectors to add to. They are on the stack as written; LLVM keeps them in registers."""
    return [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * vector.count)) for _ in range(count)]


def add(builder, slot, a, b=None):
    """slot += a, or a · b."""
    old = builder.load(slot)
    builder.store(builder.fadd(old, a) if b is None else times_plus(builder, a, b, old), slot)


def everywhere(builder, scalar, vector):
    """A vector of one number, as often as it has lanes."""
    index = ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(index, 0))
    mask = ir.Constant(ir.VectorType(index, vector.count), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def times_plus(builder, a, b, c):
    """a · b + c, in one instruction where there is one."""
    return builder.fadd(builder.fmul(a, b, flags=["contract"]), c, flags=["contract"])


def exp2_of(builder, x):
    """2ⁿ · 2^f, n = x rounded: n comes from adding a number so large that its last bit is 1, 2ⁿ by integer addition.

    The sums with that number have flags of their own: with the caller's, LLVM would cancel it.
    """
    # Coefficients of 2^f on [−½, ½], constant first: least largest relative error (Remez), 7.5e-8 and 2.1e-16.
    coefficients = {
        32: (1.0000000716547141, 0.6931469670650352, 0.2402211972371072, 0.05550713271855644, 0.009675541343121327,
             0.0013276472631950876),
        64: (1.0, 0.6931471805599498, 0.24022650695908768, 0.05550410866445883, 0.009618129108034589,
             0.0013333558228561476, 0.00015403529961135956, 1.5252658116136156e-05, 1.3215662831846103e-06,
             1.0208537904552164e-07, 7.037279530582804e-09),
    }  # fmt: skip
    vector = isinstance(x.type, ir.VectorType)
    element = x.type.element if vector else x.type
    bits = 32 if isinstance(element, ir.FloatType) else 64
    integer = ir.IntType(bits)
    kind = ir.VectorType(integer, x.type.count) if vector else integer

    def constant(type_, value):
        return ir.Constant(type_, [value] * x.type.count if vector else value)

    significand = 23 if bits == 32 else 52
    large = constant(x.type, 1.5 * 2.0**significand)
    shifted = builder.fadd(x, large, flags=["contract"])
    f = builder.fsub(x, builder.fsub(shifted, large, flags=["contract"]), flags=["contract"])
    *lower, power = (constant(x.type, float(np.dtype(f"f{bits // 8}").type(c))) for c in coefficients[bits])
    for c in reversed(lower):
        power = times_plus(builder, power, f, c)
    exponent = builder.shl(builder.bitcast(shifted, kind), constant(kind, significand))
    return builder.bitcast(builder.add(builder.bitcast(power, kind), exponent), x.type)


@intrinsic
def exp2(typing_context, x):
    def generate(context, builder, signature, arguments):
        return exp2_of(builder, arguments[0])

    return x(x), generate


@intrinsic
def larger(typing_context, a, b):
    """The larger of two numbers, in the form that LLVM vectorises, in reductions too."""

    def generate(context, builder, signature, arguments):
        return call(builder, "llvm.maxnum", arguments, ("nnan", "nsz"))

    return a(a, a), generate
