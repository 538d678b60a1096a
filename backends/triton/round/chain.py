"""The tree of a drafted chain in one launch, one program per request. Twin: `specdec.core.functional.tree.chain`."""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early, wait_for_others
from specdec.backends.triton.launch.sizes import next_power_of_2
from specdec.core.config import num_words


@triton.jit(do_not_specialize=["stride_root", "stride_drafts"])
def _chain_kernel(
    root,
    drafts,
    tokens,
    parents,
    depths,
    ancestor_bits,
    stride_root,
    stride_drafts,
    NUM_NODES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, True)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    is_node = node < NUM_NODES
    first = tl.load(root + request * stride_root)
    drafted = tl.load(drafts + request * stride_drafts + node - 1, mask=is_node & (node > 0), other=0)
    row = request * NUM_NODES + node
    tl.store(tokens + row, tl.where(node > 0, drafted, first), mask=is_node)
    tl.store(parents + row, tl.maximum(node - 1, 0).to(tl.int64), mask=is_node)
    tl.store(depths + row, node.to(tl.int64), mask=is_node)
    word = tl.arange(0, BLOCK_W)
    num_seen = (node[:, None] + 1 - 64 * word[None, :]).to(tl.int64)
    two = tl.full([BLOCK_N, BLOCK_W], 2, tl.int64)  # 2 << 63 wraps to 0, and 0 - 1 sets all bits
    bits = tl.where(num_seen > 0, (two << (tl.minimum(tl.maximum(num_seen, 1), 64) - 1)) - 1, 0)
    is_word = is_node[:, None] & (word < NUM_WORDS)[None, :]
    tl.store(ancestor_bits + row[:, None] * NUM_WORDS + word[None, :], bits, mask=is_word)


def chain(root: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, parents, depths [bs, S+1], ancestor_bits [bs, S+1, W] of root [bs], drafts [bs, S]; all int64."""
    assert drafts.shape[1] == 0 or drafts.stride(1) == 1, "drafts need a dense last dim"
    bs, num_nodes = drafts.shape[0], drafts.shape[1] + 1
    # Allocated separately, so that all are aligned: unaligned pointers would compile another variant.
    tokens, parents, depths = (torch.empty(bs, num_nodes, dtype=torch.int64, device=root.device) for _ in range(3))
    bits = torch.empty(bs, num_nodes, num_words(num_nodes), dtype=torch.int64, device=root.device)
    _chain_kernel[(bs,)](
        root,
        drafts,
        tokens,
        parents,
        depths,
        bits,
        root.stride(0),
        drafts.stride(0),
        NUM_NODES=num_nodes,
        NUM_WORDS=bits.shape[2],
        BLOCK_N=next_power_of_2(num_nodes),
        BLOCK_W=next_power_of_2(bits.shape[2]),
        **early(),
    )
    return tokens, parents, depths, bits
