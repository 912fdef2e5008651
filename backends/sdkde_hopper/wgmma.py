"""C++ functions for the asynchronous products of Hopper's Tensor Cores: one instruction each, written by shape."""

from __future__ import annotations


def wgmma(
    name: str, n: int, *, halves: bool = True, a: str = "registers", b: str = "shared", begins: bool = False
) -> str:
    """Return a function ``name(sums, operands)`` that adds a product of (64, k) by (k, n) to fp32 sums.

    n is a multiple of 8, and a thread holds n/2 sums; k is 16 of half precision, or 32 of bytes, e5m2 by e4m3. The
    first operand is in registers, four of a thread, or in shared memory, ``"transposed"`` there if it is contiguous
    along its rows; the second in shared memory, contiguous along k, or ``"transposed"`` along its columns. With
    ``begins`` the sums start at zero, whatever the registers hold.
    """
    sums, parameter, given, operand = n // 2, "uint64_t a", ['"l"(a)'], f"%{n // 2}"
    if a == "registers":
        parameter, given = "const uint32_t* a", [f'"r"(a[{i}])' for i in range(4)]
        operand = f"{{{', '.join(f'%{sums + i}' for i in range(4))}}}"
    count = len(given)
    flags = {"registers": "", "shared": ", 0", "transposed": ", 1"}[a] + f", {int(b == 'transposed')}" if halves else ""
    outputs = ", ".join(f'"{"=" if begins else "+"}f"(d[{i}])' for i in range(sums))
    inputs = ", ".join([*given, '"l"(b)', f'"n"({int(not begins)})'])
    registers = ", ".join(f"%{i}" for i in range(sums))
    k, types = (16, "f32.f16.f16") if halves else (32, "f32.e5m2.e4m3")
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{sums}], {parameter}, uint64_t b) {{\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{sums + count + 1}, 0; wgmma.mma_async.sync.aligned."\n'
        f'    "m64n{n}k{k}.{types} {{{registers}}}, {operand}, %{sums + count}, p, 1, 1{flags};}}"\n'
        f"    : {outputs} : {inputs});\n}}\n"
    )
