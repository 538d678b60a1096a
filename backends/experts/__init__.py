"""`specdec::grouped_linear`: products of tokens with the experts they were sent to, one op for any number of tokens.

Expert weights are its arguments, so traces and checks of addresses see them. Nothing waits for the host on CUDA, where
kernels of ours run it: it can be captured, in prefills too.
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
    """Return [T*k, N]: row t*k+j is x's product with the weight of expert expert_ids[t, j], plus its bias.

    x: [T, K], whose row t serves all k, or [T*k, K]. expert_ids: [T, k], int64 or int32, not negative; those past the
    last expert, which stand for experts of other ranks, give rows of zeros. weight: [E, N, K], or [E, K, N] if
    is_transposed, of x's dtype. bias: [E, N]. A product is rounded to that dtype before its bias is added. K is summed
    in order and never split, so a row's bits depend on neither the other rows nor their number.

    activation: of `linear.gated_linear`, or "swigluoai", GPT-OSS's gate, whose gate and up take turns in the columns;
    the result is then activation(gate) * up, [T*k, N / 2].

    On CUDA the twin, which reads ids on the host, runs where Triton is not installed, and in other dtypes: an expert at
    a time, as transformers' eager experts do.
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
