"""Check every kernel's machine code without a GPU: `python benchmarks/aot.py [--cuda-library FILE] [--json FILE]`.

Compiles every Triton kernel ahead of time for sm_80, sm_90 and sm_100 (and reads the CUDA kernels out of a built
library), disassembles, and checks each against the table below: no spills (local loads or stores), 128-bit global loads
where required, registers under a cap, shared memory that the architecture has. Exit 1 with a line per breach. Needs the
triton wheel: its cuobjdump and nvdisasm.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ARCHS = (80, 90, 100)


@dataclass(frozen=True)
class Code:
    """What one kernel compiled to for one architecture; loads are counted in instructions; one that it should have.

    shared: bytes of shared memory of a program.
    """

    kernel: str
    arch: int
    registers: int
    spills: int
    wide_loads: int
    all_loads: int
    absent: str = ""
    shared: int = 0


@dataclass(frozen=True)
class Limit:
    """Requirements of a kernel: registers at most, global loads of 128 bits at least, narrower loads at most.

    spills: at most, where a GPU showed that the kernel is faster with them.
    """

    registers: int
    wide_loads: int
    narrow_loads: int = 0
    spills: int = 0


@dataclass(frozen=True)
class Case:
    """A Triton kernel as it is launched: its constexprs, warps and requirements; an instruction it must have."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    num_warps: int
    limit: Limit
    least_arch: int = 80
    instruction: str = ""
    last_arch: int = ARCHS[-1]
    num_stages: int = 3

    @property
    def archs(self) -> list[int]:
        return [arch for arch in ARCHS if self.least_arch <= arch <= self.last_arch]


# Argument types of the kernels by name; other pointers are bf16, other arguments i32.
TYPES = {"target_ptr": "*i64"}
TYPES |= dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr", "cos_ptr", "sin_ptr", "flat_ptr"), "*fp32")
TYPES |= dict.fromkeys(("stats_ptr", "lse_ptr", "scale_ptr", "partial_ptr", "multiplier_ptr", "param_ptr"), "*fp32")
TYPES |= dict.fromkeys(("codes_ptr", "second_codes_ptr"), "*fp8e4nv") | {"second_scale_ptr": "*fp32"}
TYPES |= dict.fromkeys(("exp_avg_ptr", "exp_avg_sq_ptr"), "*fp32")
TYPES |= {"dq_weight_ptr": "*fp32", "dk_weight_ptr": "*fp32"}
TYPES |= {"main_grad_ptr": "*fp32", "tiles_ptr": "*i32", "ends_ptr": "*i32", "words_ptr": "*i32", "keep_ptr": "*i1"}
TYPES |= dict.fromkeys(("written_ptr", "reads_ptr", "kept_ptr", "left_ptr", "held_ptr", "states_ptr"), "*fp32")
TYPES |= dict.fromkeys(("new_ptr", "last_ptr", "dstates_ptr", "dnew_ptr", "dlast_ptr", "after_ptr"), "*fp32")
TYPES |= dict.fromkeys(("dwritten_ptr", "dheld_ptr", "dsum_ptr", "weights_ptr", "dweights_ptr"), "*fp32")
TYPES |= dict.fromkeys(("starts_ptr", "order_ptr", "inverse_ptr"), "*i64")
TYPES |= dict.fromkeys(("eps", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2"), "fp32")
TYPES |= dict.fromkeys(("decay", "step_size", "inv_sqrt_correction"), "fp32")


# Bytes of shared memory that a program may take (CUDA C++ Programming Guide, technical specifications).
_SHARED = {80: 166912, 90: 232448, 100: 232448}
TO_FP8 = "F2FP.SATFINITE.E4M3"


def triton_cases() -> list[Case]:
    """Every Triton kernel in the shapes of a Llama-8B bf16 step; the norms at GPT-3 175B's width too."""
    from megalite.core.parts.kernels.triton import activation, cross_entropy, dropout, flat, norm, qk_norm, rope

    cases, no_codes = [], {"GROUP": 0, "LARGEST": 448.0}
    for name, width, rms, forward, backward in (
        ("add_rmsnorm", 4096, True, Limit(48, 6), Limit(96, 8, 1)),
        ("add_rmsnorm_wide", 12288, True, Limit(48, 6), Limit(112, 14, 1)),
        ("add_layernorm", 4096, False, Limit(48, 8), Limit(128, 8, 2)),
        ("add_layernorm_wide", 12288, False, Limit(48, 8), Limit(128, 14, 2)),
        ("add_rmsnorm_heads", 128, True, Limit(48, 4, 1), Limit(96, 6, 3)),
        ("add_layernorm_heads", 64, False, Limit(48, 6), Limit(128, 7, 4)),
    ):
        constants: dict[str, Any] = {"RMS": rms, "RESIDUAL": True}
        tile, block, warps = norm.norm_launch(width)
        case = {**constants, **no_codes, "ROWS": tile, "BLOCK": block}
        cases.append(Case(name, norm.norm_forward_kernel, case, warps, forward))
        for group in (128, 32) if name == "add_rmsnorm" else ():
            case = {**case, "GROUP": group}
            limit = replace(forward, registers=forward.registers + 48)
            cases.append(Case(f"{name}_fp8_{group}", norm.norm_forward_kernel, case, warps, limit, 89, TO_FP8))
        chunks, tile, block, warps = norm.backward_launch(width)
        constants |= {"CHUNKS": chunks, "ROWS": tile, "BLOCK": block}
        cases.append(Case(f"{name}_backward", norm.norm_backward_kernel, constants, warps, backward))
    finish = {"ADD": True, "BLOCK_ROWS": norm.FINISH_ROWS, "BLOCK": norm.FINISH_WIDTH}
    cases.append(Case("norm_finish", norm.norm_finish_kernel, finish, 4, Limit(48, 4, 1)))
    tile, block, warps = norm.norm_launch(128)
    heads = {"QUERIES": 32, "NORMED": 36, "HEADS": 40, "ROWS": tile, "BLOCK": block}
    cases.append(Case("qk_norm", qk_norm.qk_norm_forward_kernel, heads, warps, Limit(64, 2, 2)))
    cases.append(Case("qk_norm_backward", qk_norm.qk_norm_backward_kernel, heads, warps, Limit(128, 4, 4)))
    rotary = {"INVERSE": False, "COPY_REST": False, "BLOCK_HEADS": 32, "BLOCK_HALF": 64, "BLOCK_REST": 1}
    cases.append(Case("rope", rope.rope_kernel, rotary, 4, Limit(64, 8)))
    packed = {"BLOCK_HEADS": 16, "BLOCK_HALF": 64, "BLOCK_REST": 1, "HAS_REST": False}
    cases.append(Case("rope_pack", rope.rope_pack_kernel, packed, 4, Limit(64, 10)))
    for kind, label in ((0, "silu"), (1, "gelu"), (2, "gelu_tanh"), (3, "clamped")):
        constants = {"KIND": kind, "BLOCK": 1024}
        plain = {**constants, **no_codes, "WEIGHTS": False}
        cases.append(Case(f"glu_{label}", activation.glu_forward_kernel, plain, 4, Limit(40, 2)))
        if "gelu" not in label:
            weighed = {**plain, "WEIGHTS": True}
            cases.append(Case(f"weighed_glu_{label}", activation.glu_forward_kernel, weighed, 4, Limit(40, 2, 1)))
            backward = activation.weighed_glu_backward_kernel
            cases.append(Case(f"weighed_glu_{label}_backward", backward, constants, 4, Limit(64, 3, 1)))
        for group in (128, 32) if label == "silu" else ():
            case = {**plain, "GROUP": group}
            cases.append(
                Case(f"glu_{label}_fp8_{group}", activation.glu_forward_kernel, case, 4, Limit(64, 2), 89, TO_FP8)
            )
        cases.append(Case(f"glu_{label}_backward", activation.glu_backward_kernel, constants, 4, Limit(48, 3)))
        if "gelu" in label:
            cases.append(Case(label, activation.gelu_forward_kernel, constants, 4, Limit(40, 1)))
            cases.append(Case(f"{label}_backward", activation.gelu_backward_kernel, constants, 4, Limit(48, 2)))
    adamw = {"HAS_OUT": True, "HAS_MULTIPLIER": True, "BLOCK": 1024}
    return [
        *cases,
        *_quantizing_cases(),
        *_product_cases(),
        *_delta_cases(),
        *_combine_cases(),
        Case("ce_stats", cross_entropy.stats_kernel, {"BLOCK": 4096}, 8, Limit(48, 2, 2)),
        Case("ce_grad", cross_entropy.grad_kernel, {"BLOCK": 2048}, 8, Limit(32, 1, 3)),
        Case("adamw_triton", flat.adamw_kernel, adamw, 4, Limit(56, 7, 1)),
        Case("keep_mask", dropout.keep_mask_kernel, {"BLOCK": 1024}, 4, Limit(40, 0, 2)),
        Case("stochastic_round", flat.stochastic_round_kernel, {"BLOCK": 1024}, 4, Limit(40, 2)),
        Case("sum_squares_triton", flat.sum_squares_kernel, {"BLOCK": 4096}, 8, Limit(48, 4)),
    ]


def _quantizing_cases() -> list[Case]:
    from megalite.core.parts.kernels.triton import fp8

    cases = []
    for name, tile, square, warps in (
        ("fp8_rows_of_128", (32, 128), False, 4),
        ("fp8_rows_of_32", (128, 32), False, 4),
        ("fp8_square_of_128", (128, 128), True, 16),
    ):
        shape = {"LARGEST": 448.0, "SQUARE": square, "ROWS": tile[0], "COLUMNS": tile[1]}
        for suffix, unit in (("", "column_stride"), ("_transposed", "row_stride")):
            case = {**shape, unit: 1}
            cases.append(Case(name + suffix, fp8.quantize_kernel, case, warps, Limit(128, 4), 89, TO_FP8))
    for name, by_row, unit in (("fp8_cast_rows", 1, "column_stride"), ("fp8_cast_tensor_transposed", 0, "row_stride")):
        case = {"LARGEST": 448.0, "BY_ROW": by_row, "ROWS": 32, "COLUMNS": 128, unit: 1}
        cases.append(Case(name, fp8.cast_kernel, case, 4, Limit(128, 4, 8), 89, TO_FP8))
    return cases


def _product_cases() -> list[Case]:
    from megalite.core.parts.kernels.triton import fp8_product, grouped

    cases = []
    # On sm_100 accumulators lie in the tensor memory: other instructions.
    for arch, instruction in ((90, "QGMMA"), (100, "UTCQMMA")):
        for together in (1, 128):
            case = {"SECOND_ROWS": together, "WIDEN": False, "SIDE": 128, "GROUP": 128}
            name = f"fp8_product_{together}_sm_{arch}"
            kernel, limit = fp8_product.block_product_kernel, Limit(255, 24, 48)
            cases.append(Case(name, kernel, case, 8, limit, arch, instruction, last_arch=arch))
    for arch, instruction in ((80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")):
        tile = {"WIDEN": False, "SIDE": 128, "INNER": 64}
        for name, kernel, flags, limit in (
            ("grouped_linear", grouped.grouped_product_kernel, {"TRANSPOSED": True}, Limit(192, 24, 12)),
            ("grouped_dgrad", grouped.grouped_product_kernel, {"TRANSPOSED": False}, Limit(192, 24, 12)),
            ("grouped_wgrad", grouped.grouped_wgrad_kernel, {"ADD": True}, Limit(255, 40, 12, 192)),
        ):
            constants, warps = {**tile, **flags}, 4 if name == "grouped_wgrad" else 8
            cases.append(Case(f"{name}_sm_{arch}", kernel, constants, warps, limit, arch, instruction, last_arch=arch))
    return cases


def _delta_cases() -> list[Case]:
    """A delta net's kernels with heads of 128."""
    from megalite.core.parts.kernels.triton import conv, delta

    scan = {"CHUNK": 64, "WIDTH": 128, "COLUMNS": 32, "PRECISION": "tf32"}
    rows = {"STARTS": True, "WIDTH": 4, "ROWS": 16, "CHANNELS": 128}
    return [
        Case("delta_states", delta.delta_states_kernel, scan, 8, Limit(255, 8, 120), num_stages=2),
        Case(
            "delta_states_backward",
            delta.delta_states_backward_kernel,
            {**scan, "DSTATES": True, "DNEW": True},
            8,
            Limit(255, 8, 120),
            num_stages=2,
        ),
        Case("causal_conv", conv.causal_conv_kernel, rows, 4, Limit(128, 4, 99)),
        Case("causal_conv_sums", conv.causal_conv_sums_kernel, {**rows, "PASSES": 4}, 4, Limit(168, 4, 99)),
        Case("causal_conv_dx", conv.causal_conv_dx_kernel, rows, 4, Limit(128, 4, 99)),
    ]


def _combine_cases() -> list[Case]:
    """The rows of a token for eight experts."""
    from megalite.core.parts.kernels.triton import combine

    sizes = {"K": 8, "BLOCK": 1024}
    return [
        Case("spread_rows", combine.spread_kernel, {**sizes, "WEIGHTS": True}, 4, Limit(64, 1, 8)),
        Case("combine_rows", combine.combine_kernel, {**sizes, "WEIGHTS": True}, 4, Limit(96, 8, 24)),
        Case("expert_weights_grad", combine.weights_grad_kernel, sizes, 4, Limit(96, 2, 24)),
    ]


# Kernels of the CUDA library by a pattern of their demangled names; the first match counts. A kernel that takes its
# operands one element at a time (kVec = 1: unaligned buffers) needs no wide loads.
CUDA_LIMITS: tuple[tuple[str, Limit], ...] = (
    (r"adamw_kernel<.*, 1>", Limit(40, 0, 99)),
    (r"adamw_kernel<float, .*, 4>", Limit(56, 4, 99)),
    (r"adamw_kernel<.*, 8>", Limit(72, 7, 99)),
    (r"direction_kernel<.*, 1>", Limit(40, 0, 99)),
    (r"direction_kernel<float, 4>", Limit(56, 4, 99)),
    (r"direction_kernel<.*, 8>", Limit(72, 7, 99)),
    (r"apply_kernel<.*, 1>", Limit(48, 0, 99)),
    (r"apply_kernel<.*, 4>", Limit(56, 2, 99)),
    (r"sum_squares_kernel<.*, 1>", Limit(48, 0, 99)),
    (r"sum_squares_kernel<", Limit(64, 2, 99)),
    (r"finish_kernel", Limit(48, 0, 99)),
)


def nvidia_tool(name: str) -> str:
    """Path of a tool that comes in the Triton wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def disassemble(binary: Path) -> Iterator[tuple[int, str, int, list[str]]]:
    """(architecture, mangled kernel name, registers, opcodes) of every kernel in a cubin or a shared library."""
    tool = nvidia_tool("cuobjdump")
    usage = subprocess.run([tool, "-res-usage", str(binary)], check=True, capture_output=True, text=True).stdout
    sass = subprocess.run([tool, "-sass", str(binary)], check=True, capture_output=True, text=True).stdout
    registers: dict[tuple[int, str], int] = {}
    arch = 0
    function = ""
    for line in usage.splitlines():
        if found := re.search(r"arch = sm_(\d+)", line):
            arch = int(found[1])
        elif found := re.search(r"Function (\S+):", line):
            function = found[1]
        elif found := re.search(r"REG:(\d+)", line):
            registers[arch, function] = int(found[1])
    codes: dict[tuple[int, str], list[str]] = {}
    elf_arch = 0
    for line in sass.splitlines():
        if found := re.search(r"arch = sm_(\d+)", line):
            elf_arch = int(found[1])
        elif found := re.search(r"Function : (\S+)", line):
            codes[elf_arch, found[1]] = []
            opcodes = codes[elf_arch, found[1]]
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)", line):
            opcodes.append(found[1])
    for (sm, name), ops in codes.items():
        # A bare cubin's usage listing names no architecture.
        count = registers.get((sm, name), registers.get((0, name)))
        if count is None:
            raise RuntimeError(f"no register count for {name} on sm_{sm} in {binary}")
        yield sm, name, count, ops


def to_code(name: str, arch: int, registers: int, opcodes: list[str]) -> Code:
    loads = [op for op in opcodes if op.startswith("LDG")]
    wide = [op for op in loads if ".128" in op or ".256" in op]
    spills = [op for op in opcodes if op.startswith(("LDL", "STL"))]
    return Code(name, arch, registers, len(spills), len(wide), len(loads))


def compile_triton(case: Case, arch: int) -> Code:
    """Compile one case for one architecture with every pointer and size divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # A kernel that writes codes only for some callers gets another pointer from others.
    signature, types = {}, {**TYPES, "codes_ptr": "*bf16"} if case.constants.get("GROUP") == 0 else TYPES
    for name in case.kernel.arg_names:
        if name in case.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind == "i32" or kind.startswith("*")
    }
    source = ASTSource(case.kernel, signature, dict(case.constants), divisible)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        (_, _, registers, opcodes) = next(disassemble(cubin))
    absent = "" if any(op.startswith(case.instruction) for op in opcodes) else case.instruction
    return replace(to_code(case.name, arch, registers, opcodes), absent=absent, shared=compiled.metadata.shared)


def read_cuda(library: Path) -> list[tuple[Code, Limit]]:
    """Every kernel of a CUDA library with its limit; a kernel without a limit in the table is an error."""
    found = list(disassemble(library))
    mangled = "\n".join(name for _, name, _, _ in found)
    names = subprocess.run(["c++filt"], input=mangled, check=True, capture_output=True, text=True).stdout.splitlines()
    checked = []
    for (arch, _, registers, opcodes), name in zip(found, names):
        short = name.replace("megalite::(anonymous namespace)::", "").removeprefix("void ").split("(")[0]
        limits = [limit for pattern, limit in CUDA_LIMITS if re.search(pattern, short)]
        if not limits:
            raise RuntimeError(f"{short} has no line in CUDA_LIMITS")
        checked.append((to_code(short, arch, registers, opcodes), limits[0]))
    return checked


def breaches(code: Code, limit: Limit) -> list[str]:
    """Return one line per broken requirement."""
    where = f"{code.kernel} sm_{code.arch}"
    narrow, shared = code.all_loads - code.wide_loads, _SHARED.get(code.arch, min(_SHARED.values()))
    rules: tuple[tuple[bool, Callable[[], str]], ...] = (
        (code.spills <= limit.spills, lambda: f"{code.spills} spill instructions, allowed {limit.spills}"),
        (code.shared <= shared, lambda: f"{code.shared} bytes of shared memory, of {shared}"),
        (code.registers <= limit.registers, lambda: f"{code.registers} registers, cap {limit.registers}"),
        (code.wide_loads >= limit.wide_loads, lambda: f"{code.wide_loads} 128-bit loads, required {limit.wide_loads}"),
        (not code.absent, lambda: f"no {code.absent}"),
        (narrow <= limit.narrow_loads, lambda: f"{narrow} loads below 128 bits, allowed {limit.narrow_loads}"),
    )
    return [f"{where}: {message()}" for kept, message in rules if not kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cuda-library", type=Path, help="a built _native_cuda.so to check as well")
    parser.add_argument("--json", type=Path, help="write the table there")
    parser.add_argument("--only", default="", help="only Triton kernels whose name contains this")
    args = parser.parse_args()
    checked = [(compile_triton(c, a), c.limit) for c in triton_cases() if args.only in c.name for a in c.archs]
    if args.cuda_library:
        checked += read_cuda(args.cuda_library)
    print(f"{'kernel':44} {'arch':>6} {'regs':>5} {'cap':>4} {'spills':>6} {'128-bit':>7} {'loads':>5}")
    for code, limit in checked:
        print(
            f"{code.kernel:44.44} {f'sm_{code.arch}':>6} {code.registers:5} {limit.registers:4} "
            f"{code.spills:6} {code.wide_loads:7} {code.all_loads:5}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(code) for code, _ in checked], indent=1))
    broken = [line for code, limit in checked for line in breaches(code, limit)]
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(checked)} kernels, {len(broken)} broken requirements")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
