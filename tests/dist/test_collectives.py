"""Values and gradients of the collectives equal those of one process that holds all ranks' tensors.

The oracle: the loss is the sum over ranks of each rank's loss, so one process that computes all ranks' losses from the
same leaves and adds them must find the same gradients.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import phalanx as px
from phalanx import comm
from phalanx.errors import ConfigError, PeerLostError
from ranks import run_ranks

pytestmark = pytest.mark.dist

Forward = Callable[[list[Tensor], int], Tensor]


def _leaf(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def _loss(y: Tensor, rank: int) -> Tensor:
    """A different, non-linear loss per rank, so that a wrong sum or order of gradients cannot hide."""
    weight = torch.linspace(1.0, 2.0, y.numel(), dtype=y.dtype).view_as(y)
    return (weight * (y * (rank + 1)).sin()).sum()


def _check(shapes: list[tuple[int, ...]], ours: Callable[[Tensor, int], Tensor], naive: Forward) -> float:
    rank = px.init().rank
    x = _leaf(rank, shapes[rank])
    y = ours(x, rank)
    _loss(y, rank).backward()
    leaves = [_leaf(r, s) for r, s in enumerate(shapes)]
    expected = [naive(leaves, r) for r in range(len(shapes))]
    torch.stack([_loss(e, r) for r, e in enumerate(expected)]).sum().backward()
    torch.testing.assert_close(y, expected[rank], rtol=1e-12, atol=1e-13)
    error = (x.grad - leaves[rank].grad).norm() / leaves[rank].grad.norm().clamp_min(1e-30)
    assert error <= 1e-12, f"gradient differs by {error}"
    return float(error)


def _all_reduce_case(n: int, op: str) -> float:
    return _check(
        [(3, 5)] * n,
        lambda x, _: comm.all_reduce(x, op),
        lambda xs, _: torch.stack(xs).sum(0) / (n if op == "mean" else 1),
    )


def _all_gather_case(n: int, dim: int, uneven: bool) -> float:
    shapes = [(2 + r * uneven, 3) if dim == 0 else (3, 2 + r * uneven) for r in range(n)]
    return _check(shapes, lambda x, _: comm.all_gather(x, dim), lambda xs, _: torch.cat(xs, dim))


def _all_gather_list_case(n: int) -> float:
    shapes = [(1 + r, 2) for r in range(n)]
    return _check(
        shapes,
        lambda x, _: torch.cat([(i + 1) * part for i, part in enumerate(comm.all_gather_list(x))]),
        lambda xs, _: torch.cat([(i + 1) * part for i, part in enumerate(xs)]),
    )


def _reduce_scatter_case(n: int, dim: int, uneven: bool, op: str) -> float:
    sizes = [2 + r * uneven for r in range(n)]
    shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
    return _check(
        [shape] * n,
        lambda x, _: comm.reduce_scatter(x, dim, op=op, sizes=sizes if uneven else None),
        lambda xs, r: (torch.stack(xs).sum(0) / (n if op == "mean" else 1)).split(sizes, dim)[r],
    )


def _broadcast_case(n: int, src: int) -> float:
    return _check([(4,)] * n, lambda x, _: comm.broadcast(x, src) + 0 * x, lambda xs, r: xs[src] + 0 * xs[r])


def _all_to_all_case(n: int) -> float:
    return _check(
        [(2 * n, 3)] * n,
        lambda x, _: comm.all_to_all(x, 0, 1),
        lambda xs, r: torch.cat([x.split(2, 0)[r] for x in xs], 1),
    )


def _uneven_all_to_all_case(n: int) -> float:
    cuts = [[1 + (origin + target) % 3 for target in range(n)] for origin in range(n)]
    return _check(
        [(sum(c), 2) for c in cuts],
        lambda x, r: comm.all_to_all(x, sizes=cuts[r]),
        lambda xs, r: torch.cat([x.split(cuts[o], 0)[r] for o, x in enumerate(xs)]),
    )


def _known_all_to_all_case(n: int) -> float:
    rows, columns = [1 + r for r in range(n)], [3 - r % 2 for r in range(n)]
    return _check(
        [(sum(rows), c) for c in columns],
        lambda x, _: comm.all_to_all(x, 0, 1, sizes=rows, arriving=columns),
        lambda xs, r: torch.cat([x.split(rows, 0)[r] for x in xs], 1),
    )


def _every_case(n: int) -> int:
    done = [_all_reduce_case(n, op) for op in ("sum", "mean")]
    done += [_all_gather_case(n, dim, uneven) for dim in (0, 1) for uneven in (False, True)]
    done += [_all_gather_list_case(n)]
    done += [
        _reduce_scatter_case(n, dim, uneven, op) for dim in (0, 1) for uneven in (False, True) for op in ("sum", "mean")
    ]
    done += [_broadcast_case(n, src) for src in range(n)]
    done += [_all_to_all_case(n), _uneven_all_to_all_case(n), _known_all_to_all_case(n)]
    return len(done)


@pytest.mark.parametrize("n", [2, 3])
def test_values_and_gradients_equal_one_process(n: int):
    assert run_ranks(_every_case, n, n) == [18 + n] * n


def test_one_process_without_a_group_gets_its_own_tensor_back():
    x = torch.randn(4, 3, requires_grad=True)
    for result in (
        comm.all_reduce(x), comm.all_reduce(x, "mean"), comm.all_gather(x), comm.reduce_scatter(x), comm.broadcast(x),
        comm.all_to_all(x), *comm.all_gather_list(x),
    ):  # fmt: skip
        assert result is x


def _ring_sums(length: int) -> bool:
    rank, n = px.init().rank, px.current().world_size
    values = torch.arange(length, dtype=torch.int64) * (rank + 1)
    return bool((comm.all_reduce(values) == torch.arange(length) * (n * (n + 1) // 2)).all())


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_reduce_of_odd_lengths_is_exact(n: int):
    assert run_ranks(_many_ring_sums, n) == [True] * n


def _many_ring_sums() -> bool:
    return all(_ring_sums(length) for length in (1, 3, 7, 1021, 65537))


def _double_backward() -> float:
    rank = px.init().rank
    x = _leaf(rank, (3,))
    (grad,) = torch.autograd.grad(comm.all_reduce(x).pow(3).sum(), x, create_graph=True)
    grad.sum().backward()
    total = _leaf(0, (3,)) + _leaf(1, (3,))
    # d/dx of sum over ranks of (ranks * 3 * total^2) = ranks^2 * 6 * total
    return float((x.grad - 4 * 6 * total.detach()).abs().max())


def test_a_gradient_can_be_differentiated_again():
    assert max(run_ranks(_double_backward, 2)) < 1e-12


def _plain_values() -> tuple[list[int], float, list[int], list[bool]]:
    rank = px.init().rank
    gathered = comm.all_gather(torch.arange(rank, dtype=torch.int32))  # Rank 0 has nothing to give.
    flags = comm.all_gather(torch.tensor([rank == 1]))
    reduced = comm.all_reduce(torch.tensor([rank, -rank]), "max")
    half = comm.all_reduce(torch.ones(3, dtype=torch.bfloat16), "mean")
    return gathered.tolist(), half.sum().item(), reduced.tolist(), flags.tolist()


def test_integers_flags_half_precision_and_empty_parts_travel():
    assert run_ranks(_plain_values, 3) == [([0, 0, 1], 3.0, [2, 0], [False, True, False])] * 3


def _misuse() -> list[str]:
    rank = px.init().rank
    messages = []
    for call in (
        lambda: comm.all_gather(torch.zeros(2, 2 + rank)),
        lambda: comm.all_to_all(torch.zeros(2, 2 + rank)),
        lambda: comm.all_gather(torch.zeros(3), sizes=[1, 1]),
        lambda: comm.reduce_scatter(torch.zeros(3)),
        lambda: comm.reduce_scatter(torch.zeros(3), sizes=[1, 1]),
        lambda: comm.broadcast(torch.zeros(3), 2),
        lambda: comm.all_reduce(torch.zeros(3), "prod"),
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.int64), "mean"),
        lambda: comm.reduce_scatter(torch.zeros(2, dtype=torch.int64), op="mean"),
        lambda: comm.all_reduce(torch.zeros(3, requires_grad=True), "max"),
        lambda: comm.all_gather(torch.zeros(3), dim=1),
        lambda: comm.all_gather(torch.zeros([1] * 9)),
        lambda: comm.new_group([0, 5]),
        lambda: comm.all_to_all(torch.zeros(2, 2), 0, 1, arriving=[1, 1]),
        lambda: comm.send(torch.zeros(2), rank),
        lambda: comm.send(torch.zeros(2, dtype=torch.uint16), 1 - rank),
        lambda: comm.recv(2),
        lambda: comm.all_reduce(torch.zeros(2), axis="model"),
        lambda: comm.all_reduce(torch.zeros(2), axis="model", group=comm.new_group([0, 1])),
        lambda: px.distributed.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(2)),
        lambda: comm.reduce_scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(2)]),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_misuse_is_one_clear_error_on_every_rank():
    first, second = run_ranks(_misuse, 2)
    expected = [
        "all_gather joins tensors that may differ along dim 0 only, found rank 0 (2, 2), rank 1 (2, 3)",
        "joins tensors that may differ along dim 0 only",
        "Give one size per rank",
        "reduce_scatter cannot split 3 evenly for 2 ranks",
        "reduce_scatter needs 2 sizes",
        "broadcast from rank 2 needs a group of more than 2 ranks, found 2",
        "all_reduce knows op 'sum', 'mean', 'max' and 'min', found 'prod'",
        "all_reduce cannot take the mean of torch.int64",
        "reduce_scatter cannot take the mean of torch.int64",
        "carries no gradient",
        "needs a tensor with that dim, found shape (3,)",
        "up to 8 dims",
        "new_group needs different ranks between 0 and 1, found [0, 5]",
        "found arriving=[1, 1] along dim 1. Give one size per rank, this rank's own among them",
        "of 2 needs another rank of the group, found",
        "send carries float32, float64, float16, bfloat16, complex64, complex128, int64, int32, int16, int8, uint8, ",
        "of 2 needs another rank of the group, found 2",
        "all_reduce along axis 'model' needs a mesh with that axis, found no mesh",
        "all_reduce takes group= or axis=, found both",
        "all_gather takes this rank's tensor first and returns the result, found a list of 2. Write parts = px.comm.",
        "reduce_scatter takes a number as dim and returns the result, found list. Write mine = px.comm.reduce_scatter(",
    ]
    for message, other, part in zip(first, second, expected, strict=True):
        assert part in message
        assert part in other


def _there_and_back() -> tuple[float, float, list[str]]:
    """Two ranks compute one chain: rank 0 the first and the last link, rank 1 the one between."""
    rank = px.init().rank
    x, factor = _leaf(0, (3, 2)), _leaf(7, ())
    chain = ((x.sin() * factor).exp() ** 2).sum()
    expected = torch.autograd.grad(chain, (x, factor))
    if rank == 0:
        sent = comm.send(x.sin(), 1)
        loss = (comm.recv(1) ** 2).sum()
        (loss + sent).backward()
        plain = comm.send(torch.tensor([7, 8], dtype=torch.int32), 1)
        assert not plain.requires_grad
        return float(loss.detach() - chain.detach()), float((x.grad - expected[0]).abs().max()), []
    comm.send((comm.recv(0) * factor).exp(), 0).backward()
    told = comm.recv(0)
    return 0.0, float((factor.grad - expected[1]).abs()), [str(told.dtype), str(told.tolist()), str(told.requires_grad)]


def test_a_chain_over_two_ranks_sends_its_gradients_back():
    (value, gradient, _), (_, other, told) = run_ranks(_there_and_back, 2)
    assert max(abs(value), gradient, other) < 1e-12
    assert told == ["torch.int32", "[7, 8]", "False"]


def _subgroup() -> tuple[float, str]:
    rank = px.init().rank
    group = comm.new_group([2, 0])
    x = torch.tensor([float(rank + 1)])
    if rank in (0, 2):
        return comm.all_reduce(x, group=group).item(), ""
    with pytest.raises(ConfigError) as caught:
        comm.all_reduce(x, group=group)
    return x.item(), str(caught.value)


def test_a_subgroup_touches_its_members_only_and_refuses_others():
    (a, _), (b, message), (c, _) = run_ranks(_subgroup, 3)
    assert (a, b, c) == (4.0, 2.0, 4.0)
    assert "all_reduce was called on rank 1, which is not in the group" in message


def _groups_in_other_orders() -> str:
    rank = px.init().rank
    with pytest.raises(ConfigError) as caught:
        comm.new_group([0, 1] if rank == 0 else [1, 2])
    return str(caught.value)


def test_groups_asked_for_in_different_orders_are_one_error_on_every_rank():
    for message in run_ranks(_groups_in_other_orders, 3):
        assert "the ranks of new_group[0] must be the same on all ranks, found 0 on rank 0; 1 on ranks 1" in message


def _groups_in_a_loop() -> tuple[int, list[str]]:
    px.init()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = {id(comm.new_group([0, 1])) for _ in range(5)}
    return len(groups), [f"{w.filename}: {w.message}" for w in caught]


def test_one_group_asked_for_in_a_loop_is_made_once_and_warned_about():
    for made, told in run_ranks(_groups_in_a_loop, 2):
        assert made == 1
        assert len(told) == 1
        assert f"{__file__}: new_group([0, 1]) was asked for 3 times" in told[0]


def _reduce_often() -> None:
    for _ in range(100):
        comm.all_reduce(torch.ones(1))


def _lose_rank_1() -> str:
    rank = px.init().rank
    comm.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        _reduce_often()
    return str(caught.value)


def test_a_collective_with_a_dead_rank_names_itself_and_the_rank():
    survivor, _ = run_ranks(_lose_rank_1, 2, expect_failure=True)
    assert "all_reduce, call 2 of the group, on rank 0 (" in survivor.value
    assert "lost rank 1 (" in survivor.value
    assert not dist.is_initialized()
