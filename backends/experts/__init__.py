"""`specdec::grouped_linear`: products of tokens with their routed experts, one op for any number of tokens.

Expert weights are arguments, so traces and checks of addresses see them. Our kernels run it on CUDA without waiting for
the host, so it can be captured, in prefills too.
"""

import torch

from specdec.backends.gates import gate_twin
from specdec.backends.library import has_triton as has_triton
from specdec.backends.library import op

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@op(
    "grouped_linear(Tensor x, Tensor expert_ids, Tensor weight, Tensor? bias=None, bool is_transposed=False, "
    "str activation='') -> Tensor",
    lambda x, ids, weight, bias=None, is_transposed=False, activation="": x.new_empty(
        ids.numel(), weight.shape[2 if is_transposed else 1] // (2 if activation else 1)
    ),
    "experts.products",
    lambda x, ids, weight, *_: weight.dtype in KERNEL_DTYPES,
)
def grouped_linear(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
    activation: str = "",
) -> torch.Tensor:
    """Return the products of tokens with their experts, [T*k, N]: row t*k+j uses expert expert_ids[t, j].

    x: [T, K], whose row t is used by all k experts of the token, or [T*k, K]. expert_ids: [T, k], int64 or int32, not
    negative; ids >= E, which stand for experts of other ranks, give rows of zeros. weight: [E, N, K], or [E, K, N] if
    is_transposed, of x's dtype. bias: [E, N] or None. A product is rounded to x's dtype before its bias is added. K is
    summed in order and never split, so a row's bits depend neither on the other rows nor on their number.

    activation: of `linear.gated_linear`, or "swigluoai", the gate of GPT-OSS, whose gate and up columns alternate; the
    result is then activation(gate) * up, [T*k, N / 2].

    The torch twin loops over experts as transformers' eager experts do, which reads ids on the host. It runs on the
    CPU; on CUDA only without Triton and for dtypes other than bf16, fp16 and fp32.
    """
    ids = expert_ids.flatten()
    copies = ids.shape[0] // max(x.shape[0], 1)
    matrices = weight if is_transposed else weight.transpose(1, 2)
    out = x.new_zeros(ids.shape[0], matrices.shape[2])
    for expert in ids[ids < weight.shape[0]].unique().tolist():
        rows = (ids == expert).nonzero().squeeze(1)
        product = x[rows // copies] @ matrices[expert]
        out[rows] = product if bias is None else product + bias[expert]
    return gate_twin(out, activation) if activation else out
