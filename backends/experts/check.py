"""Compares `grouped_linear` with its torch twin, on the model's own expert weights."""

from functools import partial

import torch

from specdec.backends import experts
from specdec.backends.differences import SEED, Answer, Check

FEW = 4  # experts that get all rows, since the twin runs them one by one, on copies in fp32
NUM_TOKENS = 64
PER_TOKEN = 8  # experts of the first check, of one token
AVERAGES = (1, 16, 48, 96)  # rows per expert of the other checks: the kernel chooses its tile by them
COLUMNS = 256  # of a weight: the most per program
TWIN = experts.grouped_linear.twin


def expert_checks(weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool) -> list[Check]:
    """Return the checks of `grouped_linear` with `weight` and `bias`; none for dtypes without kernels, which run the
    twin itself. Arguments: see `experts.grouped_linear`."""
    if weight.dtype not in experts.KERNEL_DTYPES:
        return []
    narrow = weight[..., :COLUMNS] if is_transposed else weight[:, :COLUMNS]
    given = narrow, None if bias is None else bias[:, :COLUMNS], is_transposed
    return [Check(f"experts {list(weight.shape)}", *(partial(_answers, *given, is_twin) for is_twin in (False, True)))]


def _answers(weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool, is_twin: bool) -> list[Answer]:
    """Multiply random tokens, one and then many, by FEW experts, the first and last among them, and by an id past the
    last. The twin gets only those experts, in fp32.
    """
    num_experts, num_features, dtype = weight.shape[0], weight.shape[1 if is_transposed else 2], weight.dtype
    random = torch.Generator(weight.device).manual_seed(SEED)
    chosen = torch.linspace(0, num_experts - 1, min(FEW, num_experts), device=weight.device).long()
    names = torch.cat([chosen, chosen.new_tensor([num_experts])])  # the last one is no expert
    if is_twin:
        weight, bias = weight[chosen].float(), None if bias is None else bias[chosen].float()
    product = TWIN if is_twin else experts.grouped_linear
    sizes = [(1, min(PER_TOKEN, num_experts)), *((NUM_TOKENS, -(-n * num_experts // NUM_TOKENS)) for n in AVERAGES)]
    answers = []
    for num_tokens, k in dict.fromkeys(sizes):
        x = torch.randn(num_tokens, num_features, generator=random, device=weight.device).to(dtype).to(weight.dtype)
        places = torch.randint(names.numel(), (num_tokens, k), generator=random, device=weight.device)
        ids = places if is_twin else names[places]
        answers.append(Answer(f"grouped_linear of {ids.numel()} rows", product(x, ids, weight, bias, is_transposed)))
    return answers
