"""Bad input: each error names the argument, what came and what is accepted; nothing is silently reinterpreted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flce_ref import LinearCrossEntropyLoss, explain, linear_cross_entropy
from flce_ref.arguments import HONOURS
from flce_ref.schedules.plan import default_chunk_size
from tests.oracle import oracle, problem

X, W, Y = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"input": [[1.0]]}, TypeError, r"input must be a torch.Tensor, got list"),
        ({"input": torch.tensor(1.0)}, ValueError, r"input must be \(…, D\)"),
        ({"input": X.long()}, TypeError, r"input must have one of the dtypes .*, got torch.int64"),
        ({"input": X.double()}, TypeError, r"linear_weight is torch.float32 but input is torch.float64"),
        ({"linear_weight": torch.zeros(5, 4)}, ValueError, r"linear_weight must be \(V, D\).* D = 3.*got \(5, 4\)"),
        ({"linear_weight": torch.zeros(0)}, ValueError, r"got \(0,\); a weight sharded by FSDP or ZeRO-3"),
        ({"linear_weight": torch.zeros(0, 3)}, ValueError, r"got \(0, 3\); a weight sharded"),
        ({"linear_weight": torch.zeros(5, 2, 3)}, ValueError, r"linear_weight must be \(V, D\)"),
        ({"linear_weight": W.to("meta")}, ValueError, r"linear_weight is on meta but input is on cpu"),
        ({"target": Y.double()}, TypeError, r"class probabilities are not supported"),
        ({"target": Y.bool()}, TypeError, r"target must have one of the dtypes .*, got torch.bool"),
        ({"target": Y[:3]}, ValueError, r"target must have the shape .*\(4,\), got \(3,\)"),
        ({"target": Y.reshape(2, 2)}, ValueError, r"target must have the shape .*\(4,\), got \(2, 2\)"),
        ({"target": Y + 5}, IndexError, r"target 5 is out of range: accepted are 0 … 4 and ignore_index=-100"),
        ({"target": Y - 1}, IndexError, r"target -1 is out of range"),
        ({"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias must be \(5,\).*got \(4,\)"),
        (
            {"linear_bias": torch.zeros(5).double()},
            TypeError,
            r"linear_bias is torch.float64 but input is torch.float32",
        ),
        ({"weight": torch.zeros(4)}, ValueError, r"weight must be \(5,\).*got \(4,\)"),
        ({"weight": torch.zeros(5).long()}, TypeError, r"weight must have one of the dtypes"),
        ({"weight": torch.zeros(5, requires_grad=True)}, ValueError, r"weight requires grad"),
        ({"reduction": "avg"}, ValueError, r"reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
        ({"ignore_index": 1.5}, TypeError, r"ignore_index must be an int or None, got 1.5"),
        ({"ignore_index": True}, TypeError, r"ignore_index must be an int or None, got True"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be a number in \[0, 1\], got 1.5"),
        ({"label_smoothing": float("nan")}, ValueError, r"label_smoothing must be"),
        ({"label_smoothing": "0.1"}, TypeError, r"label_smoothing must be"),
        ({"z_loss": -1e-4}, ValueError, r"z_loss must be a finite number ≥ 0 that float32 holds, got -0.0001"),
        ({"z_loss": float("inf")}, ValueError, r"z_loss must be"),
        ({"softcap": 0.0}, ValueError, r"softcap must be None or a finite number > 0 that float32 holds, got 0.0"),
        ({"schedule": "magic"}, ValueError, r"schedule must be one of 'naive', .*'vocab_tiled', got 'magic'"),
        ({"chunk_size": 0}, ValueError, r"chunk_size must be an int ≥ 1 or None, got 0"),
        ({"chunk_size": 2.0}, TypeError, r"chunk_size must be an int ≥ 1 or None, got 2.0"),
        ({"accum_dtype": torch.float16}, ValueError, r"accum_dtype .*got torch.float16: an unscaled dw overflows"),
        (
            {"accum_dtype": torch.bfloat16},
            ValueError,
            r"accum_dtype for torch.float32 products must be None, torch.float32",
        ),
        ({"accum_dtype": "float32"}, TypeError, r"accum_dtype must be a torch.dtype or None"),
        ({"kernel": "warp"}, ValueError, r"kernel must be one of 'auto', 'cuda', 'triton', 'eager', got 'warp'"),
        ({"options": object()}, TypeError, r"options belong to torch.nn.functional.linear_cross_entropy"),
        ({"schedule": "naive", "chunk_size": 2}, ValueError, r"schedule='naive' has no use for chunk_size"),
        ({"schedule": "chunked", "kernel": "eager"}, ValueError, r"schedule='chunked' has no use for kernel"),
        (
            {"schedule": "checkpointed", "accum_dtype": torch.float32},
            ValueError,
            r"has no use for accum_dtype.*'fused'",
        ),
        ({"filter_eps": 0.1}, ValueError, r"schedule='fused' has no use for filter_eps.*'vocab_tiled'"),
        ({"schedule": "vocab_tiled", "filter_eps": 0}, ValueError, r"filter_eps must be a number in \(0, 1\) or None"),
        ({"schedule": "vocab_tiled", "filter_eps": "auto"}, TypeError, r"filter_eps must be .*got 'auto'"),
    ],
)
def test_errors_name_the_argument(change: dict[str, object], error: type[Exception], says: str) -> None:
    arguments = {"input": X, "linear_weight": W, "target": Y} | change
    with pytest.raises(error, match=says):
        linear_cross_entropy(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
def test_every_schedule_looks_at_the_targets(schedule: str) -> None:
    with pytest.raises(IndexError, match="target 5 is out of range"):
        linear_cross_entropy(X, W, Y + 5, schedule=schedule)
    assert linear_cross_entropy(X, W, Y + 5, schedule=schedule, ignore_index=5).isnan()


def test_fake_and_meta_tensors_are_not_looked_at() -> None:
    x, w, y = (t.to("meta") for t in (X, W, Y))
    assert linear_cross_entropy(x, w, y).shape == ()


@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_target_outside_the_vocabulary_that_nobody_looked_at_is_nan(schedule: str, reduction: str) -> None:
    # On CUDA, and while compiling, values are not read; here the check is taken out to see what the schedules do.
    x, w, y = problem()
    for value in (17, -1, 2**40, -(2**40)):
        bad = y.clone()
        bad[4] = value
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flce_ref.call.check_target_range", lambda *_: None)
            loss = linear_cross_entropy(x, w, bad, schedule=schedule, reduction=reduction)
        dx, dw = torch.autograd.grad(loss.sum(), (x, w))
        assert (loss[4] if reduction == "none" else loss).isnan()
        assert dx[4].isnan().all() and dw.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_target_dtypes(dtype: torch.dtype) -> None:
    x, w, y = problem(ignored=())
    torch.testing.assert_close(linear_cross_entropy(x, w, y.to(dtype)), oracle(x, w, y)[0])


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no linear_cross_entropy")
def test_calls_written_for_pytorch_work_unchanged() -> None:
    x, w, y = problem(ignored=())
    weight = torch.rand(17, dtype=torch.float64)
    for options in (
        {},
        {"ignore_index": None},
        {"ignore_index": 3, "reduction": "sum"},
        {"weight": weight, "options": None},
        {"label_smoothing": 0.1, "reduction": "none"},
        {"linear_bias": weight},
    ):
        torch.testing.assert_close(linear_cross_entropy(x, w, y, **options), F.linear_cross_entropy(x, w, y, **options))


def test_numbers_of_any_kind_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    x, w, y = problem(ignored=())
    a = linear_cross_entropy(x, w, y, chunk_size=np.int64(4), label_smoothing=np.float32(0.5), ignore_index=np.int32(3))
    torch.testing.assert_close(a, linear_cross_entropy(x, w, y, chunk_size=4, label_smoothing=0.5, ignore_index=3))


@pytest.mark.parametrize("arguments", [{"reduction": "avg"}, {"softcap": -1.0}, {"label_smoothing": 2}])
def test_the_module_checks_when_it_is_made(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        LinearCrossEntropyLoss(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("d", [1, 64, 1000, 2048, 16384])
@pytest.mark.parametrize("n", [0, 1, 2, 1023, 1024, 1025, 8192, 8193, 131072, 2**20])
def test_the_default_chunk(n: int, d: int) -> None:
    size = default_chunk_size(n, d)
    assert 1 <= size <= max(1, n)
    assert size <= max(1024, d) + 127  # the buffer is bounded
    if n > size:
        chunks = -(-n // size)
        assert size % 128 == 0 and size >= 512  # whole tiles of the products, and enough of them
        assert n - (chunks - 1) * size > size - 128 * chunks  # the last one is short by rounding only, not a sliver


@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.int8, 128), (torch.int8, 1000), (torch.int16, 40_000), (torch.uint8, 300)]
)
def test_the_vocabulary_need_not_fit_the_targets_dtype(dtype: torch.dtype, vocab: int) -> None:
    x, w, y = torch.randn(3, 5), torch.randn(vocab, 5), torch.tensor([50, 3, 4])
    for schedule in HONOURS:
        got = linear_cross_entropy(x, w, y.to(dtype), schedule=schedule)
        torch.testing.assert_close(got, torch.nn.functional.cross_entropy(x @ w.T, y))


def test_a_narrow_target_out_of_range_is_found() -> None:
    x, w = torch.randn(3, 5), torch.randn(100, 5)
    with pytest.raises(IndexError, match="target 156 is out of range: accepted are 0 … 99"):
        linear_cross_entropy(x, w, torch.tensor([156, 3, 4], dtype=torch.uint8))  # −100 as a uint8
    with pytest.raises(IndexError, match="target 44 is out of range"):
        linear_cross_entropy(x, w[:11], torch.tensor([44, 3, 4], dtype=torch.int8), ignore_index=300)
    with pytest.raises(IndexError, match="target 100 is out of range"):
        linear_cross_entropy(x, w, torch.nn.Parameter(torch.tensor([100, 3, 4]), requires_grad=False))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ignore_index": 2**80}, ValueError, "ignore_index must fit in 64 bits"),
        ({"z_loss": 10**400}, ValueError, "z_loss must be a finite number ≥ 0 that float32 holds"),
        ({"softcap": 1e300}, ValueError, "softcap must be None or a finite number > 0 that float32 holds"),
        ({"softcap": 1e-300}, ValueError, "softcap must be None or a finite number > 0 that float32 holds"),
        ({"schedule": []}, ValueError, "schedule must be one of"),
        ({"reduction": []}, ValueError, "reduction must be one of"),
        ({"kernel": []}, ValueError, "kernel must be one of"),
        ({"skip_ignored": "no"}, TypeError, "skip_ignored must be True or False, got 'no'"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
    ],
    ids=str,
)
def test_numbers_too_large_and_values_of_other_kinds(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    x, w, y = torch.randn(3, 5), torch.randn(11, 5), torch.tensor([0, 3, 4])
    with pytest.raises(error, match=message):
        linear_cross_entropy(x, w, y, **options)


@pytest.mark.parametrize("name", ["input", "linear_weight", "target"])
def test_only_dense_tensors(name: str) -> None:
    tensors = {"input": torch.randn(3, 5), "linear_weight": torch.randn(11, 5), "target": torch.tensor([0, 3, 4])}
    tensors[name] = tensors[name].to_sparse()
    for function in (linear_cross_entropy, explain):
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor .torch.strided., got torch.sparse_coo"):
            function(**tensors)


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 3e38])
def test_a_mean_does_not_depend_on_the_scale_of_class_weights(scale: float) -> None:
    torch.manual_seed(0)
    x, w, y = torch.randn(6, 3), torch.randn(5, 3), torch.randint(0, 5, (6,))
    weight = torch.full((5,), scale)
    torch.testing.assert_close(linear_cross_entropy(x, w, y, weight=weight), linear_cross_entropy(x, w, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "fastest"}, "schedule must be one of"),
        ({"chunk_size": 0}, "chunk_size must be an int ≥ 1"),
        ({"schedule": "naive", "chunk_size": 8}, "has no use for chunk_size"),
        ({"accum_dtype": torch.float16}, "accum_dtype"),
        ({"kernel": "fast"}, "kernel must be one of"),
        ({"skip_ignored": 1}, "skip_ignored"),
    ],
)
def test_a_module_refuses_its_options_when_it_is_made(options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LinearCrossEntropyLoss(**options)  # type: ignore[arg-type]
    LinearCrossEntropyLoss(accum_dtype=torch.bfloat16, chunk_size=8)
