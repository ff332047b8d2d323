"""Implementations that are wrong on purpose, each in one place, as real ones have been.

`Right` is a fused linear cross-entropy in pieces that can be broken one by one; each subclass overrides a piece and
says which check names its mistake. `python -m flce_ref verify tests/wrong_implementations.py:shifts_target` tries one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """What a call asks for beyond its tensors."""

    weight: Tensor | None
    reduction: str
    ignore_index: int
    z_loss: float
    chunk_size: int
    grad_enabled: bool


class Right:
    """Fused linear cross-entropy in chunks of 128 tokens; `Right()(input, linear_weight, target)` is the loss."""

    chunk_size = 128
    caught_by = ""  # the check that names the mistake
    also: tuple[str, ...] = ()  # patterns of other checks that it fails too
    report = ""  # where it happened

    def __call__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
    ) -> Tensor:
        y = self.targets(target.reshape(-1), ignore_index)
        if ((y != ignore_index) & ((y < 0) | (y >= len(linear_weight)))).any():
            raise IndexError(f"target out of range for {len(linear_weight)} words")
        x, w = self.operands(input.reshape(-1, input.shape[-1]), linear_weight)
        options = Options(
            weight, reduction, ignore_index, z_loss, chunk_size or self.chunk_size, torch.is_grad_enabled()
        )
        loss = self.function().apply(self, x, w, linear_bias, y, options)
        return loss.reshape(target.shape) if reduction == "none" else loss

    def function(self) -> type[torch.autograd.Function]:
        return Once

    # What is read

    def targets(self, y: Tensor, ignore_index: int) -> Tensor:
        return y.long()

    def operands(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of the products: as F.linear takes them under autocast."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            return x.to(dtype), w.to(dtype)
        return x, w

    # Which rows count, and how much

    def counted(self, valid: Tensor) -> Tensor:
        """(N,) what the mean counts, before class weights."""
        return valid

    def penalised(self, valid: Tensor) -> Tensor:
        """(N,) the rows that have a z-loss."""
        return valid

    def gradient_weight(self, class_weight: Tensor, valid: Tensor) -> Tensor:
        """(N,) what the gradient of a row's cross-entropy is multiplied by; class_weight is that of the target."""
        return class_weight * valid

    def divisor(self, class_weight: Tensor, counted: Tensor) -> Tensor:
        """What a mean divides the cross-entropy by."""
        return (class_weight * counted).sum()

    # When: the stream of chunks

    def starts(self, tokens: int, chunk_size: int) -> range:
        return range(0, tokens, chunk_size)

    def keep(self, ctx: Any, z: Tensor) -> None:
        """What else of a chunk survives forward: nothing."""

    def blank(self, rows: Tensor) -> Tensor:
        """A buffer for one value per row."""
        return torch.zeros_like(rows)

    def write(self, buffer: Tensor, rows: slice, values: Tensor, valid: Tensor) -> None:
        buffer[rows] = values

    # What: one row

    def logits(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        z = wide(x @ w.mT)
        return z if bias is None else z + bias

    def cross_entropy(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return F.cross_entropy(z, y, reduction="none")

    def dlogits(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.softmax(z, dim=-1) - F.one_hot(y, z.shape[-1])

    def store(self, dlogits: Tensor, dtype: torch.dtype) -> Tensor:
        """dlogits as the products see them."""
        return dlogits

    # The gradient of the weight, and backward

    def needed(self, needs: tuple[bool, ...], options: Options) -> tuple[bool, ...]:
        """Which of dx, dw, dbias are computed."""
        return tuple(need and options.grad_enabled for need in needs)

    def accumulate(self, dw: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
        return dw + part

    def upstream(self, upstream: Tensor, tokens: int) -> Tensor:
        return upstream

    def scale(self, gradient: Tensor, upstream: Tensor) -> Tensor:
        return gradient * upstream

    def deliver(self, dw: Tensor, w: Tensor) -> Tensor:
        return dw


class Once(torch.autograd.Function):
    """Scalar reductions: gradients in forward, scaled in backward. Per token: the stream again, in backward."""

    @staticmethod
    def forward(ctx: Any, how: Right, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, options: Options) -> Tensor:
        ctx.how, ctx.options, ctx.w = how, options, w
        ctx.dtypes = [tensor if tensor is None else tensor.dtype for tensor in (x, w, bias)]
        per_token = options.reduction == "none"
        needs = how.needed(ctx.needs_input_grad[1:4], options)
        losses, gradients = stream(ctx, x, w, bias, y, (False,) * 3 if per_token else needs)
        ctx.save_for_backward(x, w, bias, y, *gradients)
        return losses if per_token else losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        how = ctx.how
        *inputs, dx, dw, db = ctx.saved_tensors
        gradients = [dx, dw, db]
        upstream = how.upstream(upstream, len(inputs[0]))
        if ctx.options.reduction == "none":
            _, gradients = stream(ctx, *inputs, how.needed(ctx.needs_input_grad[1:4], ctx.options), upstream)
        else:
            gradients = [g if g is None else how.scale(g, upstream) for g in gradients]
        dx, dw, db = (g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
        return None, dx, dw if dw is None else how.deliver(dw, ctx.w), db, None, None


def stream(
    ctx: Any,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    y: Tensor,
    needs: tuple[bool, ...],
    upstream: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses (N,), divided already, and the gradients of Σ upstream · loss that are needed."""
    how, options = ctx.how, ctx.options
    valid = y != options.ignore_index
    y = torch.where(valid, y, 0)
    one = wide(x.new_ones(len(y)))
    class_weight = one if options.weight is None else options.weight.to(one.dtype)[y]
    divisor, n_penalised = one.new_ones(()), one.new_ones(())
    if options.reduction == "mean":
        divisor = how.divisor(class_weight, how.counted(valid))
        n_penalised = how.penalised(valid).sum()
    ce_weight, z_weight = class_weight * valid, options.z_loss * how.penalised(valid)
    gradient_weight = how.gradient_weight(class_weight, valid) / divisor.clamp(min=1e-30)

    losses = how.blank(one)
    dx = torch.zeros_like(x, dtype=one.dtype) if needs[0] else None
    dw = torch.zeros_like(w, dtype=one.dtype) if needs[1] else None
    db = torch.zeros_like(w[:, 0], dtype=one.dtype) if needs[2] else None
    for start in how.starts(len(y), options.chunk_size):
        rows = slice(start, start + options.chunk_size)
        z = how.logits(x[rows], w, bias, y[rows])
        how.keep(ctx, z)
        row = ce_weight[rows] * how.cross_entropy(z, y[rows], x.dtype) / divisor
        if options.z_loss:
            lse = torch.logsumexp(z, dim=-1)
            row = row + z_weight[rows] * lse**2 / n_penalised
        how.write(losses, rows, row, valid[rows])
        if not any(needs):
            continue
        dlogits = how.dlogits(z, y[rows], x.dtype) * gradient_weight[rows, None]
        if options.z_loss:
            dlogits += (2 * z_weight[rows] * lse / n_penalised)[:, None] * torch.softmax(z, dim=-1)
        if upstream is not None:
            dlogits = dlogits * upstream[rows, None]
        dlogits = how.store(dlogits, x.dtype)
        if dx is not None:
            dx[rows] = dlogits @ w.to(dlogits.dtype)
        if dw is not None:
            dw = how.accumulate(dw, dlogits.mT @ x[rows].to(dlogits.dtype), w.dtype)
        if db is not None:
            db += dlogits.sum(0)
    if options.reduction == "mean":  # over no tokens: NaN, however little there is to make so
        losses = torch.cat([losses, torch.where(divisor == 0, torch.nan, 0.0)[None]])
    return losses, [dx, dw, db]


def wide(tensor: Tensor) -> Tensor:
    """In float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# ---------------------------------------------------------------- which rows count, and how much


# Every check that has ignored tokens in it.
WITH_IGNORED = (
    "ignore_index.*",
    "bias.ignored",
    "z_loss.*",
    "combinations*",
    "chunk.*",
    "outputs.*",
    "upstream.*",
    "micro_batches",
)


class MeanOverAllTokens(Right):
    """Divides by N, ignored tokens included."""

    caught_by = "ignore_index.loss"
    also = WITH_IGNORED

    def counted(self, valid: Tensor) -> Tensor:
        return torch.ones_like(valid)


class GradientOfIgnored(Right):
    """Masks ignored rows in the loss, not in the gradient."""

    caught_by = "ignore_index.dx"
    also = WITH_IGNORED

    def gradient_weight(self, class_weight: Tensor, valid: Tensor) -> Tensor:
        return class_weight


class NegativeMeansIgnored(Right):
    """Ignores every negative target, whatever ignore_index says."""

    caught_by = "target.negative"

    def targets(self, y: Tensor, ignore_index: int) -> Tensor:
        return torch.where(y < 0, ignore_index, y.long())


class IgnoresOnlyNegative(Right):
    """Assumes that no word of the vocabulary is ever ignored."""

    caught_by = "ignore_index.in_vocabulary"

    def __call__(self, *tensors: Tensor, ignore_index: int = -100, **options: Any) -> Tensor:
        return super().__call__(
            *tensors, ignore_index=min(ignore_index, -1) if ignore_index < 10**6 else ignore_index, **options
        )


class WeightNotInDenominator(Right):
    """Divides a weighted mean by the number of tokens."""

    caught_by = "class_weight.mean"
    also = (
        "class_weight.zero",
        "z_loss.class_weight",
        "combinations*",
        "chunk.combinations",
    )

    def divisor(self, class_weight: Tensor, counted: Tensor) -> Tensor:
        return counted.sum()


class PenalisesIgnored(Right):
    """Gives ignored rows a z-loss."""

    caught_by = "z_loss.ignored"
    also = (
        "z_loss.class_weight",
        "combinations.z_loss",
    )

    def penalised(self, valid: Tensor) -> Tensor:
        return torch.ones_like(valid)


class MeanOfChunkMeans(Right):
    """Averages the chunks' means, which is the mean only if all chunks have as many valid tokens."""

    caught_by = "chunk.invariance"
    also = (
        "chunk.combinations",
        "shape.leading",
        "autocast.mixed",
        "precision.dw*",
    )
    report = "NeMo-Automodel PR #3804"

    def __call__(self, input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        size = options.get("chunk_size") or self.chunk_size
        if options.get("reduction", "mean") != "mean" or len(target) <= size:
            return super().__call__(input, linear_weight, target, **options)
        chunks = zip(input.split(size), target.split(size), strict=True)
        return torch.stack(
            [super(MeanOfChunkMeans, self).__call__(x, linear_weight, y, **options) for x, y in chunks]
        ).nanmean()


# ---------------------------------------------------------------- the stream of chunks


class ShiftsTarget(Right):
    """Shifts the targets by one token, which the caller has done already."""

    caught_by = "loss"
    also = ("*",)

    def targets(self, y: Tensor, ignore_index: int) -> Tensor:
        return y.long().roll(-1)


class LosesLastChunk(Right):
    """Rounds the number of chunks down."""

    caught_by = "shape.long"
    also = (
        "chunk.*",
        "autocast.mixed",
    )

    def starts(self, tokens: int, chunk_size: int) -> range:
        return range(0, max(tokens // chunk_size, 1) * chunk_size, chunk_size)


class SavesLogits(Right):
    """Keeps the logits on ctx, where saved-tensor hooks don't see them."""

    caught_by = "memory.holds_no_logits"

    def keep(self, ctx: Any, z: Tensor) -> None:
        ctx.logits = [*getattr(ctx, "logits", ()), z]


class LeavesIgnoredUnwritten(Right):
    """Returns from an ignored row before it has written its loss."""

    caught_by = "outputs.all_written"
    also = (*WITH_IGNORED, "inputs.*")
    report = "Liger-Kernel #1338"

    def blank(self, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    def write(self, buffer: Tensor, rows: slice, values: Tensor, valid: Tensor) -> None:
        buffer[rows][valid] = values[valid]


class OverwritesTarget(Right):
    """Clamps ignored targets in the caller's own tensor."""

    caught_by = "inputs.unmodified"
    also = (
        "layout.target",
        "micro_batches",
    )
    report = "Liger-Kernel #272"

    def targets(self, y: Tensor, ignore_index: int) -> Tensor:
        kept = y.long().clone()
        y.clamp_(min=0)
        return kept


# ---------------------------------------------------------------- one row


class BiasTwiceAtTarget(Right):
    """Adds the bias to the target's logit a second time."""

    caught_by = "bias"
    also = (
        "bias.ignored",
        "combinations*",
        "chunk.combinations",
        "frozen.gradients",
    )
    report = "ml-cross-entropy #52"

    def logits(self, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        z = super().logits(x, w, bias, y)
        return z if bias is None else z + bias * F.one_hot(y, z.shape[-1])


class SubtractsAfterRounding(Right):
    """Rounds p to the input's dtype, and only then takes 1 from p[y]."""

    caught_by = "precision.confident.bfloat16"
    report = "Liger-Kernel #1329"

    def dlogits(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.softmax(z, dim=-1).to(dtype) - F.one_hot(y, z.shape[-1])


class LosesDigits(Right):
    """Takes lse − z[y] in the logits' dtype."""

    caught_by = "precision.loss_digits.bfloat16"
    also = ("precision.loss_digits.float16",)
    report = "mlx PR #4520"

    def cross_entropy(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        picked = z.gather(1, y[:, None])[:, 0]
        return wide(torch.logsumexp(z, dim=-1).to(dtype) - picked.to(dtype))


class RoundsLogSumExp(Right):
    """Takes probabilities as exp(z − lse) with an lse rounded to the input's dtype."""

    caught_by = "precision.confident.bfloat16"
    also = (
        "precision.confident.float16",
        "logits.*",
    )

    def dlogits(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        lse = torch.logsumexp(z, dim=-1, keepdim=True).to(dtype)
        return torch.exp(z - lse) - F.one_hot(y, z.shape[-1])


class ExponentOfLse(Right):
    """Takes probabilities as exp(z − lse) in float32, where a common offset leaves lse few digits."""

    caught_by = "logits.common_offset"
    also = ("logits.times_1000",)
    report = "pytorch #195829"

    def dlogits(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.exp(z - torch.logsumexp(z, dim=-1, keepdim=True)) - F.one_hot(y, z.shape[-1])


class NoMaximum(Right):
    """Exponentiates the logits as they are."""

    caught_by = "logits.times_1000"
    also = ("logits.common_offset",)

    def cross_entropy(self, z: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return z.exp().sum(-1).log() - z.gather(1, y[:, None])[:, 0]


class FoldsMeanIntoHalf(Right):
    """Divides dlogits by N before they are rounded: p / N underflows in float16."""

    caught_by = "precision.float16_mean"

    def store(self, dlogits: Tensor, dtype: torch.dtype) -> Tensor:
        return wide(dlogits.to(dtype))


class IgnoresAutocast(Right):
    """Computes in the widest dtype that it is given, whatever autocast says."""

    caught_by = "autocast.applied"
    report = "PyTorch 2.13, F.linear_cross_entropy with options"

    def __call__(self, input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        dtype = torch.promote_types(input.dtype, linear_weight.dtype)
        with torch.autocast(input.device.type, enabled=False):
            return super().__call__(input.to(dtype), linear_weight.to(dtype), target, **options)


class RefusesMixedDtypes(Right):
    """Multiplies bfloat16 by float32 under autocast."""

    caught_by = "autocast.mixed"
    also = ("autocast.applied",)
    report = "Liger-Kernel #305"

    def __call__(self, *tensors: Tensor, **options: Any) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return super().__call__(*tensors, **options)


# ---------------------------------------------------------------- gradients and backward


class RoundsEveryChunk(Right):
    """Sums dw in the weight's dtype, rounding after every chunk."""

    caught_by = "precision.dw_many_chunks.bfloat16"
    also = ("precision.dw*",)
    report = "Liger-Kernel #512"

    def accumulate(self, dw: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
        return (dw + part).to(dtype).to(dw.dtype)


class DividesTwice(Right):
    """1/N in forward, and again in backward."""

    caught_by = "dx"
    also = ("*",)

    def upstream(self, upstream: Tensor, tokens: int) -> Tensor:
        return upstream if upstream.dim() else upstream / max(tokens, 1)


class IgnoresUpstream(Right):
    """Returns the gradients of forward as they are."""

    caught_by = "upstream.scalar"
    also = (
        "upstream.*",
        "backward.twice",
        "micro_batches",
    )
    report = "torchtitan components/loss.py; Megatron-LM #1750"

    def upstream(self, upstream: Tensor, tokens: int) -> Tensor:
        return torch.ones_like(upstream)


class FirstTokensUpstream(Right):
    """Scales every token's gradient by the first token's upstream gradient."""

    caught_by = "upstream.per_token"
    also = ("upstream.strided",)
    report = "Liger-Kernel #968"

    def upstream(self, upstream: Tensor, tokens: int) -> Tensor:
        return upstream[:1].expand(tokens) if upstream.dim() else upstream


class ReadsStrideZeroAsOne(Right):
    """Reads the upstream gradient's memory as if it were contiguous, and finds zeros behind its end."""

    caught_by = "upstream.expanded"
    also = ("upstream.strided",)
    report = "TransformerEngine #2402"

    def upstream(self, upstream: Tensor, tokens: int) -> Tensor:
        if not upstream.dim() or upstream.is_contiguous():
            return upstream
        held = upstream.untyped_storage().nbytes() // upstream.element_size()
        memory = upstream.as_strided((min(held, tokens),), (1,), 0)
        return F.pad(memory, (0, tokens - len(memory)))


class ScalesInPlace(Right):
    """Scales its saved gradients in place, although the graph may be kept."""

    caught_by = "backward.twice"
    report = "QuACK #209"

    def scale(self, gradient: Tensor, upstream: Tensor) -> Tensor:
        return gradient.mul_(upstream)


class WritesToGrad(Right):
    """Adds dw to the weight's .grad, and returns it as well."""

    caught_by = "backward.accumulates"

    def deliver(self, dw: Tensor, w: Tensor) -> Tensor:
        if w.is_leaf and w.grad is not None:
            w.grad += dw
        return dw


class SilentSecondDerivative(Right):
    """Writes backward as upstream · dx, which autograd differentiates without the Hessian."""

    caught_by = "backward.second_derivative"

    def function(self) -> type[torch.autograd.Function]:
        return Differentiable


class Differentiable(Once):
    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple:
        return Once.backward.__wrapped__(ctx, upstream)


class DropsDwOfFrozenInput(Right):
    """Takes "input needs no gradient" for "nothing does"."""

    caught_by = "frozen.gradients"
    report = "Liger-Kernel"

    def needed(self, needs: tuple[bool, ...], options: Options) -> tuple[bool, ...]:
        return super().needed(needs if needs[0] else (False, False, False), options)


class ComputesDwOfFrozen(Right):
    """Computes dw for a frozen weight, and drops it."""

    caught_by = "frozen.linear_weight"
    report = "prime-rl PR #3011"

    def needed(self, needs: tuple[bool, ...], options: Options) -> tuple[bool, ...]:
        return super().needed((needs[0], any(needs), needs[2]), options)


class WorksUnderNoGrad(Right):
    """Asks requires_grad, and forgets torch.no_grad()."""

    caught_by = "no_grad.work"
    report = "flash-linear-attention PR #1253"

    def needed(self, needs: tuple[bool, ...], options: Options) -> tuple[bool, ...]:
        return super().needed(needs, replace(options, grad_enabled=True))


WRONG = {implementation.__name__: implementation for implementation in Right.__subclasses__()}


def __getattr__(name: str) -> Right:
    """`shifts_target` is a ShiftsTarget(), for the command line."""
    for implementation in (Right, *WRONG.values()):
        if name == "".join(f"_{c.lower()}" if c.isupper() else c for c in implementation.__name__)[1:]:
            return implementation()
    raise AttributeError(name)
