"""How the simulator follows an operator that is not PyTorch's own: through its Python body, or by what it declares.

An operator registered through ``torch.library`` is one call to a dispatch mode. Where it has a Python body, the body is
run under the simulator, so that its buffers are seen. Where it has none (CUDA C++, Triton), its outputs are booked and,
for as long as it runs, the workspace that was declared for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .private import python_body

#: What ``simulate(kernel=…)`` accepts: a row kernel running on a GPU, or the eager one running on the CPU.
KERNELS = ("cuda", "triton", "eager", "cpu")

# The library's own operators have one Python body for every kernel. These say for which kernels it is what really runs:
# on a GPU the mixed-precision product is one call of cuBLAS, whichever the row kernel is.
_BODY_RUNS_UNDER = {
    "flce_ref::cross_entropy_": ("eager", "cpu"),
    "flce_ref::merge_stats_": ("eager", "cpu"),
    "flce_ref::write_grad_": ("eager", "cpu"),
    "flce_ref::accumulate_product_": ("cpu",),
}

_workspaces: dict[str, Callable[..., int]] = {}


def declare_workspace(operator: str, size: Callable[..., int]) -> None:
    """Say how much memory an operator holds while it runs on a GPU, beyond its outputs.

    Args:
        operator: "namespace::name".
        size: called with the operator's arguments; returns bytes.

    Raises:
        ValueError: if ``operator`` has not that form.
    """
    if operator.count("::") != 1:
        raise ValueError(f"operator must be 'namespace::name', got {operator!r}")
    _workspaces[operator] = size


def workspace_bytes(operator: str, kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that ``operator`` holds beyond its outputs while it runs on these arguments; 0 if nothing was declared."""
    if operator == "aten::sum":
        return _sum(*args, **kwargs)
    size = _workspaces.get(operator) if kernel != "cpu" else None
    return 0 if size is None else int(size(*args, **kwargs))


def body_to_follow(operator: torch._ops.OpOverload, kernel: str) -> Callable[..., Any] | None:
    """The Python function to run in the place of ``operator``, or None if it is booked by its outputs."""
    if operator.namespace in ("aten", "prim", "prims"):
        return _logsumexp if operator is torch.ops.aten.logsumexp.default else None
    kernels = _BODY_RUNS_UNDER.get(operator._schema.name)
    if kernels is not None and kernel not in kernels:
        return None
    return python_body(operator, ("cpu",) if kernel == "cpu" else ("cuda", "cpu"))


def _logsumexp(values: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """``logsumexp`` as PyTorch computes it on every device (``logsumexp_out_impl`` in ReduceOps.cpp): with a copy."""
    shift = values.amax(dim, keepdim=True)
    result_shift = shift if keepdim else shift.squeeze(dim)
    magnitude = result_shift.abs()
    result_shift.masked_fill_(magnitude == torch.inf, 0)
    del magnitude
    return (values - shift).exp_().sum(dim, keepdim).log_().add_(result_shift)


def _sum(values: Tensor, *_args: object, dtype: torch.dtype | None = None, **_kwargs: object) -> int:
    """A sum of bools or narrow integers is the sum of an int64 copy (``make_reduction`` in ReduceOpsUtils.h)."""
    if values.is_floating_point() or values.is_complex() or values.dtype == (dtype or torch.int64):
        return 0
    return values.numel() * (dtype or torch.int64).itemsize


def _softmax_backward(grad: Tensor, *_args: object, **_kwargs: object) -> int:
    """On CUDA, grad · output is a tensor of its own (``softmax_backward_cuda_out`` in SoftMax.cu)."""
    return grad.numel() * grad.element_size()


def _flash_attention_backward(grad_out: Tensor, query: Tensor, key: Tensor, *_args: object, **_kwargs: object) -> int:
    """What FlashAttention-2's backward allocates beside dq, dk and dv (PyTorch's ``flash_attn/flash_api.cpp``).

    dq is accumulated in float32 (B, heads, N, head_dim), with N and head_dim rounded up to the kernel's tiles; the row
    sums of dO·O are float32 (B, heads, N); with grouped queries, dk and dv exist once per query head and are then
    summed.
    """
    batch, heads, tokens, head_dim = query.shape
    rows = batch * heads * _round_up(tokens, 128)
    expanded = 0
    if key.shape[1] != heads:
        expanded = 2 * batch * heads * key.shape[2] * head_dim * key.element_size()
    return rows * (_round_up(head_dim, 32) + 1) * 4 + expanded


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


declare_workspace("aten::_softmax_backward_data", _softmax_backward)
# On a CPU build fake tensors take the CPU's entry to the same algorithm; forward has the same outputs on both.
declare_workspace("aten::_scaled_dot_product_flash_attention_for_cpu_backward", _flash_attention_backward)
