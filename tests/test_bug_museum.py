"""What people reported of fused linear cross-entropy in other libraries, held against this one, on every schedule.

One test per report that can be tried on a CPU, named by it; the docstring links it and says what went wrong there.
Those that need a GPU (Liger-Kernel #916, NVDLI #12, GPU-Puzzles #48) are in tests/gpu; what was reported of notebooks
and books (nbval, jupyter-book) is in test_notebooks.py and test_book.py.
"""

from __future__ import annotations

import copy
import itertools
import pickletools
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flce_ref import explain, kernels, linear_cross_entropy
from flce_ref.conformance.tracker import StorageTracker
from flce_ref.memory import Timeline, simulate
from flce_ref.schedules.plan import default_chunk_size
from tests.oracle import oracle, problem, relative_error

ROOT = Path(__file__).parents[1]
SCHEDULES = ("naive", "chunked", "checkpointed", "fused", "vocab_tiled")
on_every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def in_chunks(schedule: str, size: int = 4) -> dict[str, object]:
    """The arguments of a schedule with a chunk that divides nothing evenly; naive has none."""
    return {"schedule": schedule} | ({} if schedule == "naive" else {"chunk_size": size})


class Operators(TorchDispatchMode):
    """Counts operators, and those among them that fill a buffer of `watched` elements."""

    def __init__(self, watched: int = 0) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.watched, self.filled = watched, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.count[name] += 1
        fills = name in ("zero_", "zeros", "zeros_like", "new_zeros", "fill_", "full", "full_like")
        self.filled += fills and isinstance(out, Tensor) and out.numel() == self.watched
        return out

    @property
    def products(self) -> int:
        return sum(self.count[name] for name in ("mm", "addmm", "addmm_", "accumulate_product_"))


# ---------------------------------------------------------------- upstream gradients


@on_every_schedule
def test_liger_968_488_1298_per_token_weights(schedule: str) -> None:
    """Every gradient was scaled by the first token's weight.

    https://github.com/linkedin/Liger-Kernel/issues/968, https://github.com/linkedin/Liger-Kernel/issues/488,
    https://github.com/linkedin/Liger-Kernel/pull/1298
    """
    x, w, y = problem()
    factor = torch.linspace(-1, 2, len(y), dtype=x.dtype)
    loss = linear_cross_entropy(x, w, y, reduction="none", **in_chunks(schedule))
    truth, _ = oracle(x, w, y, reduction="none")
    got, true = (torch.autograd.grad((factor * each).sum(), (x, w)) for each in (loss, truth))
    torch.testing.assert_close(got, true)


@on_every_schedule
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_te_2402_rocm_623_expanded_upstream(schedule: str, reduction: str) -> None:
    """An upstream gradient of stride 0, as expand makes it, was read beyond its end.

    https://github.com/NVIDIA/TransformerEngine/pull/2402, https://github.com/ROCm/TransformerEngine/pull/623
    """
    x, w, y = problem()
    loss = linear_cross_entropy(x, w, y, reduction=reduction, **in_chunks(schedule))
    truth, _ = oracle(x, w, y, reduction=reduction)
    upstream = torch.tensor(0.7, dtype=x.dtype).expand_as(loss)
    got, true = (torch.autograd.grad(each, (x, w), upstream) for each in (loss, truth))
    torch.testing.assert_close(got, true)


@on_every_schedule
def test_megatron_1750_torchtitan_upstream_other_than_one(schedule: str) -> None:
    """The gradient was 0 where the upstream gradient was not 1; per-chunk backward on detached leaves ignores it.

    https://github.com/NVIDIA/Megatron-LM/issues/1750,
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/loss.py
    """
    x, w, y = problem()
    for upstream in (1.0, -2.7, 1e-3):
        loss = linear_cross_entropy(x, w, y, **in_chunks(schedule))
        truth, _ = oracle(x, w, y)
        got, true = (torch.autograd.grad(upstream * each, (x, w)) for each in (loss, truth))
        assert all(g.norm() > 0 for g in got)
        torch.testing.assert_close(got, true)


@on_every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_quack_209_retained_graph(schedule: str, reduction: str) -> None:
    """A second backward raised, or doubled silently; its gradients shared the first one's buffers.

    https://github.com/Dao-AILab/quack/pull/209
    """
    x, w, y = problem(dtype=torch.float32)
    loss = linear_cross_entropy(x, w, y, reduction=reduction, **in_chunks(schedule))
    first = torch.autograd.grad(loss.sum(), (x, w), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(3 * loss.sum(), (x, w))
    torch.testing.assert_close(list(first), kept)
    torch.testing.assert_close([gradient / 3 for gradient in second], kept)


@on_every_schedule
def test_liger_272_1251_unsloth_5002_upstream_keeps_what_it_saved(schedule: str) -> None:
    """Gradients written in place over the hidden states corrupted what the layer before had saved.

    https://github.com/linkedin/Liger-Kernel/issues/272, https://github.com/linkedin/Liger-Kernel/issues/1251,
    https://github.com/unslothai/unsloth/issues/5002
    """
    x, w, y = problem()
    # tanh and exp save their outputs, which are the inputs of the loss.
    loss = linear_cross_entropy(x.tanh(), w.exp(), y, **in_chunks(schedule))
    truth, _ = oracle(x.tanh(), w.exp(), y)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(truth, (x, w)))


# ---------------------------------------------------------------- what is needed, and nothing else


@on_every_schedule
def test_liger_frozen_input_keeps_the_weights_gradient(schedule: str) -> None:
    """A frozen input took the weight's gradient with it.

    https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/ops/fused_linear_cross_entropy.py
    """
    for frozen, reduction in itertools.product(itertools.product((True, False), repeat=3), ("mean", "none")):
        if all(frozen):
            continue
        x, w, y = problem()
        tensors = [t.detach().requires_grad_(not f) for t, f in zip((x, w, w[:, 0]), frozen, strict=True)]
        asked = [t for t in tensors if t.requires_grad]
        options = {"linear_bias": tensors[2], "reduction": reduction}
        loss = linear_cross_entropy(*tensors[:2], y, **options, **in_chunks(schedule))
        logits = F.linear(*tensors)
        truth = F.cross_entropy(logits, y, reduction=reduction)
        got, true = (torch.autograd.grad(each.sum(), asked) for each in (loss, truth))
        torch.testing.assert_close(got, true)


@on_every_schedule
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_prime_rl_3011_liger_1441_fla_1253_frozen_head(schedule: str, reduction: str) -> None:
    """A frozen head still cost a (V, D) buffer and a product per chunk; no_grad still computed gradients.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/3011, https://github.com/linkedin/Liger-Kernel/pull/1441,
    https://github.com/fla-org/flash-linear-attention/pull/1253
    """
    n, d, v = 8, 64, 40
    x, w, y = problem(n, d, v, dtype=torch.float32)

    def large_buffers(w: Tensor, grad: bool) -> int:
        with StorageTracker(x, w, y) as tracker, torch.set_grad_enabled(grad):
            loss = linear_cross_entropy(x, w, y, reduction=reduction, **in_chunks(schedule))
            if grad:
                loss.sum().backward()
        return sum(size >= v * d for size in tracker.allocated)

    assert large_buffers(w, grad=True) > 0
    assert large_buffers(w.detach(), grad=True) == 0
    assert large_buffers(w, grad=False) == 0


def test_pytorch_196134_the_first_chunk_writes() -> None:
    """A (V, D) buffer was zeroed that the first chunk could have written.

    https://github.com/pytorch/pytorch/pull/196134
    """
    n, d, v = 12, 16, 40
    x, w, y = problem(n, d, v, dtype=torch.float32)
    with Operators(watched=v * d) as seen:
        linear_cross_entropy(x, w, y, chunk_size=4).backward()
    assert seen.products > 3
    assert seen.filled == 0


def test_pytorch_187219_unused_outputs_cost_nothing() -> None:
    """Zero gradients of outputs that nobody used were materialised and computed with.

    https://github.com/pytorch/pytorch/issues/187219
    """
    products = []
    for return_lse in (False, True):
        x, w, y = problem(dtype=torch.float32)
        with Operators() as seen:
            out = linear_cross_entropy(x, w, y, chunk_size=4, return_lse=return_lse)
            loss = out[0] if isinstance(out, tuple) else out
            forward = seen.products
            loss.backward()
        products.append((forward, seen.products - forward))
    assert products[0] == products[1]
    assert products[1][1] == 0


def test_torchtune_1390_chunks_of_finished_logits_free_nothing() -> None:
    """Chunking after the projection left the logits where they were.

    https://github.com/pytorch/torchtune/pull/1390
    """
    n, v = 512, 512
    x, w, y = problem(n, 4, v, dtype=torch.float32)

    def after_the_projection() -> Tensor:
        parts = zip((x @ w.T).split(64), y.split(64), strict=True)
        return torch.stack([F.cross_entropy(z, t, reduction="sum") for z, t in parts]).sum() / (y != -100).sum()

    alive = []
    for call in (after_the_projection, lambda: linear_cross_entropy(x, w, y, chunk_size=64)):
        with StorageTracker(x, w, y) as tracker:
            loss = call()
        alive.append(tracker.alive())
        assert loss.requires_grad
    assert alive[0] >= n * v
    assert alive[1] < n * v / 16


def test_liger_941_the_peak_is_named_and_so_is_the_heads_share_of_it() -> None:
    """ "No memory saved": the step's peak was elsewhere, and nothing said so.

    https://github.com/linkedin/Liger-Kernel/issues/941
    """
    n, d, v = 512, 64, 1024
    x, w, y = problem(n, d, v, dtype=torch.float32)

    def peak(wide: int, **options: object) -> tuple[int, dict[str, int]]:
        def step(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            backbone = torch.cat([x] * wide).exp()  # a step whose memory is not the head's
            return linear_cross_entropy(x, w, y, **options) + backbone.mean()

        timeline = simulate(step, x, w, y)
        return timeline.step_peak_bytes, dict(timeline.alive_at_peak())

    logits = 4 * n * v
    naive, alive = peak(1, schedule="naive")
    assert max(alive.values()) >= logits
    assert peak(1, chunk_size=64)[0] < naive / 2
    backbone = 4 * 100 * n * d
    naive, alive = peak(100, schedule="naive")
    assert max(alive.values()) >= backbone > logits
    assert peak(100, chunk_size=64)[0] > naive / 2


# ---------------------------------------------------------------- which tokens count


@on_every_schedule
def test_pytorch_116349_70348_75181_every_target_ignored(schedule: str) -> None:
    """A batch without targets: NaN under "mean", as in PyTorch, but never NaN gradients.

    https://github.com/pytorch/pytorch/issues/116349, https://github.com/pytorch/pytorch/issues/70348,
    https://github.com/pytorch/pytorch/issues/75181. PyTorch 2.13's own chunked function returns NaN gradients.
    """
    x, w, y = problem(dtype=torch.float32)
    y[:] = -100
    for reduction, expected in (("mean", torch.isnan), ("sum", lambda loss: loss == 0)):
        loss = linear_cross_entropy(x, w, y, reduction=reduction, **in_chunks(schedule))
        assert expected(loss).all()
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (x, w)))


@on_every_schedule
def test_liger_802_fla_539_micro_batches(schedule: str) -> None:
    """Gradient accumulation multiplied the loss by the number of micro-batches.

    https://github.com/linkedin/Liger-Kernel/issues/802, https://github.com/fla-org/flash-linear-attention/issues/539
    """
    x, w, y = problem(24, ignored=(2, 3, 5, 20))
    n_valid = (y != -100).sum()
    total = torch.zeros((), dtype=x.dtype)
    for part, target in zip(x.split(7), y.split(7), strict=True):
        loss = linear_cross_entropy(part, w, target, reduction="sum", **in_chunks(schedule)) / n_valid
        total += loss.detach()
        loss.backward()
    truth, _ = oracle(x, w, y)
    torch.testing.assert_close(total, truth.detach())
    torch.testing.assert_close((x.grad, w.grad), torch.autograd.grad(truth, (x, w)))


@given(size=st.integers(1, 40), ignored=st.sets(st.integers(0, 29), max_size=29), seed=st.integers(0, 99))
def test_nemo_3804_the_chunk_changes_nothing(size: int, ignored: set[int], seed: int) -> None:
    """The mean changed with the chunk length: means of chunks were added.

    https://github.com/NVIDIA-NeMo/Automodel/pull/3804
    """
    x, w, y = problem(30, seed=seed, ignored=tuple(ignored))
    truth, _ = oracle(x, w, y)
    true = torch.autograd.grad(truth, (x, w))
    for schedule in SCHEDULES[1:]:
        loss = linear_cross_entropy(x, w, y, schedule=schedule, chunk_size=size)
        torch.testing.assert_close(loss, truth)
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), true)


@on_every_schedule
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_pytorch_69339_options_together(schedule: str, ignore_index: int) -> None:
    """Class weight, label smoothing and ignore_index together were an index error.

    https://github.com/pytorch/pytorch/issues/69339
    """
    x, w, y = problem()
    y[1::3] = ignore_index
    weight = torch.rand(len(w), dtype=x.dtype)
    for reduction in ("mean", "sum", "none"):
        options = {"weight": weight, "label_smoothing": 0.1, "ignore_index": ignore_index, "reduction": reduction}
        y_valid = y.masked_fill(y == -100, ignore_index)
        loss = linear_cross_entropy(x, w, y_valid, **options, **in_chunks(schedule))
        truth, _ = oracle(x, w, y_valid, **options)
        torch.testing.assert_close(loss, truth)
        got, true = (torch.autograd.grad(each.sum(), (x, w)) for each in (loss, truth))
        torch.testing.assert_close(got, true)


@on_every_schedule
def test_ml_cross_entropy_52_53_bias_at_the_target(schedule: str) -> None:
    """The bias was added to the target's logit once per tile, and losses became negative.

    https://github.com/apple/ml-cross-entropy/issues/52, https://github.com/apple/ml-cross-entropy/pull/53
    """
    n, v = 12, 17
    x, w, _ = problem(n, v=v)
    bias = torch.linspace(-20, 20, v, dtype=x.dtype, requires_grad=True)
    for size in (1, 3, 4, 5, n):
        for first in range(0, v, n):  # every word is a target once, at every place of a chunk
            y = (torch.arange(n) + first) % v
            loss = linear_cross_entropy(x, w, y, linear_bias=bias, reduction="none", **in_chunks(schedule, size))
            truth = F.cross_entropy(F.linear(x, w, bias), y, reduction="none")
            assert (loss >= 0).all()
            torch.testing.assert_close(loss, truth)
            got, true = (torch.autograd.grad(each.sum(), bias) for each in (loss, truth))
            torch.testing.assert_close(got, true)


def test_liger_1338_every_element_is_written_when_compiled() -> None:
    """Under torch.compile ignored rows never wrote their loss: whatever the buffer held before was returned.

    https://github.com/linkedin/Liger-Kernel/issues/1338
    """
    x, w, y = problem(dtype=torch.float32, ignored=(0, 2, 7, 12))
    torch._dynamo.reset()
    call = torch.compile(
        lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none", return_lse=True, chunk_size=4),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN
    try:
        loss, lse = call(x, w, y)
        dx, dw = torch.autograd.grad(loss.sum(), (x, w))
    finally:
        torch.use_deterministic_algorithms(False)
    truth, true_lse = oracle(x, w, y, reduction="none")
    torch.testing.assert_close((loss, lse), (truth, true_lse))
    torch.testing.assert_close((dx, dw), torch.autograd.grad(truth.sum(), (x, w)))
    assert not loss[[0, 2, 7, 12]].any() and not dx[[0, 2, 7, 12]].any()


# ---------------------------------------------------------------- precision


@on_every_schedule
@pytest.mark.parametrize("dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=2)), ids=str)
def test_liger_305_502_llamafactory_5583_autocast(schedule: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """A float32 head met bfloat16 hidden states under autocast: mat1 and mat2 have different dtypes.

    https://github.com/linkedin/Liger-Kernel/issues/305, https://github.com/linkedin/Liger-Kernel/pull/502,
    https://github.com/hiyouga/LLaMA-Factory/issues/5583. PyTorch 2.13's own chunked function ignores autocast.
    """
    x, w, y = problem(64, 32, 50, dtype=torch.float32)
    x, w = (t.detach().to(dtype).requires_grad_() for t, dtype in zip((x, w), dtypes, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, y, **in_chunks(schedule, 24))
        plain = F.cross_entropy(F.linear(x, w), y)
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    true = torch.autograd.grad(oracle(*doubles, y)[0], doubles)
    got, of_plain = (torch.autograd.grad(each, (x, w)) for each in (loss, plain))
    for gradient, baseline, truth, tensor in zip(got, of_plain, true, (x, w), strict=True):
        assert gradient.dtype == tensor.dtype
        assert 0 < relative_error(gradient, truth) <= 1.5 * relative_error(baseline, truth)
        assert relative_error(gradient, truth) > 1e-4  # the products were in bfloat16 indeed


def test_liger_512_827_axolotl_1601_dw_summed_in_float32() -> None:
    """Training diverged although losses looked alike: dw was rounded to bfloat16 after every chunk.

    https://github.com/linkedin/Liger-Kernel/issues/512, https://github.com/linkedin/Liger-Kernel/issues/827,
    https://github.com/axolotl-ai-cloud/axolotl/pull/1601, https://github.com/apple/ml-cross-entropy/issues/14,
    https://github.com/allenai/OLMo-core/pull/370, https://github.com/InternLM/xtuner/pull/1747
    """
    x, w, y = problem(2048, 16, 64, dtype=torch.bfloat16)
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    true = torch.autograd.grad(oracle(*doubles, y)[0], doubles)[1]

    def error(**options: object) -> float:
        return relative_error(torch.autograd.grad(linear_cross_entropy(x, w, y, **options), w)[0], true)

    plain = error(schedule="naive")
    assert error(chunk_size=16) <= 1.1 * plain
    # The two schedules that leave the sum to autograd have the bug, which is why they are not the default.
    for drifting in ({"schedule": "chunked"}, {"schedule": "checkpointed"}, {"accum_dtype": torch.bfloat16}):
        assert error(chunk_size=16, **drifting) > 2 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_liger_1329_one_hot_subtracted_before_rounding(dtype: torch.dtype) -> None:
    """p[y] − 1 was taken after p was rounded: at p = 0.999 the gradient is off by 100 %.

    https://github.com/linkedin/Liger-Kernel/issues/1329
    """
    n, v = 16, 64
    w = torch.zeros(v, n)
    w[torch.arange(n), torch.arange(n)] = 11.0
    x, w = torch.eye(n, dtype=dtype).requires_grad_(), w.to(dtype).requires_grad_()
    y = torch.arange(n)
    assert oracle(x.double(), w.double(), y)[0] < 0.002  # every token has p[y] > 0.998
    dx, dw = torch.autograd.grad(linear_cross_entropy(x, w, y, reduction="sum", chunk_size=5), (x, w))
    true = torch.autograd.grad(oracle(x.double(), w.double(), y, reduction="sum")[0], (x, w))
    assert relative_error(dx, true[0]) < 0.01
    assert relative_error(dw, true[1]) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mlx_4520_digits_of_a_small_loss(dtype: torch.dtype) -> None:
    """lse − z[y], subtracted in the logits' dtype, has no digits left of a small loss.

    https://github.com/ml-explore/mlx/pull/4520
    """
    n, v = 16, 64
    w = torch.full((v, n), 20.0)
    w[torch.arange(n), torch.arange(n)] += 11.0
    x, w, y = torch.eye(n, dtype=dtype), w.to(dtype), torch.arange(n)
    loss = linear_cross_entropy(x, w, y, reduction="none")
    truth, _ = oracle(x.double(), w.double(), y, reduction="none")
    assert 0 < truth.max() < 0.01
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=1e-2, atol=0)


@on_every_schedule
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_pytorch_195829_a_common_offset_costs_nothing(schedule: str, offset: float) -> None:
    """A large offset common to all logits cost precision, since exp(z − lse) was taken.

    https://github.com/pytorch/pytorch/pull/195829
    """
    n, v = 24, 40
    generator = torch.Generator().manual_seed(0)
    # Multiples of 1/8, so that the logits are exact in float32 with the offset too.
    x, w = (torch.randint(-8, 9, (rows, 5), generator=generator) / 8 for rows in (n, v))
    y = torch.randint(v, (n,), generator=generator)
    results = []
    for common in (0.0, offset):
        shifted = torch.cat([w, torch.full((v, 1), common)], 1).requires_grad_()
        ones = torch.cat([x, torch.ones(n, 1)], 1).requires_grad_()
        loss = linear_cross_entropy(ones, shifted, y, **in_chunks(schedule))
        dx, dw = torch.autograd.grad(loss, (ones, shifted))
        results.append((loss.detach(), dx[:, :-1], dw))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@on_every_schedule
def test_megatron_2206_vocabulary_above_250k(schedule: str) -> None:
    """Results were wrong for vocabularies above 250,000 words only.

    https://github.com/NVIDIA/Megatron-LM/pull/2206
    """
    v = 262_144
    x, w, y = problem(6, 4, v)
    y[:4] = torch.tensor([0, 131_072, 250_001, v - 1])
    loss = linear_cross_entropy(x, w, y, **in_chunks(schedule, 100_000 if schedule == "vocab_tiled" else 4))
    truth, _ = oracle(x, w, y)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(truth, (x, w)))


# ---------------------------------------------------------------- errors that say what to do


@on_every_schedule
@pytest.mark.parametrize("shape", [(0,), (0, 6), (17 * 6,)])
def test_liger_332_767_cce_31_sharded_weight(schedule: str, shape: tuple[int, ...]) -> None:
    """The head that FSDP or ZeRO-3 had sharded was empty: an illegal memory access.

    https://github.com/linkedin/Liger-Kernel/issues/332, https://github.com/apple/ml-cross-entropy/issues/31,
    https://github.com/linkedin/Liger-Kernel/issues/767
    """
    x, _, y = problem()
    with pytest.raises(ValueError, match=r"linear_weight must be \(V, D\).*got " + re.escape(str(shape))) as raised:
        linear_cross_entropy(x, x.new_zeros(shape), y, schedule=schedule)
    assert "gathered" in str(raised.value)


@on_every_schedule
def test_torchtune_2856_trl_6064_dtensor(schedule: str, tmp_path: Path) -> None:
    """Tensors mixed with DTensors failed somewhere deep inside.

    https://github.com/pytorch/torchtune/issues/2856, https://github.com/huggingface/trl/issues/6064
    """
    from torch.distributed.tensor import distribute_tensor

    x, w, y = problem()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(w.detach(), mesh)
        with pytest.raises(TypeError, match=r"linear_weight is a DTensor.*full_tensor"):
            linear_cross_entropy(x, sharded, y, schedule=schedule)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- the chunk, and the repair without any library


def test_liger_1414_1439_default_chunk() -> None:
    """The default chunk was so small that launches dominated, or so large that memory ran out.

    https://github.com/linkedin/Liger-Kernel/issues/1414, https://github.com/linkedin/Liger-Kernel/issues/1439
    """
    for n, d in itertools.product((1, 100, 1024, 8192, 131_072), (256, 2048, 16_384)):
        chunk = default_chunk_size(n, d)
        assert min(n, 512) <= chunk <= min(n, max(d, 1024) + 128)
    x, w = (
        torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True) for rows in (8192, 151_552)
    )
    y = torch.empty(8192, dtype=torch.int64, device="meta")
    peaks = [explain(x, w, y, chunk_size=size).step_peak_bytes for size in (256, None, 8192)]
    assert explain(x, w, y, chunk_size=256).chunk_size == 256
    assert peaks[0] <= peaks[1] < peaks[2]


def test_pytorch_124480_backward_per_chunk_on_detached_states() -> None:
    """A user's own repair, and the ancestor of the fused schedule: it is right where the upstream gradient is known.

    https://github.com/pytorch/pytorch/issues/124480 (comment of 2024-11-05)
    """
    x, w, y = problem()
    states = x.tanh()
    collected = states.detach().requires_grad_()
    n_valid = (y != -100).sum()
    for part, target in zip(collected.split(4), y.split(4), strict=True):
        (F.cross_entropy(part @ w.T, target, reduction="sum") / n_valid).backward()
    states.backward(collected.grad)
    by_hand = copy.deepcopy((x.grad, w.grad))
    ours = torch.autograd.grad(linear_cross_entropy(x.tanh(), w, y, chunk_size=4), (x, w))
    torch.testing.assert_close(ours, by_hand)


# ---------------------------------------------------------------- around the loss


def test_torchtitan_3375_snapshots_are_pickled_with_protocol_4(tmp_path: Path) -> None:
    """PyTorch's page showed nothing of a snapshot that was pickled with protocol 5.

    https://github.com/pytorch/torchtitan/pull/3375
    """
    x, w, y = problem(dtype=torch.float32)
    path = tmp_path / "step.pickle"
    simulate(linear_cross_entropy, x, w, y).to_snapshot(path)
    opcode, protocol, _ = next(pickletools.genops(path.read_bytes()))
    assert (opcode.name, protocol) == ("PROTO", 4)


def test_torchtitan_3628_pytorch_124784_missing_frames_are_survived(tmp_path: Path) -> None:
    """Blocks of backward came without frames.

    https://github.com/pytorch/torchtitan/pull/3628, https://github.com/pytorch/pytorch/pull/124784
    """
    x, w, y = problem(dtype=torch.float32)
    timeline = simulate(linear_cross_entropy, x, w, y)
    assert all(allocation.frames for allocation in timeline.allocations if allocation.start)
    without = replace(timeline, allocations=tuple(replace(each, frames=()) for each in timeline.allocations))
    without.to_snapshot(tmp_path / "step.pickle")
    again = Timeline.from_snapshot(tmp_path / "step.pickle")
    assert not any(allocation.frames for allocation in again.allocations)
    assert again.step_peak_bytes == timeline.step_peak_bytes
    assert again.to_html()


def test_unsloth_501_2783_soup_385_capability_decides_about_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 says that it supports bfloat16, and ptxas refuses it: the compute capability decides.

    https://github.com/unslothai/unsloth/issues/501, https://github.com/unslothai/unsloth/issues/2783,
    https://github.com/MakazhanAlpamys/Soup/issues/385
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **options: True)
    t4 = torch.device("cuda", 0)
    reason = kernels.problem("triton", t4, torch.bfloat16)
    assert reason is not None and "bfloat16" in reason and "8.0" in reason
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "flce_ref").rglob("*.py")]
    assert not any("is_bf16_supported(" in source for source in sources)


def replaced_by(notebook: str) -> list[str]:
    """The installations in a notebook's text that may replace torch or numpy."""
    commands = re.findall(r"pip install[^\"\\]*", notebook)
    return [command for command in commands if re.search(r"\b(torch|numpy)\b|--upgrade|-U\b", command)]


def test_d2l_2638_2659_2608_installing_replaces_neither_torch_nor_numpy() -> None:
    """An install cell replaced the runtime's numpy or torch, and broke it.

    https://github.com/d2l-ai/d2l-en/issues/2638, https://github.com/d2l-ai/d2l-en/issues/2659,
    https://github.com/d2l-ai/d2l-en/issues/2608
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [each for extra in project["optional-dependencies"].values() for each in extra]
    for requirement in wanted:
        if re.match(r"(torch|numpy)\b", requirement):
            assert re.fullmatch(r"torch>=2\.8|numpy", requirement), requirement
    for lab in (ROOT / "notebooks").glob("*.ipynb"):
        assert not replaced_by(lab.read_text(encoding="utf-8")), lab.name
    assert replaced_by('"source": ["%pip install -q -U torch"]')
