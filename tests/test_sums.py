"""The all-reduce kernel on two processes that share memory, or two GPUs; the twin is a sum in fp32."""

from pathlib import Path

import pytest
import torch

from specdec.backends.triton.sums import BLOCK_BYTES, PushedSum
from tests.interpreter import make_quick
from tests.ranks import SIZE, on_ranks

MOST = 16 * BLOCK_BYTES
SIZES = (1, 7, 576, 2048, 2049, 4096, 1, MOST // 4, 5000, 2048)


def parts(number, size, dtype):
    """Return what each rank adds to sum `number`."""
    random = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=random).to(dtype) for _ in range(SIZE)]


def twin(given, dtype):
    return sum((part.float() for part in given), torch.zeros(given[0].shape)).to(dtype)


def play(rank, folder, device, repeats):
    """Run sums of all sizes, in an order that changes the buffer of a block; return the differences from the twin."""
    if device == "cpu":
        make_quick()
    num_bytes = PushedSum.num_bytes(SIZE, MOST)
    memories = [
        torch.from_file(str(Path(folder, f"memory{r}")), shared=True, size=num_bytes, dtype=torch.uint8)
        for r in range(SIZE)
    ]
    summed = PushedSum(memories[rank], [m.data_ptr() for m in memories], rank, MOST)
    torch.distributed.barrier()
    wrong, number = [], 0
    for _ in range(repeats):
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                given = parts(number, size, dtype)
                found, expected = summed(given[rank]).float(), twin(given, dtype).float()
                one_bit = 0.0 if dtype is torch.float32 else 2**-7  # the interpreter truncates where GPUs round
                if not torch.allclose(found, expected, rtol=one_bit, atol=0.0):
                    wrong.append((number, size, dtype))
                number += 1
    return wrong, int(summed.flags.max())


def test_sums_equal_their_twin_whatever_came_before(tmp_path):
    (ours, theirs), _ = on_ranks(play, tmp_path, "cpu", 2)
    assert ours == theirs == ([], 4 * len(SIZES))


def test_it_says_what_it_takes():
    memory = torch.zeros(PushedSum.num_bytes(SIZE, MOST), dtype=torch.uint8)
    summed = PushedSum(memory, [memory.data_ptr()] * SIZE, 0, MOST)
    assert summed.flags.numel() == SIZE * (MOST // BLOCK_BYTES)
    for dtype, taken in ((torch.bfloat16, True), (torch.float32, True), (torch.float16, False), (torch.int64, False)):
        assert summed.takes(torch.zeros(64, dtype=dtype)) == taken
    assert not summed.takes(torch.zeros(0)) and not summed.takes(torch.zeros(MOST // 4 + 1))


@pytest.mark.gpu
def test_the_kernel_compiles_for_the_device():
    memory = torch.zeros(PushedSum.num_bytes(1, MOST), dtype=torch.uint8, device="cuda")
    summed = PushedSum(memory, [memory.data_ptr()], 0, MOST)
    x = torch.randn(3000, device="cuda")
    assert torch.equal(summed(x), x)
