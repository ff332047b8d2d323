"""The predicted step peak against the simulator, which counts every buffer, for every schedule and shape of head."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flce_ref import explain, linear_cross_entropy
from flce_ref.memory import simulate
from tests.oracle import problem

GRAVITY = (151552, 2048)
SMALL_VOCABULARY = (32000, 4096)
CASES = [
    {"schedule": "naive"}, {"schedule": "naive", "softcap": 30.0}, {"schedule": "naive", "z_loss": 1e-4},
    {"schedule": "naive", "softcap": 30.0, "z_loss": 1e-4},
    *({"schedule": s, "chunk_size": c} for s in ("chunked", "checkpointed") for c in (8192, 4096, 2048, 1024, 256)),
    *({"schedule": s, "chunk_size": 1024, "softcap": 30.0, "z_loss": 1e-4} for s in ("chunked", "checkpointed")),
    {}, {"chunk_size": 8192}, {"chunk_size": 512}, {"accum_dtype": torch.bfloat16}, {"reduction": "none"},
    {"return_lse": True}, *({"schedule": "vocab_tiled"} | more for more in (
        {}, {"chunk_size": 1024}, {"chunk_size": 16384}, {"accum_dtype": torch.bfloat16}, {"reduction": "none"})),
    {"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1},
]  # fmt: skip


def head(n: int, v: int, d: int, x_grad: bool = True, w_grad: bool = True, w_dtype: torch.dtype = torch.bfloat16):  # type: ignore[no-untyped-def]
    x = torch.empty(n, d, dtype=torch.bfloat16, device="meta", requires_grad=x_grad)
    w = torch.empty(v, d, dtype=w_dtype, device="meta", requires_grad=w_grad)
    return x, w, torch.empty(n, dtype=torch.int64, device="meta")


def simulated(tensors, **options):  # type: ignore[no-untyped-def]
    def step(input, linear_weight, target):  # type: ignore[no-untyped-def]
        out = linear_cross_entropy(input, linear_weight, target, **options)
        loss = out[0] if isinstance(out, tuple) else out
        return loss.sum() if loss.ndim else loss

    return simulate(step, *tensors).step_peak_bytes


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("v", "d"), [GRAVITY, SMALL_VOCABULARY])
def test_the_prediction_is_what_the_simulator_counts(options: dict[str, object], v: int, d: int) -> None:
    tensors = head(8192, v, d)
    assert explain(*tensors, **options).step_peak_bytes == pytest.approx(simulated(tensors, **options), rel=0.01)


@pytest.mark.parametrize(("x_grad", "w_grad"), list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
def test_frozen_tensors_are_not_counted(schedule: str, x_grad: bool, w_grad: bool) -> None:
    tensors = head(4096, *GRAVITY, x_grad, w_grad)
    size = {"naive": {}, "vocab_tiled": {"chunk_size": 8192}}.get(schedule, {"chunk_size": 512})
    predicted = explain(*tensors, schedule=schedule, **size).step_peak_bytes
    assert predicted == pytest.approx(simulated(tensors, schedule=schedule, **size), rel=0.01)


@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_returned_lse_counts_as_one_that_is_read(schedule: str, softcap: float | None) -> None:
    tensors, options = head(4096, *GRAVITY), {"schedule": schedule, "return_lse": True, "softcap": softcap}
    assert explain(*tensors, **options).step_peak_bytes == pytest.approx(simulated(tensors, **options), rel=0.01)


@pytest.mark.parametrize("b_grad", [False, True])
@pytest.mark.parametrize("schedule", ["naive", "chunked", "checkpointed", "fused", "vocab_tiled"])
def test_a_bias_alone_may_need_its_gradient(schedule: str, b_grad: bool) -> None:
    x, w, y = head(4096, *GRAVITY, x_grad=False, w_grad=False)
    bias = torch.empty(GRAVITY[0], dtype=torch.bfloat16, device="meta", requires_grad=b_grad)

    def step(input, linear_weight, target, linear_bias):  # type: ignore[no-untyped-def]
        return linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, schedule=schedule)

    answer = explain(x, w, y, linear_bias=bias, schedule=schedule)
    few_of_v = 8 * GRAVITY[0]  # the bias's sum and gradient are not counted, and little else is there
    simulated_bytes = simulate(step, x, w, y, bias).step_peak_bytes
    assert answer.step_peak_bytes == pytest.approx(simulated_bytes, rel=0.01, abs=few_of_v)
    assert ("no gradient is wanted" in str(answer)) == (not b_grad and schedule in ("fused", "vocab_tiled"))


def test_autocast_with_a_float32_weight() -> None:
    v, d = GRAVITY

    def step(input, linear_weight, target):  # type: ignore[no-untyped-def]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(input, linear_weight, target)

    with FakeTensorMode():  # autocast does not know the meta device
        x = torch.empty(8192, d, dtype=torch.bfloat16, requires_grad=True)
        w, y = torch.empty(v, d, requires_grad=True), torch.empty(8192, dtype=torch.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = explain(x, w, y).step_peak_bytes
            assert explain(x, w, y, schedule="naive").step_peak_bytes is None
    assert predicted == pytest.approx(simulate(step, x, w, y).step_peak_bytes, rel=0.01)


def test_it_says_what_would_run_and_why() -> None:
    x, w, y = problem(dtype=torch.float32)
    answer = explain(x, w, y, reduction="none", chunk_size=4)
    assert (answer.schedule, answer.kernel, answer.chunk_size) == ("fused", "eager", 4)
    assert "backward makes the logits again" in str(answer)
    assert explain(x, w, y, schedule="naive").chunk_size is None
    assert explain(x.detach(), w.detach(), y).step_peak_bytes == 13 * 17 * 4
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunks'"):
        explain(x, w, y, chunks=4)
    with pytest.raises(ValueError, match="schedule"):
        explain(x, w, y, schedule="magic")
