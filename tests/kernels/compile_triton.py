"""Compiles every Triton kernel for a Hopper GPU, which need not be there, and prints what came of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from verdraft.kernels import triton_attention, triton_linear, triton_ops, triton_sampling

HOPPER = GPUTarget("cuda", 90, 32)
ALIGNED = ("*bf16", "*fp16", "*fp32", "*i8", "*fp8e4nv", "i32")  # as a real model's tensors and widths are
TYPES = ("bf16", "fp16", "fp32")
Constants = Mapping[str, int | bool]


def kernels(dtype: str) -> Iterator[tuple[Any, str, Constants]]:
    """A kernel, the types of its other arguments in their order (x: a pointer to `dtype`), and its constants."""
    heads = {"GROUP": 4, "KV_HEADS": 8, "PAGE": 16, "BLOCK_M": 64, "BLOCK_K": 32 if dtype == "fp32" else 64}
    attend = "x x x x *i32 *i32 *i32 *i64 *i32 fp32 i32 i32 i32 i32"
    for dim, tree in ((64, False), (128, False), (128, True)):
        yield triton_attention._attend, attend, {**heads, "ROWS": 64, "DIM": dim, "WIDTH": dim, "TREE": tree}
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32 if dtype == "fp32" else 128, "SWIZZLE": 8}
    for weight, scale, group in (("x", "x", 0), ("*i8", "*fp16", 32), ("*fp8e4nv", "*fp32", 0)):
        scaling = {"GROUP": group, "WHOLE": scale == "*fp32", "BIAS": True}
        yield triton_linear._linear, f"x {weight} {scale} x x i32 i32 i32 i32", {**tiles, **scaling}
    for add in (False, True):
        yield triton_ops._rms_norm, "x x x x i32 i32 i32 fp32", {"BLOCK": 4096, "ADD": add}
    yield triton_ops._silu_mul, "x x i32 i32", {"BLOCK": 1024}
    rope = "x x x x x *i64 *fp32 *fp32 i32 i32 i32 i32 i32 i32"
    for store in (False, True):
        yield triton_ops._rope, rope, {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64, "STORE": store}
    yield triton_ops._write, "x x x x *i64 i32 i32 i32 i32 i32", {"DIM": 128, "BLOCK": 128}
    row = "*i64 *fp64 *fp64 *i64 *i64 *i64"
    for logits, reduced, margins in (("x", False, False), ("x", True, False), ("*fp64", False, True)):
        kind = {"BLOCK": 2048, "REDUCED": reduced}
        best = f"{logits} {row} *fp64 *fp64 *i64 i32 i32"
        yield triton_sampling._best_of_block, best, {**kind, "MARGINS": margins}
        yield triton_sampling._best_of_row, "*fp64 *fp64 *i64 *fp64 *i64 *fp64 i32", {"BLOCK": 64, "MARGINS": margins}
        yield triton_sampling._best_kept, f"{logits} {row} *fp64 *i64 *i64 fp32 i32 i32", {**kind, "NEITHER": -2}
    for count in (16, 256):
        yield triton_ops._move, "x x *i64 *i64 i32 i32", {"COUNT": count, "BLOCK": 32}


def main() -> None:
    for dtype in TYPES:
        for kernel, types, constants in kernels(dtype):
            others = iter(types.replace("x", f"*{dtype}").split())
            signature = {name: "constexpr" if name in constants else next(others) for name in kernel.arg_names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind in ALIGNED}
            source = ASTSource(kernel, signature, dict(constants), aligned)
            done = compile(source, target=HOPPER, options={"enable_fp_fusion": False})
            size = len(done.asm["cubin"])
            print(f"{kernel.__name__} {dtype}: cubin of {size} bytes, {done.metadata.shared} bytes of shared memory")


if __name__ == "__main__":
    main()
