"""Compile the launches of every operator, as they are planned, for GPUs that need not be there.

A script, because tests run interpreted. It prints a line for each kernel with the shared memory of a program, the
registers and spilled bytes of a lane, its narrow stores, and its multiply-adds in 16 bits; it ends with 1 if one does
not fit. With ``--few`` it compiles every kernel of every operator once, and each in all its kinds: one for each number
of warps and each choice of its switches and optional tensors.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from compiled_launches import TARGETS, Target, compiled, noted
from numerics import GLU_ACTIVATIONS

import fused_norm.kernels.fp8
import fused_norm.kernels.linear_4bit  # noqa: F401 -- registers operators that no public function loads
from fused_norm.kernels.backward import BackwardArguments, KernelBackward
from fused_norm.kernels.operator import OPERATORS, Operator
from fused_norm.kernels.plans import TABLES
from fused_norm.kernels.triton import devices
from fused_norm.kernels.triton.call import Call
from fused_norm.kernels.triton.launch import Launch
from fused_norm.kernels.vocabulary_head import launch_multiply
from fused_norm.spec import NormSpec

WIDTHS = (128, 1024, 2560, 4096, 5120, 8192, 16384, 40960)
RANKS = (256, 64, 16)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
IS_TRITON_39 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
SPILLED = {"sm_90": 232, "sm_120": 120, "gfx942": 224} if IS_TRITON_39 else {"sm_120": 56, "gfx942": 64}
"""Bytes that a lane may spill if it is more than ``FEW``: in two norms of 128 columns, and in rows in chunks with six
consumers. Two tiles in flight instead of three spill nothing, but are 3 to 7 % slower on an H200 under Triton 3.6."""
FEW = 48
NARROW = 4
"""The number of stores below 32 bits that a kernel may have: rows are written in wide stores."""
LLAMA = NormSpec("llama")
MOST_CONSUMERS, WIDEST_GATED, WIDEST_FP8 = 6, 8192, 32768

Called = tuple[str, str, Callable[[], Any]]
"""The name of an operator, a label of the call, and the call."""


class Used(NamedTuple):
    """What a kernel takes of its device: bytes for a program, registers of a lane, bytes that a lane spills.

    ``narrow``: its stores of fewer than 32 bits, as written in PTX. ``unrounded``: its multiply-adds in 16 bits, none
    of which a kernel writes: a compiler makes them of a product that should be rounded before the sum.
    """

    shared: int
    registers: int
    spilled: int
    narrow: int
    unrounded: int


def used_by(kernel: Any) -> Used:
    """What the compiler reports about a kernel."""
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        usage = dict(re.findall(r"^\s+\.(\w+):\s+(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
        return Used(shared, int(usage["vgpr_count"]), 4 * int(usage["vgpr_spill_count"]), 0, 0)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = dict(re.findall(r"(\w+):(\d+)", subprocess.run(command, capture_output=True, text=True).stdout))
    narrow = re.findall(r"st\.global\.[bu](?:8|16)\b", kernel.asm["ptx"])
    # Before sm_90, sums and products in 16 bits are multiply-adds too.
    fused = re.findall(r"\bfma\.rn\.b?f16", kernel.asm["ptx"]) if kernel.metadata.target.arch >= 90 else ()
    return Used(shared, int(usage["REG"]), int(usage["STACK"]), len(narrow), len(fused))


def forward_backward(name: str, way: str, *arguments: Any) -> Called:
    """A call that launches an operator's forward, once more if it can copy its weights, and its own backward."""
    operator = OPERATORS[name]
    if operator.takes_spec:
        arguments = *arguments[: operator.tensor_count], LLAMA, *arguments[operator.tensor_count :]

    def call() -> None:
        results = Call.at_once(operator.forward, *arguments, training=True)
        copied = operator.copied(arguments)
        if copied:
            Call.at_once(operator.forward, *arguments, training=True, copied=copied)
        if type(operator).backward is not Operator.backward:
            saved, facts = operator.save(arguments, results)
            outputs: list[Any] = [
                arguments[0] if result is None else result for result in results[: len(operator.outputs)]
            ]
            if "consumers" in operator.options:
                args = operator.by_name(arguments, results)
                wide = args.get("wide", 0)
                y, narrow = outputs[0], args["narrow"] if wide else outputs[0]
                outputs[0] = tuple(y if wide >> place & 1 else narrow for place in range(args["consumers"]))
            needed = [argument is not None for argument in arguments[: len(operator.gradients)]]
            Call.at_once(operator.backward, BackwardArguments(outputs, saved, facts, needed))

    return name, way, call


def rows_calls(width: int, dtype: torch.dtype) -> Iterator[Called]:
    """Yield calls of operators that sum rows of a width, except those that write FP8."""
    x, w = torch.empty(64, width, dtype=dtype), torch.empty(width, dtype=dtype)
    yield forward_backward("rms_norm", "", x, w, None)
    yield forward_backward("add_rms_norm", "", x, x, w, None, 1.0)
    yield forward_backward("norm_add", "", x, x, w)
    yield forward_backward("norm_add_norm", "", x, x, w, w)
    yield forward_backward("rms_norm_for_consumers", "", x, w, MOST_CONSUMERS, None, 0)
    yield forward_backward("add_rms_norm_for_consumers", "", x, x, w, 1.0, MOST_CONSUMERS, None, 0)
    yield forward_backward("norm_add_norm_for_consumers", "", x, x, w, w, MOST_CONSUMERS, None, 0)
    if dtype is torch.float32:
        mixed = MOST_CONSUMERS, torch.bfloat16, 0b101010  # half of the consumers are dropouts
        yield forward_backward("rms_norm_for_consumers", "in two dtypes", x, w, *mixed)
        yield forward_backward("add_rms_norm_for_consumers", "in two dtypes", x, x, w, 1.0, *mixed)
        yield forward_backward("norm_add_norm_for_consumers", "in two dtypes", x, x, w, w, *mixed)
    yield forward_backward("recomputed_norm", "", x, w, torch.empty(64, 1), None)
    if width <= WIDEST_GATED:
        yield forward_backward("gated_rms_norm", "norm first", x, x, w, "silu", True, 1)
        yield forward_backward("gated_rms_norm", "gate first", x, x, w, "silu", False, 1)


def heads_calls(width: int, dtype: torch.dtype) -> Iterator[Called]:
    """Yield calls on heads of a width, with angles of the same width and of half of it."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    w, q, k = empty(width), empty(1, 64, 32, width), empty(1, 64, 8, width)
    whole, part = empty(1, 64, width), empty(1, 64, width // 2)
    yield forward_backward("qk_norm", "", q, k, w, w, None, None, 2, None)
    yield forward_backward("qk_norm", "rotated", q, k, w, w, whole, whole, 2, None)
    yield forward_backward("qk_norm", "rotated in part", q, k, w, w, part, part, 2, None)
    yield forward_backward("rope", "", q, k, whole, whole, 2, False, "half", False, None)
    yield forward_backward("rope", "one rounding", q, k, whole.float(), whole.float(), 2, True, "half", False, None)
    for layout in ("interleaved", "deinterleaved"):
        for name, by_pair in (("", False), (", angles by pair", True)):
            options = 2, False, layout, by_pair, None
            yield forward_backward("rope", layout + name, q, k, whole, whole, *options)
    yield forward_backward("rope", "interleaved in part", q, k, part, part, 2, False, "interleaved", True, None)
    wide = whole.float()
    yield forward_backward("rope", "interleaved, one rounding", q, k, wide, wide, 2, True, "interleaved", False, None)


def loss_calls(dtype: torch.dtype) -> Iterator[Called]:
    """Yield calls of the head with its loss: plain, and with every option between the two."""
    x, weight, target = torch.zeros(8, 64, dtype=dtype), torch.zeros(20_000, 64, dtype=dtype), torch.arange(8)

    def call(*options: Any) -> Callable[[], Any]:
        def launch_all() -> None:
            arguments = x, weight, None, target, None, "mean", -100, *options, None, [True, True, False]
            loss, *gradients = Call.at_once(OPERATORS["linear_cross_entropy"].forward, *arguments, training=True)
            Call.at_once(launch_multiply, gradients[0], loss.reshape(1))

        return launch_all

    yield "linear_cross_entropy", "", call(0.0, None, None, True)
    yield "linear_cross_entropy", "capped", call(0.1, 0.5, 30.0, False)
    trained = [True, True, False]
    for way, uniform, logits in (
        ("", False, (None, None, None, False)),
        ("uniform", True, (None, None, None, False)),
        ("with every option", False, (0.7, 0.5, 30.0, False)),
        ("with every option, in fp32", True, (0.7, 0.5, 30.0, True)),
    ):
        for wanted in ([False] * 4, [True] * 4):
            options = -100, *logits, wanted, None, None, uniform, False, False, trained
            name = f"{way}{' and statistics' if wanted[0] else ''}"
            yield forward_backward("linear_log_probs", name, x, weight, None, target, *options)


def four_bit_calls(dtype: torch.dtype) -> Iterator[Called]:
    """Yield 4-bit linears with an adapter: scales quantised or not, common and largest block sizes."""
    x, (a, b) = torch.zeros(64, 4096, dtype=dtype), (torch.zeros(16, 4096), torch.zeros(64, 16))
    mask = torch.zeros(64, 4096, dtype=torch.bool)
    code, packed = torch.zeros(16), torch.zeros(64 * 4096 // 2, dtype=torch.uint8)
    for block in (64, 4096):
        scales = 64 * 4096 // block
        single = torch.zeros(scales), None, None, None
        double = (
            torch.zeros(scales, dtype=torch.uint8),
            torch.zeros(256),
            torch.zeros(-(-scales // 256)),
            torch.zeros(()),
        )
        for way, weight in (("", single), (" quantised twice", double)):
            options = 0.5, 1.1, 1.1, torch.bfloat16, dtype, block
            name = f"blocks of {block}{way}"
            for operator in ("lora_linear_4bit", "lora_summands_4bit"):
                yield forward_backward(operator, name, x, x, a, b, code, packed, *weight, None, None, *options)
                for rank in RANKS if block == 64 else ():
                    factors = torch.zeros(rank, 4096), torch.zeros(64, rank)
                    tensors = x, x, *factors, code, packed, *weight, None, mask
                    yield forward_backward(operator, f"{name}, dropout, rank {rank}", *tensors, *options)
            yield forward_backward(
                "linear_4bit", name, x, code, packed, *weight, None, 64, block, torch.bfloat16, dtype
            )


def conv_calls(dtype: torch.dtype) -> Iterator[Called]:
    """Yield causal convolutions with every number of taps."""
    x, bias = torch.empty(2, 100, 6144, dtype=dtype), torch.empty(6144, dtype=dtype)
    for taps in (2, 3, 4):
        weight = torch.empty(6144, taps, dtype=dtype)
        yield forward_backward("causal_conv1d", f"{taps} taps", x, weight, None, "silu")
        yield forward_backward("causal_conv1d", f"{taps} taps and bias", x, weight, bias, "silu")
        yield forward_backward("causal_conv1d", f"{taps} taps alone", x, weight, None, None)


def expert_calls(dtype: torch.dtype) -> Iterator[Called]:
    """Yield the operators around the products of experts, with 8 experts a token and widths of published models."""
    tokens, count = 64, 8
    position = torch.arange(tokens * count).view(tokens, count)
    absent = torch.zeros(tokens * count, dtype=torch.bool)
    for width in (768, 2880):
        x = torch.empty(tokens * count, 2 * width, dtype=dtype)
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield forward_backward("expert_gate", f"{activation} of {width}", x, absent, activation, False, None, None)
        yield forward_backward("expert_gate", f"clamped, {width} wide", x, absent, "silu", True, 7.0, 1.702)
    for width in (2880, 5760):
        bias, ends = torch.empty(32, width, dtype=dtype), torch.zeros(32, dtype=torch.int32)
        yield forward_backward("expert_bias", f"{width} wide", bias, torch.zeros(64, dtype=torch.int64), ends)
    for width in (2048, 2880, 7168):
        hidden, rows = (torch.empty(count, width, dtype=dtype) for count in (tokens, tokens * count))
        weights = torch.empty(tokens, count)
        yield forward_backward("expert_permute", f"{width} wide", hidden, position, absent)
        yield forward_backward("expert_unpermute", f"{width} wide", rows, weights, position, absent, dtype)


def fp8_calls(width: int, dtype: torch.dtype) -> Iterator[Called]:
    """Yield operators that write FP8, on rows of a width."""
    x, w = torch.empty(256, width, dtype=dtype), torch.empty(width, dtype=dtype)
    codes, scales = torch.empty(256, width, dtype=torch.float8_e4m3fn), torch.empty(256, width // 16)
    for name in ("tensorwise", "rowwise", "block128", "mxfp8"):
        yield forward_backward("norm_fp8", name, x, None, w, codes, scales, 1.0, name)

    for columns in (width, WIDEST_FP8):  # the widest codes become numbers first
        yield "norm_fp8", f"backward of {columns} codes", partial(Call.at_once, codes_backward, columns, dtype)


def codes_backward(call: Call, width: int, dtype: torch.dtype) -> None:
    """Build the backward of a norm of codes, which is no launch of its operator's own."""
    dy, w = torch.empty(256, width, dtype=dtype), torch.empty(width, dtype=dtype)
    codes, scales = torch.empty(256, width, dtype=torch.float8_e4m3fn), torch.empty(256, width // 16)
    saved, facts = (codes, scales, w, torch.empty(256, 1)), (LLAMA, dtype, dtype, 1.0, False)
    given = BackwardArguments((None, None, dy, None, None), saved, facts, (True, False, True))
    OPERATORS["norm_fp8"].compute_grads(KernelBackward(call), given)


def calls(target: Target, widths: Sequence[int], dtype: torch.dtype) -> Iterator[Called]:
    """Yield all operators that a target runs, for rows and, up to 256 elements, heads of these widths."""
    x, kind = torch.empty(64, 4096, dtype=dtype), target.architecture
    for activation in GLU_ACTIVATIONS:  # all widths have the same kernels
        yield forward_backward("glu", activation, x, x, activation)
        yield forward_backward("glu", f"{activation} of halves", x, None, activation)
        if dtype == torch.float32:
            summand = torch.empty(64, 4096, dtype=torch.bfloat16)
            for way, factors in (("", (x, x, None, None)), (" of sums", (summand,) * 4)):
                for wide in (0, 2):
                    name = f"{activation}{way}{' in two dtypes' if wide else ''}"
                    yield forward_backward("glu_for_consumers", name, *factors, activation, 2, torch.bfloat16, wide)
    for rank in RANKS:
        a, b = torch.empty(rank, 4096, dtype=dtype), torch.empty(1024, rank, dtype=dtype)
        for rows in (64, 8192):  # tiles of few rows and of many
            base, x16 = torch.empty(rows, 1024, dtype=dtype), torch.empty(rows, 4096, dtype=torch.bfloat16)
            yield forward_backward("lora_add", f"rank {rank}, {rows} rows", base, x16, a, b, 0.5)
            mask = torch.zeros(rows, 4096, dtype=torch.bool)
            w = torch.empty(1024, 4096, dtype=torch.bfloat16)
            options = 0.5, 1.1, 1.1, torch.bfloat16
            for way, given in (("", None), (", dropout", mask)):
                name = f"rank {rank}, {rows} rows{way}"
                yield forward_backward("lora_linear", name, x16, x16, a, b, w, None, given, *options)
    yield from four_bit_calls(dtype)
    yield from loss_calls(dtype)
    yield from conv_calls(dtype)
    yield from expert_calls(dtype)
    for width in widths:
        several = [*rows_calls(width, dtype)]
        if width <= 256:
            several += heads_calls(width, dtype)
        if kind.backend == "cuda" and int(kind.arch) >= 89 and width <= WIDEST_FP8:
            several += fp8_calls(width, dtype)
        for operator, way, call in several:
            yield operator, f"{width} wide {way}".strip(), call


def plans_of(name: str, widths: Sequence[int]) -> Iterator[tuple[Any, Sequence[int]]]:
    """Return the rules for these widths, and the plan tables that devices of the same architecture have for them."""
    rules, *tables = TABLES
    yield rules, widths
    for table in tables:
        if name == f"sm_{table.capability.replace('.', '')}":
            yield table, sorted({rule.widest for several in table.rows.values() for rule in several})


def kinds_of(operator: str, launch: Launch) -> set[Any]:
    """What a kernel is compiled for once if few are asked for."""
    switches = {key: value for key, value in launch.constants.items() if isinstance(value, bool | str | None)}
    absent = [tensor is None for tensor in launch.tensors]
    return {(operator, launch.name), f"{launch.name} {launch.options} {switches} {absent}"}


def compile_all(
    name: str, only: Sequence[str], table: Any, widths: Sequence[int], dtype: torch.dtype, seen: set[Any] | None
) -> bool:
    """Compile for a target with a plan table, print what each kernel uses, and return whether all of them fit.

    ``seen``: the kinds that were compiled already, each of which is left out; None compiles all.
    """
    target, fit = TARGETS[name], True
    devices._hardware_of = lambda device: target.device
    for operator, way, call in calls(target, widths, dtype):
        if operator not in only:
            continue
        with devices.use_plans(table), noted() as launches:
            call()
        for launch in launches:
            if seen is not None:
                if (kinds := kinds_of(operator, launch)) <= seen:
                    continue
                seen |= kinds
            used = used_by(compiled(launch, target))
            fits = used.shared <= target.device.shared_memory and used.spilled <= SPILLED.get(name, FEW)
            fits &= used.narrow <= NARROW and not used.unrounded
            fit &= fits
            line = f"{name} {operator} {way}, {dtype}, {launch.name}: {used}"
            sys.stdout.write(line + ("\n" if fits else " does not fit\n"))
    return fit


def main() -> int:
    """Compile what the arguments ask for and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of rows and, up to 256, of heads")
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16", "float32"), help="of all tensors")
    parser.add_argument("--only", nargs="+", default=sorted(OPERATORS), metavar="OPERATOR", help="by name")
    parser.add_argument("--few", action="store_true", help="compile each kernel once in each of its kinds")
    asked = parser.parse_args()
    fit, seen = True, {name: set() if asked.few else None for name in asked.targets}
    for name, dtype in product(asked.targets, asked.dtypes):
        for table, widths in plans_of(name, asked.widths):
            fit &= compile_all(name, asked.only, table, widths, getattr(torch, dtype), seen[name])
    return not fit


if __name__ == "__main__":
    sys.exit(main())
