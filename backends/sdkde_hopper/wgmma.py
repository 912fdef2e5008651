"""C++ functions for the asynchronous products of Hopper's Tensor Cores: one instruction each, written by shape."""

from __future__ import annotations


def wgmma(
    name: str, n: int, *, k: int = 16, kind: str = "f16", a: str = "registers", b: str = "shared", begins: bool = False
) -> str:
    """Return a function ``name(sums, operands)`` that adds a product of (64, k) by (k, n) to fp32 sums.

    n is a multiple of 8, and a thread holds n/2 sums; k is 16 of half precision, 32 of bytes, whose second operand is
    e4m3 and whose first is ``kind``. The first operand is in registers or in shared memory, ``"transposed"`` there if
    it is contiguous along its rows; the second in shared memory, contiguous along k, or ``"transposed"`` along its
    columns. With ``begins`` the sums start at zero, whatever the registers hold.
    """
    sums = n // 2
    if a == "registers":
        operand, count, given = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}", 4, [f"a{i}" for i in range(4)]
        parameters = [f"uint32_t {x}" for x in given]
    else:
        operand, count, given, parameters = f"%{sums}", 1, ["a"], ["uint64_t a"]
    transposed = f", {int(b == 'transposed')}"
    flags = "" if k == 32 else {"registers": "", "shared": ", 0", "transposed": ", 1"}[a] + transposed
    constraint = '"r"' if a == "registers" else '"l"'
    outputs = ", ".join(f'"{"=" if begins else "+"}f"(d[{i}])' for i in range(sums))
    inputs = ", ".join([*(f"{constraint}({x})" for x in given), '"l"(b)', f'"n"({int(not begins)})'])
    registers = ", ".join(f"%{i}" for i in range(sums))
    types = f"f32.{kind}.{'f16' if k == 16 else 'e4m3'}"
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{sums}], {', '.join(parameters)}, uint64_t b) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + count + 1}, 0; wgmma.mma_async.sync.aligned."\n'
        f'    "m64n{n}k{k}.{types} {{{registers}}}, {operand}, %{sums + count}, p, 1, 1{flags};}}"\n'
        f"    : {outputs} : {inputs});\n}}\n"
    )
