"""Attention of a live model, answered by our function: through transformers' AttentionInterface, or in the methods
`_attn(query, key, value, ...)` of classes that FORMS lists. Only the model's own instances change."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface

from specdec.backends import attention
from specdec.reach.targets.adapters import latents
from specdec.reach.targets.marks import layer_id
from specdec.reach.targets.overrides import ConfigViews, replaced

METHOD = "_attn"
# As in AttentionInterface: takes the module, q, k and v [1, heads, T, dim], a mask, and keyword arguments; returns
# [1, T, heads, v_dim] and None.
Attend = Callable[..., tuple[torch.Tensor, None]]


class Form(NamedTuple):
    """The adapter of a class that attends in its own method.

    known: returns the arguments that AttentionInterface would get, of a module; own_window: returns how many last
    tokens a query sees in it, None: all. has_transposed_keys: keys are [B, heads, dim, T]; result: builds the method's
    return value.
    """

    known: Callable[[Any], dict[str, Any]] = lambda module: {}
    has_transposed_keys: bool = False
    result: Callable[[torch.Tensor], Any] = lambda out: (out, None)


FORMS: Mapping[str, Form] = MappingProxyType(  # by file and class in transformers
    {
        "modeling_codegen.CodeGenAttention": Form(),
        "modeling_gpt_neo.GPTNeoSelfAttention": Form(
            lambda m: {"scaling": 1.0, "own_window": m.config.window_size if m.attention_type == "local" else None}
        ),
        "modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": Form(),
        "modeling_gptj.GPTJAttention": Form(),
        "modeling_openai.Attention": Form(
            lambda m: {} if m.scale else {"scaling": 1.0}, has_transposed_keys=True, result=lambda out: [out]
        ),
    }
)


def route_attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any = None, **kw: Any
) -> tuple[torch.Tensor, None]:
    """Route an attention call through our op; see `Attend`."""
    if latents.is_latent(module):
        return latents.attend(module, q, k, v, layer_id(module)).unsqueeze(0), None
    out = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), layer_id(module))
    return out.unsqueeze(0), None


AttentionInterface.register("specdec", route_attention)


class Attention:
    """The attention calls of `model`. own: the modules that attend in their own method, with its form; expansions:
    modules that attend over latents, with the layers that would expand them.

    Modules with an `indexer` attend to the `index_topk` tokens that it picks (DeepSeek Sparse Attention,
    arXiv:2512.02556): to all tokens in texts that are no longer, and only such texts are served, see
    `shape.position_limit`. So indexers compute nothing.
    """

    def __init__(self, model: nn.Module):
        self._model, self._configs = model, ConfigViews(model.modules(), "specdec")
        self.own = {module: form for module in model.modules() if (form := _form(module)) is not None}
        self.expansions = latents.latent_modules(model)
        sparse = [m for m in model.modules() if hasattr(getattr(m, "indexer", None), "index_topk")]
        self._dense: list[tuple[dict[str, Any], str, Any]]
        self._dense = [(vars(m), "forward", partial(_with_mask, m.forward)) for m in sparse]
        self._dense += [(vars(m.indexer), "forward", _every_token) for m in sparse]

    def routed(self) -> AbstractContextManager[None]:
        """Route attention calls through our op within the context."""
        return self._answered(self._configs, route_attention)

    def answered(self, implementation: str, attend: Attend) -> AbstractContextManager[None]:
        """Answer attention calls by `attend`, registered as `implementation`, within the context; contexts may nest."""
        return self._answered(ConfigViews(self._model.modules(), implementation), attend)

    @contextmanager
    def _answered(self, configs: ConfigViews, attend: Attend) -> Iterator[None]:
        own = {module: partial(attend, module, **form.known(module)) for module, form in self.own.items()}
        methods = ((vars(m), METHOD, partial(_attend, self.own[m], answer)) for m, answer in own.items())
        kept = ((vars(m), latents.EXPAND, latents.kept) for m in self.expansions)
        with replaced([*methods, *kept, *self._dense]), configs.shown():
            yield


def _every_token(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Answer for an indexer without choosing."""
    return hidden_states.new_empty(0, dtype=torch.int32)


def _with_mask(
    forward: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kw: Any
) -> Any:
    """Call a module's forward with a mask [1, 1, 1, 1], since it passes a part of the mask to its indexer."""
    mask = hidden_states.new_zeros(1) if attention_mask is None else attention_mask
    return forward(hidden_states, *args, attention_mask=mask.view(1, 1, 1, 1) if mask.numel() == 1 else mask, **kw)


def _form(module: nn.Module) -> Form | None:
    """Return the form of the method in which `module` attends; None if it is not in FORMS, or was replaced or
    overridden."""
    if METHOD in vars(module):
        return None
    for cls in type(module).__mro__:
        form = FORMS.get(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}")
        own = vars(cls).get(METHOD)  # None in versions that attend through AttentionInterface
        if form is not None and own is not None and inspect.getattr_static(type(module), METHOD) is own:
            return form
    return None


def _attend(
    form: Form, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, *_: Any
) -> Any:
    """Answer a module's method by `attend`; query, value, out: [1, heads, T, dim]."""
    k = key.mT if form.has_transposed_keys else key
    return form.result(attend(query, k, value, mask)[0].transpose(1, 2))
