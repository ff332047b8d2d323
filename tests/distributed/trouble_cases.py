"""What goes wrong on one rank is an error on every rank, and soon."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flce_ref.distributed import token_parallel_linear_cross_entropy, vocab_parallel_linear_cross_entropy
from tests.distributed.harness import World, case, mine, raises
from tests.oracle import problem

N, D, V = 13, 6, 17


@case(sizes={2, 3, 4})
def ranks_disagree(world: World) -> None:
    """The last rank differs from the others in one thing; every rank says in which, and what who has."""
    odd = world.rank == world.size - 1
    x, w, y = problem(N, D, V, dtype=torch.float32, ignored=(), device=world.device)
    words, bias = mine(w, world), torch.zeros(mine(w, world).shape[0], device=world.device)
    weight = torch.ones(V, device=world.device)
    long = (x.detach().repeat(2, 1).requires_grad_(), words, y.repeat(2))
    for name, differing, usual, what in (
        ("shape", long, {}, r"the shape of input: rank 0 .* \(13, 6\), rank \d \(26, 6\)"),
        ("hidden size", (x[:, :4], words[:, :4], y), {}, "the hidden size: rank 0 of the group has 6, rank . 4"),
        ("dtype", (x.double(), words.double(), y), {}, "the dtype of input: .*'torch.float32', .*'torch.float64'"),
        ("grad", (x.detach(), words, y), {}, "whether input requires grad: .*True, .*False"),
        ("bias", {"linear_bias": bias}, {}, "whether there is a linear_bias"),
        ("weight", {"weight": weight}, {}, "the class weights: .*None, .*17"),
        ("reduction", {"reduction": "none"}, {}, "reduction: rank 0 .*'mean', rank . 'none'"),
        ("ignored", {"ignore_index": -1}, {}, "ignore_index: .*-100, .*-1"),
        ("smoothing", {"label_smoothing": 0.1}, {}, "label_smoothing: .*0.0, .*0.1"),
        ("z", {"z_loss": 0.1}, {"z_loss": 0.2}, "z_loss: .*0.2, .*0.1"),
        ("softcap", {"softcap": 3.0}, {}, "softcap: .*None, .*3.0"),
        ("chunk", {"chunk_size": 4}, {"chunk_size": 5}, "chunk_size: .*5, .*4"),
        ("lse", {"return_lse": True}, {}, "return_lse: .*False, .*True"),
    ):
        tensors, options = (x, words, y), usual
        if odd:
            tensors, options = (differing, usual) if isinstance(differing, tuple) else (tensors, differing)
        with raises(ValueError, f"ranks disagree on {what}"):
            vocab_parallel_linear_cross_entropy(*tensors, **options)
        if name in ("dtype", "bias", "weight", "ignored", "z"):
            with raises(ValueError, f"ranks disagree on {what}"):
                token_parallel_linear_cross_entropy(
                    tensors[0], w.to(tensors[0].dtype), y, gradients="summed",
                    **{k: torch.zeros(V, device=world.device) if k == "linear_bias" else v for k, v in options.items()},
                )  # fmt: skip
    with raises(ValueError, "ranks disagree on gradients: .*'averaged', .*'summed'"):
        token_parallel_linear_cross_entropy(x, w, y, gradients="summed" if odd else "averaged")
    with raises(ValueError, "ranks disagree on the number of words: .*17, .*16"):
        token_parallel_linear_cross_entropy(x, w[: V - odd], y % 16, gradients="summed")


@case()
def one_rank_has_bad_arguments(world: World) -> None:
    """Its own error on that rank; on the others one that names it. Afterwards the group still works."""
    odd, last = world.rank == world.size - 1, world.size - 1
    x, w, y = problem(N, D, V, dtype=torch.float32, device=world.device)
    words = mine(w, world)
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        ({"input": None}, TypeError, "input must be a torch.Tensor"),
        ({"input": x[:, :4]}, ValueError, "linear_weight must be"),
        ({"target": y[:5]}, ValueError, "target must have the shape"),
        ({"linear_bias": torch.zeros(99, device=world.device)}, ValueError, "linear_bias must be"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing must be"),
        ({"kernel": "fast"}, ValueError, "kernel must be one of"),
        ({"schedule": "naive"} | {"nonsense": 1}, TypeError, "schedule can't be chosen|nonsense"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    )
    for changed, kind, message in cases:
        for call, usual in (
            (vocab_parallel_linear_cross_entropy, {"input": x, "linear_weight": words, "target": y}),
            (token_parallel_linear_cross_entropy, {"input": x, "linear_weight": w, "target": y, "gradients": "summed"}),
        ):
            arguments = {**usual, **(changed if odd else {})}
            if odd:
                with raises(kind, message):
                    call(**arguments)
            else:
                with raises(RuntimeError, f"rank {last} of the group can't take part: {kind.__name__}: "):
                    call(**arguments)
    assert vocab_parallel_linear_cross_entropy(x, words, y).isfinite()


@case()
def targets_out_of_range(world: World) -> None:
    x, w, y = problem(N, D, V, dtype=torch.float32, device=world.device)
    bad = y.clone()
    bad[4] = V
    words = mine(w, world)
    last = world.size - 1
    given = bad if world.rank == last else y
    if world.device == "cpu":
        with raises(IndexError, rf"target 17 of rank {last} is out of range: accepted are 0 … 16"):
            vocab_parallel_linear_cross_entropy(x, words, given)
        with raises(IndexError if world.rank == last else RuntimeError, "target 17 is out of range"):
            token_parallel_linear_cross_entropy(x, w, given, gradients="summed")
    else:
        loss = vocab_parallel_linear_cross_entropy(x, words, bad)
        loss.backward()
        assert loss.isnan() and x.grad is not None and x.grad[4].isnan().all()


@case(sizes={2, 3, 4})
def targets_that_differ_between_ranks_make_nan(world: World) -> None:
    x, w, y = problem(N, D, V, dtype=torch.float32, device=world.device)
    y = y.clone()
    y[7] = (5 + (world.rank == world.size - 1)) % V
    words = mine(w, world)
    loss, lse = vocab_parallel_linear_cross_entropy(x, words, y, reduction="none", return_lse=True)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    wrong = torch.arange(N, device=world.device) == 7
    assert torch.equal(loss.isnan(), wrong) and torch.equal(dx.isnan().any(1), wrong), (loss, dx)
    assert torch.equal(lse.isnan(), wrong)


@case()
def no_word_anywhere_and_class_weights_of_another_vocabulary(world: World) -> None:
    x, w, y = problem(N, D, V, dtype=torch.float32, device=world.device)
    with raises(ValueError, "linear_weight must have a row on one rank at least"):
        vocab_parallel_linear_cross_entropy(x, w[:0], y)
    with raises(ValueError, r"weight must be \(17,\).*\(16,\)"):
        vocab_parallel_linear_cross_entropy(x, mine(w, world), y, weight=torch.ones(16, device=world.device))


@case(sizes={2})
def dtensors_that_are_not_accepted(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from flce_ref import linear_cross_entropy

    mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
    x, w, y = problem(N, D, V, dtype=torch.float32, device=world.device)
    w_cut = distribute_tensor(w.detach(), mesh, [Shard(0)])
    with raises(ValueError, r"linear_weight must be Shard\(0\) or Replicate\(\).*Shard\(dim=1\)"):
        vocab_parallel_linear_cross_entropy(x, distribute_tensor(w.detach(), mesh, [Shard(1)]), y)
    with raises(ValueError, "group must be None where linear_weight is a DTensor"):
        vocab_parallel_linear_cross_entropy(x, w_cut, y, group=dist.group.WORLD)
    with raises(ValueError, r"input must be a plain tensor or a DTensor .* replicated; got .*Shard\(dim=0\)"):
        vocab_parallel_linear_cross_entropy(distribute_tensor(x.detach(), mesh, [Shard(0)]), w_cut, y)
    with raises(ValueError, "linear_bias must be a plain tensor or a DTensor .* sharded like it"):
        bias = distribute_tensor(torch.zeros(V, device=world.device), mesh, [Replicate()])
        vocab_parallel_linear_cross_entropy(x, w_cut, y, linear_bias=bias)
    with raises(TypeError, "linear_weight is a DTensor.*flce_ref.distributed"):
        linear_cross_entropy(x, w_cut, y)


@case(sizes={2})
def a_rank_that_never_comes_is_a_timeout(world: World) -> None:
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    x, w, y = problem(N, D, V, dtype=torch.float32)
    began = time.monotonic()
    if world.rank == 0 and world.device == "cpu":
        with raises(RuntimeError, "(?i)time"):
            vocab_parallel_linear_cross_entropy(x, w[:9], y, group=impatient)
        assert time.monotonic() - began < 10
    dist.barrier()
