"""Sampling of a batch: from the target's logits to the law (probabilities), and counter-based random numbers.

Pure tensor functions on CPU or CUDA, without host sync. This file is the specification that the Triton kernels are
compared with. It knows nothing about trees, rounds or requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.sampling_params import NUMBERS
from specdec.core.sampling_params import SamplingParams as SamplingParams

FORBIDDEN = -3e4  # a draft's logit that float16 holds, too; nodes that a tree has to spare may still hold such tokens

# splitmix64 (Steele, Lea, Flood 2014), its unsigned constants written as the int64 of the same bits.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """The numbers of a batch's SamplingParams: `sampling["top_p"]` is [bs], float64 or int64 as in NUMBERS.

    top_p stays float64: 1 - top_p rounds to float32 once, as in HF; else a tie at the edge may differ.
    """

    bits: Tensor  # [len(NUMBERS), bs], int64, see `SamplingParams.bits`
    has_filters: bool = True  # known on the host; False avoids the search over the vocabulary

    @classmethod
    def stack(cls, params: Sequence[SamplingParams], device: torch.device | str) -> "SamplingBatch":
        """Stack `params`. This copies from the host, so it belongs in the admission of requests, not in a round."""
        bits = torch.tensor([p.bits for p in params], dtype=torch.int64, device=device)
        return cls(bits.T.contiguous(), any(p.has_filters for p in params))

    def __getitem__(self, name: str) -> Tensor:
        numbers = self.bits[tuple(NUMBERS).index(name)]
        return numbers.view(torch.float64) if NUMBERS[name] == "d" else numbers

    def select(self, rows: Tensor | slice, has_filters: bool | None = None) -> "SamplingBatch":
        """Return requests `rows` ([n], int64), in that order; has_filters: if the caller knows it for these rows."""
        return SamplingBatch(self.bits[:, rows], self.has_filters if has_filters is None else has_filters)


def process_logits(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    """Return the law that each position is sampled from.

    logits: [bs, n, V], any float dtype, from the target (or the draft, whose proposals may use the same rules).
    Returns [bs, n, V], float32. Temperature 0 gives the one-hot of the argmax; otherwise temperature, top-k, top-p,
    min-p are applied in this order, each filter to the law that the one before left, as in HF's `generate`; at least
    one token is kept. -inf logits are forbidden tokens. A position that holds NaN or +inf, or only -inf, becomes all
    NaN, greedy or not, so that `specdec.core.functional.verify` can detect it.
    """
    logits = logits.float()
    temperature, top_k, top_p, min_p = (
        sampling[name][:, None, None] for name in ("temperature", "top_k", "top_p", "min_p")
    )
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature).float()
    if sampling.has_filters:
        scaled = _drop_below_top_k_top_p(scaled, top_k, top_p)
        scaled = _drop_below_min_p(scaled, min_p.float())

    tokens = torch.arange(logits.shape[-1], device=logits.device)
    one_hot = (tokens == logits.argmax(-1, keepdim=True)).float()
    probs = torch.where(is_greedy, one_hot, scaled.softmax(-1))
    # The maximum is finite exactly when the position is usable: it propagates NaN and +inf, and shows a row of -inf.
    return probs.masked_fill(~logits.amax(-1, keepdim=True).isfinite(), math.nan)


def constrain(logits: Tensor, masks: Tensor) -> Tensor:
    """Set forbidden tokens of logits [bs, D, V], any float dtype, to -inf, in place; returns them.

    masks [bs, D, W] int32: bit t % 32 of word t // 32 is set where token t is allowed.
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    is_allowed = masks[..., tokens // 32] >> (tokens % 32).int() & 1
    return logits.masked_fill_(is_allowed == 0, -math.inf)


class Guide(NamedTuple):
    """A grammar's advice to a draft: forced [bs, S] int64, tokens of the first draft steps, -1 past the last; masks
    [bs, W] int32: bits of what may follow them, as in `constrain`."""

    forced: Tensor
    masks: Tensor


def guided(logits: Tensor, guide: Guide, step: int, names: Tensor) -> Tensor:
    """Return the logits [bs, n, dv] of draft step `step`, with `FORBIDDEN` in place of those that the grammar forbids.

    names [dv] int64: the token id of each index. Steps past what is known stay as they are. A draft is drawn from the
    law of these, so acceptance stays exact.
    """
    token = guide.forced[:, step : step + 1]
    is_next = token < 0 if step == 0 else (token < 0) & (guide.forced[:, step - 1 : step] >= 0)
    bits = guide.masks[:, names // 32] >> (names % 32).int() & 1
    allowed = torch.where(token >= 0, names == token, (bits != 0) | ~is_next)
    return logits.masked_fill(~allowed.unsqueeze(1), FORBIDDEN)


def uniform(seeds: Tensor, counters: Tensor, streams: Tensor) -> Tensor:
    """Return random numbers that depend only on (seed, counter, stream): a request draws the same in any batch.

    seeds, counters: [bs], int64; the counter must differ between the rounds of a request. streams: [n], int64; one
    number for each use within a round (node 0, node 1, …, draft step 0, …).
    Returns [bs, n], float64, in [0, 1), multiples of 2**-53.
    """
    state = _mix(seeds + _GAMMA)
    # Each level is a splitmix64 generator that starts at the output of the level above.
    state = _mix(state + (counters + 1) * _GAMMA)
    state = _mix(state[:, None] + (streams + 1) * _GAMMA)
    return _shift_right(state, 11).double() * 2.0**-53


def sample(probs: Tensor, u: Tensor, names: Tensor | None = None) -> Tensor:
    """Sample by inverse CDF in float64.

    probs: [..., V], non-negative; u is scaled by their total, so they need not sum to one. u: [...], in [0, 1].
    names: [V], int64, the token id of each index (a draft's hot vocabulary); None: the index itself.
    Returns [...], int64: always a token of positive probability, and the first where there is none.
    """
    probs = probs.double()
    cdf = probs.cumsum(-1)
    tokens = torch.arange(probs.shape[-1], device=probs.device)
    # A parallel scan may add in a different order from one entry to the next, so that the CDF creeps up across entries
    # of probability 0 and its end differs from the sum: require a positive entry, and fall back to the last of them.
    is_possible = probs > 0
    is_reached = is_possible & (cdf > (u.double() * cdf[..., -1])[..., None])
    first_reached = torch.where(is_reached, tokens, probs.shape[-1]).amin(-1)
    last_possible = torch.where(is_possible, tokens, 0).amax(-1)
    token = torch.minimum(first_reached, last_possible)
    return token if names is None else names[token]


def _drop_below_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return scaled [bs, n, V], float32, with the dropped tokens at -inf; top_k, top_p: [bs, 1, 1]."""
    vocab_size = scaled.shape[-1]
    ascending, order = scaled.sort(dim=-1, stable=True)

    num_kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kth_best = ascending.gather(-1, (vocab_size - num_kept).expand(*scaled.shape[:-1], 1))
    is_below = ascending < kth_best  # tokens that tie with the k-th stay, as in HF
    cumulative = ascending.masked_fill(is_below, -math.inf).softmax(-1).cumsum(-1)
    is_dropped = is_below | (cumulative <= (1.0 - top_p).float())
    is_dropped[..., -1] = False

    return scaled.masked_fill(torch.zeros_like(is_dropped).scatter(-1, order, is_dropped), -math.inf)


def _drop_below_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Return scaled [bs, n, V], float32, with the dropped tokens at -inf; min_p: [bs, 1, 1]. Keeps the best token."""
    probs = scaled.softmax(-1)
    return scaled.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -math.inf)


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser, on int64: products and sums wrap as unsigned ones do."""
    x = (x ^ _shift_right(x, 30)) * _MIX_A
    x = (x ^ _shift_right(x, 27)) * _MIX_B
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Shift right logically: `>>` on int64 copies the sign bit, which the mask clears."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
