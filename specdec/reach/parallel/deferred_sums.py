"""All-reduces each mixture of experts once while an engine is attached: the block's output instead of each branch.

HF's plans all-reduce the routed experts' output and that of the shared expert's last projection: two collectives. Both
enter the block's output linearly, with factors that are equal on all ranks. So each rank runs the block on its parts
alone, and the outputs are summed. The plain forwards show which modules sum; running the block shows whether it is
linear in their outputs. No model is known by name.
"""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from specdec.backends.comm import all_reduce
from specdec.reach.parallel.styles import Forward, Share, is_summed, part_forward
from specdec.reach.parallel.trials import Changes, any_rank, hidden_states, is_same
from specdec.reach.targets.adapters.experts import Experts
from specdec.reach.targets.taps import hidden_of

SCALE = -2.0  # factor of the outputs in the test of linearity: exact, and it flips the sign
UNDERFLOWS = {torch.float16: 0.05}  # share of elements that may still differ: products below 6e-5 lose bits


@torch.no_grad()
def defer_sums(model: Any, share: Share, changes: Changes) -> None:
    """Make each mixture of experts of `model` sum once over the ranks, until `changes.restore()`, which also undoes a
    call that raised partway. A block whose outputs would change on any rank stays as it was.

    model: with plain forwards for the ranks of `share`. Every rank calls this at the same point.
    """
    with Experts(model).routed():
        for block in filter(_is_mixture, list(model.modules())):
            trial = Changes()
            changes.on_restore(trial.restore)
            _defer(block, model.config.get_text_config().hidden_size, share, trial)


def _is_mixture(module: nn.Module) -> bool:
    """Return whether `module` has summed experts, row-wise layers, and a forward that takes hidden states alone."""
    if not any(is_summed(child) for child in module.children()):
        return False
    return bool(_row_weights(module)) and len(signature(module.forward).parameters) == 1


def _row_weights(block: nn.Module) -> list[torch.Tensor]:
    """List the weights in `block` of row-wise layers whose outputs are summed."""
    return [module.get_parameter("weight") for module in _parts(block, 1) if not is_summed(module)]


def _parts(block: nn.Module, size: int) -> dict[nn.Module, Forward]:
    """Return the modules in `block` whose outputs are summed, with forwards that leave the sum out."""
    parts = {module: part_forward(module, size) for module in block.modules() if module is not block}
    return {module: part for module, part in parts.items() if part is not None}


def _defer(block: nn.Module, hidden_size: int, share: Share, trial: Changes) -> None:
    """Make `block` sum only its output, if its results stay the same."""
    x = hidden_states(hidden_size, _row_weights(block)[0])
    before, parts = hidden_of(block(x)), _parts(block, share.size)
    for module, part in parts.items():
        trial.replace_forward(module, part)
    own = hidden_of(block(x))  # this rank's part of the output
    is_linear = _is_linear(block, parts, x, own)
    total = all_reduce(own, share.group)  # on all ranks, whatever each one found
    trial.replace_forward(block, partial(_summed_once, block.forward, share.group))
    if any_rank(not (is_linear and is_same(total, before)), share.group, x.device):
        trial.restore()


def _is_linear(block: nn.Module, parts: dict[nn.Module, Forward], x: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether `own`, the output of `block` for x, scales with its parts: by a power of two, bit for bit, but for
    a few elements in fp16.

    This exposes small terms outside the parts, which rounding would hide in 16 bits.
    """
    scaled = Changes()
    for module, part in parts.items():
        scaled.replace_forward(module, partial(_scaled, part))
    try:
        differing = (hidden_of(block(x)) != SCALE * own).float().mean()
        return bool(differing <= UNDERFLOWS.get(own.dtype, 0.0))
    finally:
        scaled.restore()


def _scaled(part: Forward, *args: Any, **kwargs: Any) -> torch.Tensor:
    return SCALE * part(*args, **kwargs)


def _summed_once(original: Forward, group: str, hidden_states: torch.Tensor) -> Any:
    """Return the output of `original` for hidden_states [.., h], with its hidden states summed over ranks."""
    out = original(hidden_states)
    if isinstance(out, tuple):
        return all_reduce(out[0], group), *out[1:]
    return all_reduce(out, group)
