"""Low-rank adapters of rows: the op, its twin and kernels, and bits that depend on a row and its adapter alone."""

import pytest
import torch

from specdec.backends.linear.lora import lora, lora_twin
from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.op import adapter_scope, adapters_of_tokens
from specdec.backends.triton.linear import lora as kernels
from specdec.core.batch import ForwardMode
from tests.test_linear import DEVICE, assert_close, random

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(n, rank, K, sizes, dtype=torch.bfloat16):
    a = [random(n, rank, K, dtype=dtype, seed=i) / K**0.5 for i, _ in enumerate(sizes)]
    b = [random(n, size, rank, dtype=dtype, seed=9 + i) / 4 for i, size in enumerate(sizes)]
    return a, b, [torch.linspace(0.5, 2, n, device=DEVICE) + i for i, _ in enumerate(sizes)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_equal_their_twin_and_bits_are_a_rows_own(dtype, monkeypatch):
    shapes = (5, 16, 1040, (24, 8), 0), (70, 64, 40, (33,), 7), (3, 16, 64, (8, 8, 8), 8)
    for num_rows, rank, K, sizes, rest in shapes:
        x, y = random(num_rows, K, dtype=dtype), random(num_rows, sum(sizes) + rest, dtype=dtype, seed=3)
        given = weights(3, rank, K, sizes, dtype)
        adapters = torch.arange(num_rows, device=DEVICE) // 2 % 4
        ours = kernels.lora(x, y, *given, adapters)
        assert_close(ours, lora_twin(x, y, *given, adapters), 3)
        assert ours[adapters == 0].equal(y[adapters == 0])
        with monkeypatch.context() as tiles:
            tiles.setattr(kernels, "TOGETHER", ())  # all rows of a tile count, as of many rows
            assert kernels.lora(x, y, *given, adapters).equal(ours)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        assert kernels.lora(x[order], y[order], *given, adapters[order]).equal(ours[order])
        for i in range(3):
            one = slice(i, i + 1)
            assert kernels.lora(x[one], y[one], *given, adapters[one]).equal(ours[one])


def test_the_op_finds_the_adapter_of_each_row():
    x, y = (random(1, 4, size, dtype=torch.float32) for size in (32, 8))
    given = weights(2, 16, 32, (8,), torch.float32)
    with pytest.raises(RuntimeError, match="an attached model's adapted layer was called outside its engine"):
        lora(x, y, *given)
    with adapter_scope(torch.tensor([2, 0, 1, 2], device=DEVICE)):
        ours = lora(x, y, *given)
    (a,), (b,), (scale,) = given
    for row, adapter in enumerate((2, 0, 1, 2)):
        added = 0 if not adapter else scale[adapter - 1] * (b[adapter - 1] @ (a[adapter - 1] @ x[0, row]))
        torch.testing.assert_close(ours[0, row], y[0, row] + added)


@pytest.mark.parametrize("num_reqs", [1, 3])
def test_adapters_of_the_nodes_of_a_round_are_dense(num_reqs):
    """Kernels read them one after the other, also those of a single request."""
    rows = torch.arange(num_reqs, device=DEVICE)
    table = torch.zeros(num_reqs, 16, dtype=torch.int32, device=DEVICE)
    metadata = TORCH_METADATA.uniform(ForwardMode.TARGET_VERIFY, table, rows, rows * 0, q_len=4, max_prefix=8)
    found = adapters_of_tokens(rows + 1, metadata)
    assert found.is_contiguous() and found.tolist() == [1 + row for row in range(num_reqs) for _ in range(4)]
