"""Attention that modules compute in a method of their own, `_attn(query, key, value, ...)`, routed to other functions.

What such a method computes is measured: it is called with made-up queries, keys and values as far as positions go, and
must give softmax attention, causal or within a window. No model is known by name, and nothing but the method of our
instances is replaced.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

METHOD = "_attn"
FIRST_ARGUMENTS = (["query", "key", "value"], ["q", "k", "v"])
FARTHEST = 4096  # positions: methods are called with all of them at once
STRONG = 8.0  # a product of a query and a key, whose weight gives the scaling away
ROUNDED = 2e-4  # how far off that is where the user has put products on TF32, whose weights have 11 bits


class Measure(NamedTuple):
    """What a method computes: scores' scaling, and of how many last tokens each query sees the values, None: all."""

    scaling: float
    sliding_window: int | None


class Form(NamedTuple):
    """How a method is called: whether keys are [B, heads, dim, T]; the class and the length of what it returns."""

    has_transposed_keys: bool
    kind: type
    length: int


# Takes the module, q, k and v [1, heads, T, dim] and the mask; returns [1, heads, T, v_dim].
Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


@dataclass
class OwnAttention:
    """A module that attends in its own method, and the positions that its model has."""

    module: nn.Module
    form: Form
    num_positions: int | None
    measured: Measure | str | None = None

    def measure(self, head_dim: int, is_masked: bool) -> Measure | str:
        """Return what the method computes, or why it cannot be routed; is_masked: it is given a causal mask."""
        if self.measured is None:
            self.measured = self._measure(head_dim, is_masked)
        return self.measured

    def _measure(self, head_dim: int, is_masked: bool) -> Measure | str:
        count = self.num_positions
        if count is None or count > FARTHEST:
            return f"its {METHOD} cannot be judged as far as its positions go ({count}; at most {FARTHEST})"
        try:
            window = self._window(head_dim, is_masked, count)
            for measure in (Measure(scaling, window) for scaling in self._scalings(head_dim, is_masked)):
                if self._is_attention(head_dim, is_masked, count, measure):
                    return measure
        except RuntimeError as error:
            return f"its {METHOD} cannot be called alone: {error}"
        return f"its {METHOD} computes something else than causal softmax attention"

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_masked: bool) -> torch.Tensor:
        """Return [T, dim] for q, k and v [T, dim]."""
        mask = torch.zeros(1, 1, len(q), len(q), device=q.device)
        mask.masked_fill_(~_visible(len(q), None, q.device), torch.finfo(mask.dtype).min)
        return _call(self.module, self.form.has_transposed_keys, q, k, v, mask if is_masked else None)[0][0, 0]

    def _scalings(self, head_dim: int, is_masked: bool) -> list[float]:
        """Return what the scaling of scores may be, from the weights of two keys: what is usual comes first."""
        device = _device(self.module)
        k, v = torch.zeros(2, head_dim, device=device), torch.eye(2, head_dim, device=device)
        k[0, 0] = 1
        weights = self._call(STRONG * k.flip(0), k, v, is_masked)[1, :2].double()
        scaling = float((weights[0] / weights[1]).log()) / STRONG
        return [*(s for s in (1.0, head_dim**-0.5, 1 / head_dim) if abs(s - scaling) < ROUNDED), scaling]

    def _window(self, head_dim: int, is_masked: bool, count: int) -> int | None:
        """Return how many tokens the last of `count` queries sees, from the mean of their numbers; None: all."""
        device = _device(self.module)
        same, v = torch.zeros(count, head_dim, device=device), torch.zeros(count, head_dim, device=device)
        v[:, 0] = torch.arange(count, device=device)
        first = round(2 * float(self._call(same, same, v, is_masked)[-1, 0]) - (count - 1))
        return count - first if first > 0 else None

    def _is_attention(self, head_dim: int, is_masked: bool, count: int, measure: Measure) -> bool:
        """Return whether `count` random tokens get what softmax attention by `measure` gives them."""
        random = torch.Generator().manual_seed(0)
        device = _device(self.module)
        q, k, v = torch.randn(3, count, head_dim, generator=random, device="cpu").to(device)
        scores = (q @ k.T * measure.scaling).masked_fill(~_visible(count, measure.sliding_window, device), -torch.inf)
        return torch.allclose(self._call(q, k, v, is_masked), scores.softmax(-1) @ v, rtol=1e-3, atol=1e-4)


def find_own_attention(model: nn.Module, num_positions: int | None) -> tuple[OwnAttention, ...]:
    """Find the modules of `model` whose class has such a method; one that was given another one is left out."""
    found = []
    for module in model.modules():
        function = inspect.getattr_static(type(module), METHOD, None)
        if METHOD in module.__dict__ or not isinstance(function, FunctionType):
            continue
        if list(inspect.signature(function).parameters)[1:4] in FIRST_ARGUMENTS:
            form = _form(module)
            found += [OwnAttention(module, form, num_positions)] if form is not None else []
    return tuple(found)


@contextmanager
def own_replaced(own: Sequence[OwnAttention], attend: Attend) -> Iterator[None]:
    """Let modules that attend in their own method do so by `attend` within the context; contexts may nest."""
    before = [attention.module.__dict__.get(METHOD) for attention in own]
    methods = {form: _replacement(form, attend) for form in {attention.form for attention in own}}
    try:
        for attention in own:
            attention.module.__dict__[METHOD] = MethodType(methods[attention.form], attention.module)
        yield
    finally:
        for attention, method in zip(own, before, strict=True):
            del attention.module.__dict__[METHOD]
            attention.module.__dict__.update({} if method is None else {METHOD: method})


def _replacement(form: Form, attend: Attend) -> Callable[..., Any]:
    """Return a method of `form` that attends by `attend`."""
    has_transposed_keys, kind, length = form

    def method(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, *args: Any
    ) -> Any:
        out = attend(module, query, key.mT if has_transposed_keys else key, value, mask)
        return kind((out, *[None] * (length - 1)))

    return method


def _form(module: nn.Module) -> Form | None:
    """Return how the method of `module` is called, or None if it is called in no way that we know."""
    q = torch.zeros(2, 3, device=_device(module))
    for has_transposed_keys in (False, True):
        try:
            answer = _call(module, has_transposed_keys, q, q, q, None)
        except Exception:  # not in this form
            continue
        if type(answer) in (tuple, list) and answer[0].shape == (1, 1, 2, 3):
            return Form(has_transposed_keys, type(answer), len(answer))
    return None


@torch.inference_mode()
def _call(
    module: nn.Module, has_transposed_keys: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
) -> Any:
    """Return what the method of the class of `module` answers to one head's q, k and v [T, dim]."""
    q, k, v = (x[None, None] for x in (q, k, v))
    return getattr(type(module), METHOD)(module, q, k.mT.contiguous() if has_transposed_keys else k, v, mask)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _visible(count: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys each of `count` queries sees, [T, T]."""
    i = torch.arange(count, device=device)
    age = i[:, None] - i
    return (age >= 0) & (age < (window or count))
