"""Assignment 4, the reference solution: a row kernel in Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_kernel(logits, row_stride, target, loss, ignore_index, V: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row of logits (C, V): its loss, and the row overwritten by its gradient."""
    row = tl.program_id(0).to(tl.int64)
    z_row = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    y = tl.load(target + row)
    if y == ignore_index:
        tl.store(loss + row, 0.0)
        for start in range(0, V, BLOCK):
            column = start + columns
            zeros = tl.zeros([BLOCK], tl.float32)
            tl.store(z_row + column, zeros.to(logits.dtype.element_ty), mask=column < V)
    else:
        row_max = tl.full([], -3.4e38, tl.float32)
        sumexp = tl.zeros([], tl.float32)
        for start in range(0, V, BLOCK):
            column = start + columns
            z = tl.load(z_row + column, mask=column < V, other=-float("inf")).to(tl.float32)
            new_max = tl.maximum(row_max, tl.max(z, 0))
            sumexp = sumexp * tl.exp(row_max - new_max) + tl.sum(tl.exp(z - new_max), 0)
            row_max = new_max
        z_y = tl.load(z_row + y).to(tl.float32)
        tl.store(loss + row, tl.log(sumexp) - (z_y - row_max))
        for start in range(0, V, BLOCK):
            column = start + columns
            z = tl.load(z_row + column, mask=column < V, other=-float("inf")).to(tl.float32)
            p = tl.exp(z - row_max) / sumexp
            gradient = p - tl.where(column == y, 1.0, 0.0)
            tl.store(z_row + column, gradient.to(logits.dtype.element_ty), mask=column < V)


def cross_entropy_(logits, target, ignore_index=-100, block=1024):
    """The loss of each row, (C,) in float32; logits (C, V) are overwritten by their gradient."""
    rows, vocab_size = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    row_kernel[(rows,)](logits, logits.stride(0), target, loss, ignore_index, V=vocab_size, BLOCK=block)
    return loss
