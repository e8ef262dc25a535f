"""The backward of a norm that has read FP8 codes, in Triton, and its launcher.

``language`` and ``codes`` have the names that kernels use; s are the numbers that codes and scales stand for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec import NormSpec
from ..plans import WIDEST_BACKWARD, backward_plan
from ..triton.devices import device_facts
from ..triton.language import input_grad, let_next_begin, load_gamma, load_tile, rows_of, store_tile
from ..triton.launch import launch
from ..triton.memory import INT32_LIMIT, contiguous, same_rows
from ..triton.norm_backward import NormGradients, NormSaved, launch_norm_backward
from ..triton.weight_grad import sum_shares
from .cast import numbers_of
from .codes import load_input


@triton.jit(do_not_specialize=["M"])
def _backward_from_codes_kernel(
    dy_ptr,  # [M, N]
    codes_ptr,  # [M, N]
    codes_scale_ptr,  # [M, N / 16]
    w_ptr,  # [N] or None
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, N] or None
    shares_ptr,  # [programs, N] fp32 or None: each program's share of dw
    M,
    dy_stride, codes_stride, codes_scale_stride, dx_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
    LONG: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    in_row = col < N
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, ROWS, LONG)
        live = (row < M)[:, None] & in_row[None, :]
        s = load_input((codes_ptr, codes_stride), (codes_scale_ptr, codes_scale_stride), row, col, 0, M, N, ROWS, BLOCK)
        dy = load_tile((dy_ptr, dy_stride), row, col, live)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        if shares_ptr is not None:
            dw += dy * (s * rstd)
        if dx_ptr is not None:
            g = dy
            if w_ptr is not None:
                g = g * load_gamma(w_ptr, col, in_row, SPEC)
            store_tile((dx_ptr, dx_stride), row, col, live, input_grad(g, s, rstd, N))
    let_next_begin(OVERLAPS)
    if shares_ptr is not None:
        tl.store(shares_ptr + program.to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=in_row)


def launch_backward_from_codes(
    spec: NormSpec,
    dy: Tensor,
    codes: Tensor,
    codes_scale: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
) -> None:
    """Write the gradients asked for: ``dx``, contiguous in the shape of ``codes``, and ``dw`` [N]."""
    size, width = codes.numel(), codes.shape[-1]
    if size == 0 or width > WIDEST_BACKWARD:
        saved = NormSaved(dy, None, numbers_of(codes, codes_scale), weight, rstd)
        launch_norm_backward(spec, saved, NormGradients(dx, None, dw))
        return
    rows = size // width
    # rstd lies as the forward has counted rows; so does dx.
    (rstd, dy, codes, codes_scale, dx), spacing = same_rows(rstd, dy, codes, codes_scale, dx)  # type: ignore[assignment]
    device = device_facts(codes.device)
    # Planned as with a residual's gradient: codes and scales are two more tensors in flight beside dy, and one piece
    # holds a row.
    plan = backward_plan(width, dy.element_size() + 2 * codes.element_size(), device, summed=True)
    constants = {
        "N": width, "ROWS": plan.rows, "BLOCK": plan.block, "STAGES": plan.stages,
        "OVERLAPS": dw is not None and device.overlaps, "LONG": rows * max(spacing) >= INT32_LIMIT,
        "SPEC": spec.without_eps(),
    }  # fmt: skip
    programs = -(-rows // plan.rows)
    if dw is not None:
        programs = min(programs, plan.programs)
    shares = None if dw is None else dw.new_empty((programs, width), dtype=torch.float32)
    tensors = (dy, codes, codes_scale, contiguous(weight), rstd, dx, shares)
    launch(_backward_from_codes_kernel, (programs, 1), tensors, (rows, *spacing[1:]), constants, warps=plan.warps)
    if shares is not None:
        sum_shares(shares, dw, None, programs, plan.programs, device)
