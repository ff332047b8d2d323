"""The simulator against the real CPU allocator, event by event; what it names; what it says when it can't go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flce_ref import linear_cross_entropy
from flce_ref.memory import Timeline, simulate
from flce_ref.memory.head_step import float_logits, float_logits_kept, logits_kept
from flce_ref.memory.labels import label
from flce_ref.memory.operators import declare_workspace
from flce_ref.memory.shapes import Shapes
from flce_ref.memory.step_inputs import head_inputs
from tests.allocator_events import real_events, simulated_events, without_passing

GIB = 1 << 30
GRAVITY = (151552, 2048)
N, V, D, C, T = 2560, 500, 32, 640, 128  # chunk's rows of bools, the smallest buffers that matter, take more than 512 B


def head(n: int = N, v: int = V, d: int = D, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Real tensors: input, linear_weight, target."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(n, d, generator=g).to(dtype), torch.randn(v, d, generator=g).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(v, (n,), generator=g)


def schedule(**options: Any) -> Callable[..., Tensor]:
    def step(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        out = linear_cross_entropy(input, linear_weight, target, **options)
        loss = out[0] + out[1].sum() if isinstance(out, tuple) else out
        return loss.sum() if loss.ndim else loss

    return step


def wider_logits(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).double(), y)  # .float(), of tensors that are float32 already


def wider_logits_kept(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w).double()
    return F.cross_entropy(logits, y), logits


def fan_in(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    h = x * 2
    a, b = h.exp(), h * h + h  # h has five readers: four sums of gradients
    return F.cross_entropy((a + b + h) @ w.T, y)


def fan_in_of_a_view(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    h = (x @ w.T).T
    return h.exp().sum() + (h * h).mean() + h[3].sum()


def gathered(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return -F.log_softmax(x @ w.T, -1).gather(1, y[:, None]).mean()


def backward_of_each_chunk(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    for x_chunk, y_chunk in zip(x.split(C), y.split(C)):
        loss = F.cross_entropy(F.linear(x_chunk, w), y_chunk, reduction="sum")
        loss.backward()
        total = total + loss.detach()
    return total


def twice_backward(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(F.linear(x, w), y)
    loss.backward(retain_graph=True)
    return loss


def fan_in_and_backward_within(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    loss = fan_in(x, w, y)
    loss.backward()
    return loss.detach()


def graph_kept_in_fused(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    loss = linear_cross_entropy(x, w, y, chunk_size=C)
    loss.backward(retain_graph=True)
    return loss


def hooked(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(x, w)
    logits.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(logits, y)


def sgd(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(F.linear(x, w), y)
    loss.backward()
    with torch.no_grad():
        momentum = torch.zeros_like(w)
        momentum.mul_(0.9).add_(w.grad)
        w.sub_(momentum * 0.1)
    return loss.detach()


class ScaledInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scratch = x * 2
        ctx.save_for_backward(scratch.exp())
        return scratch + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        scratch = ctx.saved_tensors[0] * grad
        return scratch * 3


def autograd_function(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(ScaledInBackward.apply(x) @ w.T, y)


SCHEDULES = {
    "naive": {"schedule": "naive"},
    "naive, every option": {"schedule": "naive", "softcap": 5.0, "z_loss": 0.1, "label_smoothing": 0.1},
    "chunked": {"schedule": "chunked", "chunk_size": C},
    "checkpointed": {"schedule": "checkpointed", "chunk_size": C},
    "fused": {},
    "fused, chunks": {"chunk_size": C},
    "fused, every option": {"chunk_size": C, "softcap": 5.0, "z_loss": 0.1, "label_smoothing": 0.1},
    "fused, loss per token": {"chunk_size": C, "reduction": "none"},
    "fused, lse": {"chunk_size": C, "return_lse": True},
    "vocab_tiled": {"schedule": "vocab_tiled", "chunk_size": T},
    "vocab_tiled, every option": {
        "schedule": "vocab_tiled",
        "chunk_size": T,
        "softcap": 5.0,
        "z_loss": 0.1,
        "label_smoothing": 0.1,
    },
}
STEPS: dict[str, Callable[..., Any]] = {name: schedule(**options) for name, options in SCHEDULES.items()} | {
    f.__name__: f
    for f in (
        logits_kept, wider_logits, wider_logits_kept, fan_in, fan_in_of_a_view, gathered, backward_of_each_chunk,
        twice_backward, fan_in_and_backward_within, graph_kept_in_fused, hooked, autograd_function,
    )
}  # fmt: skip


@pytest.fixture
def no_range_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the targets' values takes small buffers, on the CPU and with real tensors only."""
    monkeypatch.setattr("flce_ref.call.check_target_range", lambda *_: None)


# ---------------------------------------------------------------- the same events as a real allocator's


@pytest.mark.usefixtures("no_range_check")
@pytest.mark.parametrize("name", STEPS)
def test_every_allocation_and_free_is_that_of_the_cpu_allocator(name: str) -> None:
    simulated = simulated_events(simulate(STEPS[name], *head(), kernel="cpu"))
    assert simulated == real_events(STEPS[name], *head())
    assert len(simulated) > 5


def test_a_step_that_calls_backward_itself_and_updates_the_weight() -> None:
    x, w, y = head()
    real = real_events(sgd, x, w, y)
    timeline = simulate(sgd, *head(), kernel="cpu")
    assert simulated_events(timeline) == real
    assert timeline.backward_start is not None
    assert timeline.forward_peak_bytes < timeline.step_peak_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, D // 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, checkpointed: bool, fused: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(V, D), nn.ModuleList(Block() for _ in range(3))
        self.lm_head, self.checkpointed, self.fused = nn.Linear(D, V, bias=False), checkpointed, fused

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointed else block(x)
        if self.fused:
            return linear_cross_entropy(x, self.lm_head.weight, target, chunk_size=C)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), target.flatten())


@pytest.mark.usefixtures("no_range_check")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_decoder(checkpointed: bool, fused: bool) -> None:
    model, ids = Decoder(checkpointed, fused), torch.randint(V, (20, 128))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    timeline = simulate(model, ids, ids, kernel="cpu")
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before  # its own parameters are back
    assert all(p.grad is None for p in model.parameters())
    # Batched products on the CPU copy small matrices for the time of a call.
    simulated, real = (without_passing(e) for e in (simulated_events(timeline), real_events(model, ids, ids)))
    assert simulated == real
    labels = {a.label for a in timeline.allocations}
    assert {"lm_head.weight", "blocks.1.up.weight", "gradient of blocks.1.up.weight"} <= labels


def test_gradients_that_are_there_already_are_added_to() -> None:
    x, w, y = head()
    step = schedule(chunk_size=C)
    first = simulate(step, x, w, y)

    def two_steps(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        step(x, w, y).backward()
        return step(x, w, y)

    # The second dw is a buffer of its own until it has been added to the first.
    assert simulate(two_steps, x, w, y).step_peak_bytes >= first.step_peak_bytes
    survivors = [a for a in simulate(two_steps, x, w, y).allocations if a.end is None and a.start]
    assert sum(a.category == "dw" for a in survivors) == 1


# ---------------------------------------------------------------- peaks known from elsewhere


@pytest.mark.parametrize(
    ("options", "gib"),
    [  # measured on an H200: book/data/h200/peers-2026-12-01.json
        ({"schedule": "naive"}, 6.937500953674316),
        ({"schedule": "chunked", "chunk_size": 1024}, 3.476566791534424),
        ({"schedule": "checkpointed", "chunk_size": 1024}, 1.7421889305114746),
        ({"schedule": "checkpointed", "chunk_size": 256}, 1.7363295555114746),
    ],
)
def test_step_peaks_are_those_measured_on_an_h200(options: dict[str, Any], gib: float) -> None:
    timeline = simulate(schedule(**options), *head_inputs(8192, *GRAVITY))
    assert timeline.step_peak_bytes / GIB == pytest.approx(gib, rel=1e-4)


@pytest.mark.parametrize(("name", "step"), [("snap_naive", "naive"), ("snap_chunked8", "chunked")])
def test_large_buffers_come_and_go_as_recorded_on_an_h200(name: str, step: str) -> None:
    recorded = Timeline.from_snapshot(f"book/data/h200/{name}.pickle")
    options = {"schedule": step} | ({"chunk_size": 1024} if step == "chunked" else {})
    simulated = simulate(schedule(**options), *head_inputs(8192, *GRAVITY))
    large = [[size for size in simulated_events(t) if abs(size) >= 1 << 20] for t in (simulated, recorded)]
    assert large[0] == large[1]
    assert len(large[0]) >= 10


@pytest.mark.parametrize(("step", "gib"), [(logits_kept, 9.86), (float_logits, 14.48), (float_logits_kept, 19.11)])
def test_what_users_write_by_hand(step: Callable[..., Any], gib: float) -> None:
    # Input and weight are 0.609 GiB, the logits 2.3125: four of them, six, eight.
    assert simulate(step, *head_inputs(8192, *GRAVITY)).peak_bytes / GIB == pytest.approx(gib, abs=0.01)


def test_peaks_and_sizes_of_a_step_counted_by_hand() -> None:
    def step(x: Tensor) -> Tensor:
        y = x.exp()  # 400 B, kept for backward
        return (y * y).sum()  # y², freed once summed

    timeline = simulate(step, torch.zeros(100, requires_grad=True))
    assert [a.bytes for a in timeline.allocations] == [512] * len(timeline.allocations)
    assert timeline.input_bytes == 512
    assert timeline.forward_peak_bytes == 3 * 512  # y, y², their sum
    assert timeline.peak_bytes == timeline.step_peak_bytes + 512
    assert simulate(lambda x: x.sum(), torch.zeros(129)).allocations[0].bytes == 1024  # 516 B
    assert simulate(lambda x: x.sum(), torch.zeros(3)).backward_start is None


def test_the_same_step_gives_the_same_timeline() -> None:
    tensors = head_inputs(4096, *GRAVITY)
    step = schedule(schedule="checkpointed", chunk_size=512)
    assert simulate(step, *tensors) == simulate(step, *tensors)


@pytest.mark.parametrize("name", ["naive, every option", "checkpointed", "fused, every option", "fan_in_of_a_view"])
@pytest.mark.parametrize("kernel", ["cuda", "eager", "cpu"])
def test_remembered_shapes_are_those_of_fake_tensor_mode(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = simulate(STEPS[name], *head(), kernel=kernel)
    monkeypatch.setattr(Shapes, "run", lambda self, operator, args, kwargs: operator(*args, **kwargs))
    assert simulate(STEPS[name], *head(), kernel=kernel) == fast


# ---------------------------------------------------------------- names


def labels_at_peak(options: dict[str, Any]) -> list[str]:
    return [name for name, _ in simulate(schedule(**options), *head_inputs(8192, *GRAVITY)).alive_at_peak()]


def test_what_is_alive_at_the_peak_has_its_name() -> None:
    assert labels_at_peak({"schedule": "naive"})[:5] == [
        "dlogits", "gradient of the log-probabilities", "log-probabilities", "linear_weight", "input",
    ]  # fmt: skip
    chunked = labels_at_peak({"schedule": "chunked", "chunk_size": 1024})
    assert {"dw of chunk 7", "dw of chunk 8", "dw, summed over chunks", "log-probabilities of chunk 3"} <= set(chunked)
    fused = labels_at_peak({})
    assert fused[:4] == ["dw accumulator (float32)", "linear_weight", "logits buffer", "dx"]
    assert labels_at_peak({"accum_dtype": torch.bfloat16, "chunk_size": 1024})[:4] == [
        "dw accumulator (bfloat16)", "linear_weight", "logits buffer", "dx",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_large_buffer_is_left_unnamed(name: str) -> None:
    timeline = simulate(schedule(**SCHEDULES[name]), *head())
    large = [a for a in timeline.allocations if a.bytes >= V * D * 4]
    assert [a.label for a in large if a.category in ("activation", "other") or not a.label] == []


def test_every_allocation_has_the_line_that_made_it() -> None:
    timeline = simulate(schedule(schedule="naive"), *head())
    logits, log_probabilities = (
        next(a for a in timeline.allocations if a.label == name) for name in ("logits", "log-probabilities")
    )
    assert (logits.frames[0].filename, logits.frames[0].name) == ("flce_ref/schedules/plain.py", "plain_loss")
    assert log_probabilities.frames[0].name == "cross_entropy"
    assert logits.frames[-1].filename.endswith("test_simulator.py")
    dw = next(a for a in timeline.allocations if a.label == "dw")
    assert [f.name for f in dw.frames][:2] == ["MmBackward0", "plain_loss"]  # the node, then its line in forward
    assert not any("simulator.py" in f.filename and "test_" not in f.filename for f in dw.frames)


def test_own_names() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        with label("block 3"):
            h = (x @ w).exp()
        return (h * 2).sum()

    timeline = simulate(step, torch.zeros(300, 300, requires_grad=True), torch.zeros(300, 300), labels=["a", "b"])
    assert {"a", "b", "block 3"} <= {a.label for a in timeline.allocations}
    assert any(a.label == "block 3" and a.start >= timeline.backward_start for a in timeline.allocations)


# ---------------------------------------------------------------- operators of torch.library


@torch.library.custom_op("flce_ref_tests::twice_exp", mutates_args=())
def twice_exp(x: Tensor) -> Tensor:
    doubled = x * 2
    return doubled.exp()


@twice_exp.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_python_body_is_opened() -> None:
    timeline = simulate(lambda x: twice_exp(x).sum(), torch.zeros(1000), kernel="cuda")
    assert [a.bytes for a in timeline.allocations] == [4096, 4096, 4096, 512]  # x, doubled, its exp, the sum
    assert timeline.notes == ()


def test_an_opaque_operator_is_booked_by_its_outputs_and_declared_workspace() -> None:
    library = torch.library.Library("flce_ref_opaque", "DEF")
    library.define("kernel(Tensor x) -> Tensor")
    torch.library.register_fake("flce_ref_opaque::kernel", lambda x: torch.empty_like(x), lib=library)
    declare_workspace("flce_ref_opaque::kernel", lambda x: 3 * x.numel())
    timeline = simulate(lambda x: torch.ops.flce_ref_opaque.kernel(x).sum(), torch.zeros(1000))
    workspace = next(a for a in timeline.allocations if a.category == "workspace")
    assert (workspace.label, workspace.bytes) == ("workspace of flce_ref_opaque::kernel", 3072)
    assert timeline.notes == (
        "kernel 'cuda': flce_ref_opaque::kernel is booked by its outputs and a declared workspace of up to 3000 B "
        "(1 calls)",
    )
    with pytest.raises(ValueError, match="namespace::name"):
        declare_workspace("kernel", lambda: 0)


def test_the_kernel_decides_what_is_opened() -> None:
    timelines = {kernel: simulate(schedule(chunk_size=C), *head(), kernel=kernel) for kernel in ("cuda", "eager")}
    assert any("cross_entropy_ is booked by its outputs" in note for note in timelines["cuda"].notes)
    assert not any("cross_entropy_" in note for note in timelines["eager"].notes)
    assert timelines["eager"].n_events > timelines["cuda"].n_events


# ---------------------------------------------------------------- clear errors


def test_bad_arguments() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(TypeError, match="step must be callable, got int"):
        simulate(3, x)
    with pytest.raises(ValueError, match="kernel must be one of cuda, triton, eager, cpu, got 'gpu'"):
        simulate(torch.sum, x, kernel="gpu")
    with pytest.raises(ValueError, match="labels must name each of the 1 inputs, got 2"):
        simulate(torch.sum, x, labels=["a", "b"])
    with pytest.raises(TypeError, match=r"step must return a loss.*got NoneType"):
        simulate(lambda x: None, x)
    with pytest.raises(ValueError, match=r"0-d loss, got a tensor of shape \(3,\)"):
        simulate(lambda x: x * 2, x)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        head_inputs(0, 5, 5)
    with pytest.raises(TypeError, match="text must be a string"), label(3):  # type: ignore[arg-type]
        pass


def test_a_step_that_reads_values_is_told_why_it_cant() -> None:
    with pytest.raises(Exception) as caught:
        simulate(lambda x: x.exp().sum().item(), torch.zeros(3), title="reads a value")
    note = caught.value.__notes__[-1]
    assert "while simulating the forward pass of 'reads a value'" in note
    assert "can't read any (item, tolist" in note


def test_a_tensor_from_outside_is_refused_with_the_reason() -> None:
    outside = torch.zeros(3)
    with pytest.raises(Exception) as caught:
        simulate(lambda x: (x * outside).sum(), torch.zeros(3, requires_grad=True))
    assert "every tensor it uses must be among the inputs" in caught.value.__notes__[-1]


# ---------------------------------------------------------------- time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "options", "seconds"),
    [
        *((131072, options, 5) for options in ({"schedule": "naive"}, {"schedule": "chunked"}, {})),
        (131072, {"schedule": "checkpointed"}, 5),
        (1 << 20, {"schedule": "checkpointed"}, 20),
        (1 << 20, {}, 20),
        (8192, {"schedule": "chunked", "chunk_size": 8}, 10),
    ],
    ids=str,
)
def test_it_takes_seconds(tokens: int, options: dict[str, Any], seconds: float) -> None:
    tensors = head_inputs(tokens, *GRAVITY)
    began = time.process_time()  # not the clock: other processes may share the cores
    simulate(partial(linear_cross_entropy, **options), *tensors)
    assert time.process_time() - began < seconds


def test_long_simulations_show_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("flce_ref.memory.progress.Progress._PATIENCE", 0.0)
    monkeypatch.setattr("flce_ref.memory.progress.Progress._EVERY", 10)
    simulate(schedule(schedule="chunked", chunk_size=C), *head(), title="four chunks")
    shown = capsys.readouterr().err
    assert "simulating four chunks: 10 operators" in shown
    assert "forward" in shown and "backward [#" in shown
    assert shown.endswith("\r\033[K")  # and it wipes its line
