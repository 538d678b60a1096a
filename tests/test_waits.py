"""Nothing waits for the device, as a CPU can show it: operations that would are errors, and an engine has none."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench import waits
from bench.admission import tiny
from bench.waiting import HostWait, is_on_host, waits_raise

X, Y = torch.rand(4), torch.rand(4)
MASK, IDS, DEVICE = X > 0.5, torch.tensor([0, 2]), X.device
# As PyTorch's own test of the sync debug mode has them (test_sync_warning in test/test_torch.py), and more.
WAITING = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(MASK.any()),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: np.asarray(X),
    "cpu": lambda: X.to("cpu"),
    "index by a mask": lambda: X[MASK],
    "index by a list": lambda: X[[0, 1]],
    "index by a number": lambda: X[IDS.sum()],
    "mask with a tensor": lambda: Y.clone().__setitem__(MASK, X[0]),
    "numbers by index": lambda: Y.clone().__setitem__(IDS, 1.0),
    "a number to an element": lambda: Y.clone().__setitem__(0, 1.0),
    "fill with a tensor": lambda: X.masked_fill(MASK, Y[0]),
    "nonzero": lambda: torch.where(MASK),
    "unique": lambda: IDS.unique(),
    "equal": lambda: torch.equal(X, Y),
    "isin": lambda: torch.isin(IDS, torch.arange(100, device=DEVICE)),
    "bincount": lambda: torch.bincount(IDS),
    "repeat": lambda: torch.repeat_interleave(IDS, IDS),
    "one_hot": lambda: F.one_hot(IDS),
    "inverse": lambda: torch.linalg.inv(torch.eye(2, device=DEVICE)),
    "a list": lambda: torch.tensor([1, 2], device=DEVICE),
    "a list beside it": lambda: X.new_tensor([1, 2]),
    "tensors in a list": lambda: torch.tensor([X[0], X[1]]),
    "made on the host": lambda: torch.arange(4).to(DEVICE),
    "host and device": lambda: X + torch.arange(4),
}
QUEUED = {
    "item of the host": lambda: torch.zeros(3).sum().item(),
    "mask with a number": lambda: Y.clone().__setitem__(MASK, 1.0),
    "a number to a slice": lambda: Y.clone().__setitem__(slice(0, 1), 1.0),
    "tensors by index": lambda: Y.clone().__setitem__(IDS, X[:2]),
    "fill with a number": lambda: X.masked_fill(MASK, 1.0),
    "where": lambda: torch.where(MASK, X, 0.0),
    "a number of the host": lambda: X + torch.tensor(1.0),
    "one_hot": lambda: F.one_hot(IDS, 3),
    "isin": lambda: torch.isin(IDS, IDS),
    "repeat": lambda: torch.repeat_interleave(IDS, IDS, output_size=2),
    "repeat by a number": lambda: X.repeat_interleave(2),
    "a queued copy": lambda: torch.arange(4).to(DEVICE, non_blocking=True) + X,
    "attention": lambda: F.scaled_dot_product_attention(*[X.view(1, 1, 4, 1)] * 3, is_causal=True),
}


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
def test_what_would_wait_is_an_error(call):
    with pytest.raises(HostWait, match=r" at tests/test_waits\.py:\d+$"), waits_raise():
        call()
    call()


@pytest.mark.parametrize("call", QUEUED.values(), ids=QUEUED)
def test_what_is_queued_is_none(call):
    with waits_raise():
        call()


def test_custom_ops_are_not_looked_into():
    """On a GPU, kernels run in the place of what reads values on a CPU."""
    from specdec.backends import grouped_linear

    with waits_raise():
        out = grouped_linear(torch.ones(2, 4, device=DEVICE), IDS.view(2, 1), torch.ones(3, 5, 4, device=DEVICE))
    assert out.shape == (2, 5) and not is_on_host(out)


@pytest.mark.parametrize("model_type", ["phimoe", "qwen3_next"])
def test_the_engine_waits_for_nothing(model_type):
    assert waits.outcome(tiny(model_type).to(waits.DEVICE)) == "never"


def test_a_router_that_reads_is_told_of():
    model = tiny("qwen3_moe").to(waits.DEVICE)

    def read(module, args, output):
        args[0].abs().max().item()

    model.model.layers[1].mlp.gate.register_forward_hook(read)
    said = waits.outcome(model)
    assert said.startswith("waits: ") and ("tests/test_waits.py" in said or waits.DEVICE.type == "cuda")
