"""The fence that Triton before 3.7.1 leaves out between copies to shared memory and wgmma, the products of large tiles
on Hopper: the two see shared memory through different proxies, and a product may read what was there before."""

import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from triton.language.target_info import cuda_capability_geq

from specdec.backends.triton.launch.relaunch import INTERPRETED

LACKS_FENCES = tl.constexpr(not INTERPRETED and TorchVersion(triton.__version__) < "3.7.1")


@triton.jit
def fence_copies(NUM_ROWS: tl.constexpr):
    """Have a product of a tile of NUM_ROWS rows see what was copied before it; wgmma takes tiles of 64 rows or more."""
    if LACKS_FENCES:
        if NUM_ROWS >= 64:
            if cuda_capability_geq(9, 0):
                tl.inline_asm_elementwise(
                    "fence.proxy.async.shared::cta; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
