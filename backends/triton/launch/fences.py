"""The fence that Triton before 3.7.1 omits between copies to shared memory and wgmma, which multiplies large tiles on
Hopper: the two access shared memory through different proxies, so wgmma may read stale data."""

import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from triton.language.target_info import cuda_capability_geq

from specdec.backends.triton.launch.relaunch import INTERPRETED

LACKS_FENCES = tl.constexpr(not INTERPRETED and TorchVersion(triton.__version__) < "3.7.1")


@triton.jit
def fence_copies(NUM_ROWS: tl.constexpr):
    """Make copies before the product of a tile of NUM_ROWS rows visible to it; wgmma takes tiles of 64 or more rows."""
    if LACKS_FENCES:
        if NUM_ROWS >= 64:
            if cuda_capability_geq(9, 0):
                tl.inline_asm_elementwise(
                    "fence.proxy.async.shared::cta; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
