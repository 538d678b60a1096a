"""`specdec::top_scores`: the best of a few scores a row, as routers of experts choose. Traces call it for `torch.topk`,
which sorts, with two launches and more."""

import torch

from specdec.backends.experts import has_triton

MOST_SCORES, MOST_CHOSEN = 1024, 32  # of a row
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def top_scores(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row of scores [..., E], the largest first, of equal ones those of lower index.

    Values [..., k] in the dtype of scores, indices [..., k] int64. Of equal scores `torch.topk` chooses any.
    """
    return torch.ops.specdec.top_scores.default(scores, k)


def top_scores_twin(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `top_scores`."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def takes(scores: torch.Tensor, k: int) -> bool:
    """Return whether the op is for such `scores`, whose number of rows may be unknown."""
    num = int(scores.shape[-1])
    return scores.dtype in DTYPES and num <= MOST_SCORES and 0 < k <= min(num, MOST_CHOSEN)


def _on_cuda(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not has_triton():
        return top_scores_twin(scores, k)
    from specdec.backends.triton.experts import choices

    rows = scores.reshape(-1, scores.shape[-1])
    values, indices = choices.top_scores(rows if rows.stride(-1) == 1 else rows.contiguous(), k)
    shape = *scores.shape[:-1], k
    return values.view(shape), indices.view(shape)


def _fake(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = *scores.shape[:-1], k
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
_LIBRARY.define("top_scores(Tensor scores, int k) -> (Tensor, Tensor)")
_LIBRARY.impl("top_scores", top_scores_twin, "CPU")
_LIBRARY.impl("top_scores", _on_cuda, "CUDA")
torch.library.register_fake("specdec::top_scores", _fake, lib=_LIBRARY)
