"""Collectives as ops, on one rank; several ranks are in test_sharded and test_tensor_parallel."""

import pytest
import torch
import torch.distributed as dist

from specdec.backends import comm


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = comm.Communicator(dist.group.WORLD, torch.device("cpu"))
    yield made
    made.close()
    dist.destroy_process_group()


OPS = {
    "all_reduce": lambda x, name: comm.all_reduce(x, name),
    "all_gather": lambda x, name: comm.all_gather(x, 1, name),
    "broadcast": lambda x, name: comm.broadcast(x, name),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_results_are_new_tensors_and_inputs_are_kept(one_rank, op):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(12, dtype=dtype).view(3, 4).t()
        kept = x.clone()
        out = op(x, one_rank.name)
        assert torch.equal(out, x) and torch.equal(x, kept) and out.data_ptr() != x.data_ptr() and out.is_contiguous()


def test_they_trace_as_one_node_each(one_rank):
    seen = []

    def backend(graph, _inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    def run(x):
        return [op(x * 2, one_rank.name) for op in OPS.values()]

    x = torch.randn(3, 4)
    for out in torch.compile(run, backend=backend, fullgraph=True)(x):
        torch.testing.assert_close(out, x * 2)
    assert [name for name in seen if "specdec" in name] == [f"specdec.{name}" for name in OPS]


def test_no_gradient_passes(one_rank):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"tensor-parallel layers pass no gradients .*; detach\(\) first"):
        comm.all_reduce(x, one_rank.name).sum().backward()


def test_a_group_without_an_engine_is_named(one_rank):
    one_rank.close()
    with pytest.raises(RuntimeError, match=f"no communicator for the process group '{one_rank.name}'"):
        comm.all_reduce(torch.ones(2), one_rank.name)


def test_engines_of_one_group_share_its_name(one_rank):
    other = comm.Communicator(dist.group.WORLD, torch.device("cpu"))
    for closed in (one_rank, other):
        assert torch.equal(comm.all_reduce(torch.ones(2), one_rank.name), torch.ones(2))
        closed.close()
    assert one_rank.name not in comm._COMMUNICATORS


def test_ranks_that_were_given_up_sum_nothing(one_rank):
    one_rank.give_up("rank 1 is gone")
    one_rank.give_up("rank 1 is gone")
    for op in OPS.values():
        with pytest.raises(dist.DistError, match="one of them failed or is gone"):
            op(torch.ones(2), one_rank.name)
