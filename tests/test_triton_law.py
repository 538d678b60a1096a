"""Laws of rows that are split over programs: ties across splits, rows without a law, and laws that ignore splits."""

import math

import pytest
import torch

from specdec.core.functional.sampling import SamplingBatch, SamplingParams, process_logits
from specdec.core.functional.torch_ops import pick_ops

pytest.importorskip("triton")
from specdec.backends.triton.backend import TritonBackend
from specdec.backends.triton.sampling import law as law_module

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = pick_ops(TritonBackend.capabilities)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAWS = [
    SamplingParams(*values)
    for values in (
        (0.0, 0, 1.0, 0.0),
        (0.0, 3, 0.5, 0.1),
        (1.0, 0, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.0, 60, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.3, 90, 0.6, 0.0),
        (1.3, 90, 0.8, 0.2),
        (1.0, 0, 0.0, 0.0),
        (0.9, 0, 1.0, 0.3),
    )
]


@pytest.fixture
def small_blocks(monkeypatch):
    """Three splits per row of 150 tokens."""
    monkeypatch.setattr(law_module, "_BLOCK", 64)


def same_laws(logits, params):
    batch = SamplingBatch.stack(params, DEVICE)
    got, want = OPS.law(logits.to(DEVICE), batch), process_logits(logits.to(DEVICE), batch)
    assert torch.equal(got > 0, want > 0), ((got > 0) != (want > 0)).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "dtype"), zip(["apart", "tied", "forbidden", "flat"], [*DTYPES, DTYPES[1]], strict=True)
)
def test_split_rows_equal_the_twin(small_blocks, kind, dtype):
    """Distinct logits; few values, so that every edge is a tie across splits; forbidden tokens; two values."""
    vocab = 150
    logits = 3 * torch.randn(len(LAWS), 1, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "tied":
        logits = logits.round()
    elif kind == "forbidden":
        logits[..., ::2], logits[..., 64:128] = -math.inf, -math.inf
    elif kind == "flat":
        logits[:] = torch.where(torch.arange(vocab) % 7 > 0, 1.5, -0.0)
    same_laws(logits.to(dtype), LAWS)


def test_top_p_drops_tied_tokens_in_the_order_of_the_vocabulary(small_blocks):
    """150 tokens with one logit: top-p keeps the last ones, wherever the splits are."""
    params = [SamplingParams(1.0, 0, top_p) for top_p in (0.503, 0.903, 0.0)]
    got = OPS.law(torch.ones(3, 1, 150, dtype=torch.bfloat16, device=DEVICE), SamplingBatch.stack(params, DEVICE))
    first_kept = torch.tensor([150 - 76, 150 - 136, 149], device=DEVICE)[:, None]
    assert torch.equal(got[:, 0] > 0, torch.arange(150, device=DEVICE) >= first_kept)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]))


@pytest.mark.parametrize("params", [LAWS[0], LAWS[2], LAWS[7]])
def test_rows_without_a_law_in_one_split_are_nan_and_alone(small_blocks, params):
    logits = torch.randn(1, 4, 150, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    batch = SamplingBatch.stack([params], DEVICE)
    clean = OPS.law(logits, batch)
    logits[0, 0, 140], logits[0, 1, 70], logits[0, 2] = math.nan, math.inf, -math.inf
    got = OPS.law(logits, batch)
    assert got[0, :3].isnan().all() and torch.equal(got[0, 3:], clean[0, 3:])


def test_greedy_rows_take_the_first_of_equal_tokens_of_all_splits(small_blocks):
    logits = torch.zeros(1, 3, 150, device=DEVICE)
    logits[0, 0, [70, 130, 149]], logits[0, 1, [149]], logits[0, 2, :5] = 1.0, 1.0, -0.0
    got = OPS.law(logits, SamplingBatch.stack([SamplingParams(0.0)], DEVICE))
    assert got[0].argmax(-1).tolist() == [70, 149, 0] and got.sum().item() == 3


@pytest.mark.parametrize("dtype", DTYPES[:2] if torch.cuda.is_available() else DTYPES[1:2])
def test_a_law_does_not_depend_on_the_splits(monkeypatch, dtype):
    """So a request's law is the same in any batch."""
    params = [LAWS[i] for i in (6, 7)]
    logits = 2 * torch.randn(2, 2, 300, generator=torch.Generator().manual_seed(3))
    logits[:, 1] = logits[:, 1].round()
    logits, batch = logits.to(DEVICE, dtype), SamplingBatch.stack(params, DEVICE)
    monkeypatch.setattr(law_module, "_BLOCK", 128)
    laws = []
    for num_programs in (1, 8, 100):  # 1, 2 and 3 splits
        monkeypatch.setattr(law_module, "_PROGRAMS", num_programs)
        laws.append(OPS.law(logits, batch))
    assert torch.equal(laws[0], laws[1]) and torch.equal(laws[0], laws[2])


def test_the_number_of_programs_follows_the_rows():
    splits = [law_module._splits(rows, 128256, 2048) for rows in (1, 4, 32, 128, 1000)]
    assert splits == [(63, 2048), (63, 2048), (16, 8192), (4, 32768), (1, 129024)]
