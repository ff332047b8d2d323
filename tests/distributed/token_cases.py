"""The tokens shared out over ranks: one mean, and gradients that come out right however they are put together."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce_ref.distributed import count_collectives, global_mean, token_parallel_linear_cross_entropy
from tests.distributed.harness import World, case, close, everyone_has, mine, raises, split
from tests.oracle import oracle, problem

N, D, V = 13, 6, 17


def shared_out(world: World, ignored: tuple[int, ...] = (2,)) -> tuple[Tensor, ...]:
    """(x, w, y) of all tokens, and this rank's x and y: very different numbers of them, none for one of three ranks."""
    x, w, y = problem(N, D, V, ignored=ignored, device=world.device)
    return x, w, y, mine(x, world), mine(y, world)


def put_together(gradient: Tensor, gradients: str, world: World) -> Tensor:
    """What DDP (averaged) or a plain all-reduce (summed) makes of a parameter's gradient."""
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / world.size if gradients == "averaged" else gradient


@case()
def one_mean_over_unequal_ranks(world: World) -> None:
    weight = torch.linspace(0.1, 2, V, dtype=torch.float64, device=world.device)
    for gradients, options, weighted in itertools.product(
        ("averaged", "summed"),
        ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "ignore_index": 3}, {"schedule": "naive"}),
        (False, True),
    ):
        x, w, y, own_x, own_y = shared_out(world)
        y[2] = options.get("ignore_index", -100)
        own_y = mine(y, world)
        more: dict[str, Any] = {"weight": weight} if weighted else {}
        on_paper = {k: v for k, v in options.items() if k != "schedule"}
        true_loss, _ = oracle(x, w, y, **on_paper, **more)
        true_dx, true_dw = torch.autograd.grad(true_loss, (x, w))
        loss = token_parallel_linear_cross_entropy(own_x, w, own_y, gradients=gradients, **options, **more)
        close(loss, true_loss)
        everyone_has(loss.item())
        dx, dw = torch.autograd.grad(loss, (own_x, w))
        close(put_together(dw, gradients, world), true_dw, "dw")
        scale = world.size if gradients == "averaged" else 1
        close(dx, scale * mine(true_dx, world), "dx")


@case()
def ranks_without_a_valid_token(world: World) -> None:
    counts = split(N, world)
    for silent in range(world.size):
        first = sum(counts[:silent])
        ignored = tuple(range(first, first + counts[silent]))
        x, w, y, own_x, own_y = shared_out(world, ignored)
        loss, lse = token_parallel_linear_cross_entropy(own_x, w, own_y, gradients="summed", return_lse=True)
        true_loss, true_lse = oracle(x, w, y)
        close(lse, mine(true_lse, world))
        close(loss, true_loss)
        (dw,) = torch.autograd.grad(loss, w)
        if world.size > 1:
            close(put_together(dw, "summed", world), torch.autograd.grad(true_loss, w)[0])


@case()
def no_valid_token_anywhere(world: World) -> None:
    _, w, _, own_x, own_y = shared_out(world, ignored=tuple(range(N)))
    for weight in (None, torch.ones(V, dtype=torch.float64, device=world.device)):
        loss = token_parallel_linear_cross_entropy(own_x, w, own_y, gradients="averaged", weight=weight)
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, (own_x, w)):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@case()
def what_is_sent_for_a_mean(world: World) -> None:
    _, w, _, own_x, own_y = shared_out(world)
    weight = torch.ones(V, dtype=torch.float64, device=world.device)
    for options, expected in (({}, [(2,)]), ({"weight": weight}, [(2,), (2,)])):
        with count_collectives() as sent:
            loss = token_parallel_linear_cross_entropy(
                own_x, w, own_y, gradients="summed", trust_ranks=True, skip_ignored=True, **options
            )
            loss.backward()
        assert [c.shape for c in sent] == expected
        assert {c.name for c in sent} == {"allreduce_"}


@case()
def a_mean_of_sums_from_elsewhere(world: World) -> None:
    total = torch.tensor(3.0 + world.rank, device=world.device, requires_grad=True)
    mean = global_mean(total, 1 + world.rank, gradients="averaged")
    counted = sum(1 + r for r in range(world.size))
    close(mean, torch.tensor(sum(3.0 + r for r in range(world.size)) / counted, device=world.device))
    (gradient,) = torch.autograd.grad(2 * mean, total)
    close(gradient, torch.tensor(2.0 * world.size / counted, device=world.device))
    with raises(ValueError, "gradients must be one of 'averaged', 'summed', got 'mean'"):
        global_mean(total, 1, gradients="mean")
    with raises(ValueError, r"total must be 0-d.*\(2,\)"):
        global_mean(total.expand(2), 1, gradients="summed")


class Model(nn.Module):
    """A body and a head; the loss belongs into forward, where DDP and FSDP expect the parameters to be used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, D, dtype=torch.float64)
        self.head = nn.Linear(D, V, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor, gradients: str) -> Tensor:
        loss = token_parallel_linear_cross_entropy(self.body(x), self.head.weight, y, gradients=gradients)
        assert isinstance(loss, Tensor)
        return loss


def model_and_truth(world: World) -> tuple[Model, Tensor, dict[str, Tensor], Tensor, Tensor]:
    x, _, y, own_x, own_y = shared_out(world)
    torch.manual_seed(1)
    model = Model().to(world.device)
    loss, _ = oracle(model.body(x), model.head.weight, y)
    loss.backward()
    truth = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return model, loss.detach(), truth, own_x.detach(), own_y


@case()
def under_ddp(world: World) -> None:
    model, true_loss, truth, x, y = model_and_truth(world)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        wrapped.zero_grad()
        loss = wrapped(x, y, "averaged")
        loss.backward()
    close(loss.detach(), true_loss)
    for name, parameter in model.named_parameters():
        close(parameter.grad, truth[name], name)


def reduce_scatter_averages(world: World) -> bool:
    """Older PyTorch's gloo sums where FSDP asks for an average, silently (pytorch/pytorch issue 162338)."""
    got = torch.zeros(1, device=world.device)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its old name
    reduce_scatter(got, torch.ones(world.size, device=world.device), op=dist.ReduceOp.AVG)
    return got.item() == 1


@case(sizes={2, 3})
def under_fsdp(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not reduce_scatter_averages(world):
        return
    mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
    for gradients in ("averaged", "summed"):
        model, true_loss, truth, x, y = model_and_truth(world)
        fully_shard(model, mesh=mesh)
        if gradients == "summed":
            model.set_gradient_divide_factor(1.0)
        loss = model(x, y, gradients)
        loss.backward()
        close(loss.detach(), true_loss)
        for name, parameter in model.named_parameters():
            close(parameter.grad.full_tensor(), truth[name], name)
