"""The outputs of a live model's layers, which drafts read, taken by our own hooks where the layers are called.

transformers' list form of `output_hidden_states` is not used: the meaning of its indices depends on version and model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

UNORDERED = "its layers do not each run once, in the order of their list, and return hidden states: none can be read"


@contextmanager
def found_layers(stack: nn.Module, num_layers: int, width: int) -> Iterator[list[nn.Module]]:
    """Yield a list that holds, after the context, the layers of `stack`, which is to run once within it.

    They are the `num_layers` modules of a list that each ran once, in its order, and returned [B, T, width]; if there
    is no such list, it stays empty.
    """
    lists = [m for m in stack.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    ran: dict[nn.Module, list[int]] = {}
    count = iter(range(1 << 30))

    def note(module: nn.Module, args: Any, output: Any) -> None:
        hidden = hidden_of(output)
        is_hidden = isinstance(hidden, torch.Tensor) and hidden.dim() == 3 and hidden.shape[2] == width
        ran.setdefault(module, []).append(next(count) if is_hidden else -1)

    found: list[nn.Module] = []
    with ExitStack() as hooks:
        for layer in chain.from_iterable(lists):
            hooks.enter_context(layer.register_forward_hook(note))
        yield found
    for layers in lists:
        order = [i for layer in layers for i in ran.get(layer, [-1])]
        if not found and len(order) == num_layers and min(order) >= 0 and order == sorted(order):
            found.extend(layers)


def hidden_of(output: Any) -> Any:
    """Return the hidden states of a module's output: the output itself, or the first of several."""
    return output[0] if isinstance(output, tuple | list) else output


class Taps:
    """Keeps the outputs of `layers` in the current forward, within `reading`."""

    def __init__(self, layers: Sequence[nn.Module] = ()):
        self._layers = tuple(layers)
        self._kept: dict[int, torch.Tensor] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the layers within the context, after hooks that a user has added to them."""
        with ExitStack() as hooks:
            hooks.callback(self._kept.clear)
            for i, layer in enumerate(self._layers):
                hooks.enter_context(layer.register_forward_hook(partial(self._keep, i)))
            yield

    def _keep(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._kept[index] = hidden_of(output)

    def take(self) -> torch.Tensor:
        """Return the outputs of a forward side by side, [B, T, num_layers*h], and drop them."""
        taken = torch.cat([self._kept[i] for i in range(len(self._layers))], -1)
        self._kept.clear()
        return taken
