"""Sampling laws equal HF's, random numbers are random and repeatable, and impossible tokens are never drawn."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core.functional.sampling import SamplingBatch, SamplingParams, process_logits, sample, uniform

BELOW_ONE = 1.0 - 2.0**-53


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def hf_law(logits: Tensor, params: SamplingParams) -> Tensor:
    """logits: [n, V]. Apply the warpers of `generate`, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k != 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.empty(0), logits.float()).softmax(-1)


# --- SamplingParams, SamplingBatch


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("temperature", 1e-9)],
        *[("top_k", -1), ("top_k", 1.5), ("top_p", 1.01), ("top_p", -0.1), ("top_p", None), ("min_p", math.nan)],
        *[("min_p", 2), ("seed", -1), ("seed", 2**63), ("seed", "a")],
    ],
)
def test_params_name_the_offender(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}={value!r}: expected .*; pass "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_params_accept_the_edges() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=1e-5, top_k=1, top_p=0.0, min_p=1.0, seed=2**63 - 1).is_greedy


def test_batch_stacks_and_selects() -> None:
    batch = SamplingBatch.stack([SamplingParams(), SamplingParams(0.5, 3, 0.9, 0.1, seed=2**62 + 1)], "cpu")
    picked = batch.select(ints(1, 0, 1))
    assert picked["temperature"].tolist() == [0.5, 0.0, 0.5]
    assert picked["top_k"].tolist() == [3, 0, 3]
    assert picked["top_p"].tolist() == [0.9, 1.0, 0.9]
    assert picked["min_p"].tolist() == pytest.approx([0.1, 0.0, 0.1])
    assert picked["seed"].tolist() == [2**62 + 1, 0, 2**62 + 1]


# --- process_logits


def test_law_is_that_of_hf() -> None:
    grid = product((0.3, 1.0, 1.7), (0, 1, 5, 1000), (1.0, 0.9, 0.5, 0.0), (0.0, 0.05, 1.0))
    params = [SamplingParams(*values) for values in grid]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(params), 3, 50, generator=generator) * 4
    logits[:, 1] = logits[:, 1].round()  # ties, at the top-k edge too
    logits[:, 2, ::2] = -math.inf  # forbidden tokens
    probs = process_logits(logits, SamplingBatch.stack(params, "cpu"))
    assert probs.dtype == torch.float32
    expected = torch.stack([hf_law(row, row_params) for row, row_params in zip(logits, params, strict=True)])
    # which of several equal tokens top-p drops is up to the sort, in HF too
    expected[:, 1], probs[:, 1] = expected[:, 1].sort().values, probs[:, 1].sort().values
    torch.testing.assert_close(probs, expected)


@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_equal_tokens_at_the_edge_of_top_p(top_p: float) -> None:
    logits = torch.zeros(1, 1, 10)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    probs = process_logits(logits, SamplingBatch.stack([params], "cpu"))
    assert (probs > 0).sum() == (hf_law(logits[0], params) > 0).sum()


def test_temperature_zero_is_the_argmax_in_a_mixed_batch() -> None:
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(1)).bfloat16()
    probs = process_logits(logits, SamplingBatch.stack([SamplingParams(0.0, top_k=3), SamplingParams(1.0)], "cpu"))
    assert torch.equal(probs[0], torch.nn.functional.one_hot(logits[0].argmax(-1), 30).float())
    torch.testing.assert_close(probs[1], logits[1].float().softmax(-1))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 5, 0.9, 0.05)])
def test_unusable_logits_stay_visible_and_alone(params: SamplingParams) -> None:
    sampling = SamplingBatch.stack([params] * 2, "cpu")
    logits = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(2))
    clean = process_logits(logits, sampling)
    logits[0, 0, 3], logits[0, 1, 4], logits[0, 2] = math.nan, math.inf, -math.inf
    probs = process_logits(logits, sampling)
    assert probs[0, :3].isnan().all()
    assert torch.equal(probs[0, 3:], clean[0, 3:])
    assert torch.equal(probs[1], clean[1])


# --- uniform

GOLDEN = ["0x1.1c13ade1c7e5cp-3", "0x1.5de515f9559c4p-2", "0x1.e610348153160p-3", "0x1.3c11eed2f82e2p-1"]


def splitmix(seed: int, counter: int, stream: int) -> float:
    """Compute the same generator with Python integers."""
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15
    state = seed + gamma
    for step in (counter, stream, None):
        state &= mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
        state += 0 if step is None else (step + 1) * gamma
    return (state >> 11) / 2**53


def test_uniform_is_splitmix_and_does_not_change() -> None:
    seeds, counters, streams = (0, 1, 2**63 - 1, 12345), (0, 7, 2**40, 3), (0, 1, 63, 64)
    u = uniform(ints(*seeds), ints(*counters), ints(*streams))
    expected = [[splitmix(s, c, n) for n in streams] for s, c in zip(seeds, counters, strict=True)]
    assert u.tolist() == expected
    # golden values: changing them changes every user's seeded output
    assert [x.hex() for x in u.diagonal().tolist()] == GOLDEN


def test_uniform_does_not_depend_on_the_batch() -> None:
    seeds, counters, streams = torch.arange(40), torch.arange(40) * 3, torch.arange(8)
    u = uniform(seeds, counters, streams)
    assert torch.equal(uniform(seeds.flip(0), counters.flip(0), streams), u.flip(0))
    for row in (0, 17, 39):
        alone = uniform(seeds[row : row + 1], counters[row : row + 1], streams[2:5])
        assert torch.equal(alone[0], u[row, 2:5])


RUN, ZEROS = torch.arange(400), torch.zeros(400, dtype=torch.int64)
# Grids [a, b] of draws, with one of the three numbers varying along each axis.
NEIGHBOURS: dict[str, Callable[[], Tensor]] = {
    "seed, stream": lambda: uniform(RUN, ZEROS + 9, RUN),
    "counter, stream": lambda: uniform(ZEROS + 42, RUN, RUN),
    "counter, seed": lambda: uniform(RUN.repeat_interleave(400), RUN.repeat(400), ints(5)).view(400, 400),
    "high bits": lambda: uniform(RUN << 50, RUN << 40, RUN),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_uniform_is_uniform_and_neighbours_are_independent(name: str) -> None:
    u = NEIGHBOURS[name]()
    assert u.dtype == torch.float64
    assert u.min() >= 0 and u.max() < 1
    assert u.unique().numel() == u.numel()
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    for first, second in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        pairs = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 4 / math.sqrt(pairs.shape[1])
        # correlation is blind to all but lines: the pairs must also fill the unit square evenly
        cells = (pairs * 16).long()
        counts = torch.bincount(cells[0] * 16 + cells[1], minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


# --- sample


def test_sample_inverts_the_cdf() -> None:
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, BELOW_ONE, 1.0], dtype=torch.float64)
    assert sample(probs.expand(7, 4), u).tolist() == [0, 0, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("scale", [1.0, 0.999, 1.001, 1e-30, 3e5])
def test_sample_never_draws_an_impossible_token(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(500, 40, generator=generator) * (torch.rand(500, 40, generator=generator) < 0.2)
    probs[:, 17] += 1e-12
    probs[:, (0, -1)] = 0
    probs *= scale / probs.sum(-1, keepdim=True)
    for u in (0.0, 1e-300, 0.5, BELOW_ONE, 1.0):
        tokens = sample(probs, torch.full((500,), u, dtype=torch.float64))
        assert (probs.gather(-1, tokens[:, None]) > 0).all()


def test_sample_survives_a_scan_that_creeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the running sum may grow at entries of probability 0."""
    exact = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: exact(x, dim) + 1e-16 * torch.arange(1, x.shape[-1] + 1))
    probs = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.25, 0.0])
    for u in (0.0, 0.5 / 0.75, BELOW_ONE, 1.0):
        assert sample(probs, torch.tensor(u, dtype=torch.float64)) in (2, 5)


def test_sample_law_does_not_depend_on_the_total() -> None:
    probs = torch.rand(6, 9, generator=torch.Generator().manual_seed(4)).double()
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    wide = probs[:, None].expand(6, 1000, 9)
    tokens = sample(wide, u.expand(6, 1000))
    assert torch.equal(sample(wide * 1.0009765625, u.expand(6, 1000)), tokens)
    law = torch.nn.functional.one_hot(tokens, 9).double().mean(1)
    torch.testing.assert_close(law, probs / probs.sum(-1, keepdim=True), atol=2e-3, rtol=0)


def test_sample_stays_in_range_without_a_law() -> None:
    probs = torch.tensor([[0.0, 0.0, 0.0], [math.nan, math.nan, math.nan], [0.0, 1.0, math.nan]])
    assert sample(probs, torch.full((3,), 0.5, dtype=torch.float64)).tolist() == [0, 0, 1]


def test_no_value_reaches_the_host() -> None:
    """Tensors on `meta` have no values: `.item()`, `if tensor` and data-dependent shapes would raise."""
    sampling = SamplingBatch.stack([SamplingParams(0.5, 3, 0.9, 0.1)] * 4, "meta")
    probs = process_logits(torch.empty(4, 3, 10, device="meta"), sampling.select(torch.arange(4, device="meta")))
    u = uniform(sampling["seed"], torch.arange(4, device="meta"), torch.arange(3, device="meta"))
    assert sample(probs, u).shape == (4, 3)
