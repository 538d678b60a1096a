"""Targets of named shapes with random weights, whose speed is a trained one's, whole or sharded over ranks, drafts for
them, and the acceptance that is imposed on those."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.heads.nextn import NextNHead
from specdec.measure.sizes import SHAPES, check_shape
from specdec.targets.weight_bytes import expert_modules

IMPOSED = "weights random, acceptance imposed: position j is accepted with probability 0.8 * 0.75**(j-1)"
APART = 8.0  # std of embeddings before experts: else all tokens look alike in deep layers, and choose the same ones
OWN_LAYERS = 16  # of a sharded target that have weights of their own; the others have copies, as a rank makes all first


def acceptance_rates(steps: int) -> list[float]:
    """Return the share of rounds in which draft position 1, 2, .. is accepted: what every speed bench imposes."""
    return [0.8 * 0.75**j for j in range(steps)]


def make_target(shape: str, device: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Make a target of that shape with random weights, the same in every run, and no EOS.

    Weights are made on the device, in their dtype, as transformers initialises a new model's: no state explodes.
    dtype: default bfloat16, on CPU float32. options: of its config, in place of the shape's.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    config = SHAPES[check_shape(shape)].make_config(**options, dtype=dtype)
    torch.manual_seed(0)
    with _made_on(device, dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        assert not name.endswith("inv_freq") or buffer.dtype == torch.float32, "rotary frequencies must stay exact"
    if expert_modules(model):
        model.get_input_embeddings().weight.data.normal_(0, APART)
    return model.eval()


@contextmanager
def _made_on(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Within, new parameters are of `dtype` and on `device`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def fewer_layers(shape: str, num_ranks: int) -> dict[str, Any]:
    """Return the options of `make_target` for a model that `shard` is going to share among so many ranks.

    ValueError for a shape that transformers has no plan for, or whose heads so many ranks cannot share.
    """
    config = SHAPES[check_shape(shape)].make_config()
    if num_ranks == 1:
        return {}
    if not config.base_model_tp_plan:
        known = ", ".join(name for name, other in SHAPES.items() if other.config.base_model_tp_plan)
        raise ValueError(
            f"--shape {shape!r} on {num_ranks} ranks: transformers has no plan by which ranks share a "
            f"{config.model_type} model; leave torchrun out, or name one of {known}"
        )
    if config.num_key_value_heads % num_ranks:
        raise ValueError(
            f"--shape {shape!r} on {num_ranks} ranks: expected a number of ranks that divides its "
            f"{config.num_key_value_heads} key/value heads; give torchrun another --nproc-per-node"
        )
    return {"num_hidden_layers": min(OWN_LAYERS, config.num_hidden_layers)}


def shard(model: Any, shape: str, num_ranks: int) -> Any:
    """Return `model` as transformers loads it for one of `num_ranks` ranks, all of which call this, with the layers of
    `shape`; those that `model` lacks repeat its own, kind by kind.

    Until the caller forgets `model`, a rank has both. Computed, in bfloat16: of 35b-a3b 29 GB (16 whole layers) and
    35 GB (half of 40), of 70b 32 and 72 GB. Afterwards nothing keeps the whole ones.
    """
    config, own = SHAPES[shape].make_config(dtype=model.dtype), model.config.num_hidden_layers
    state = model.state_dict()
    for name in list(state):
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is not None:
            for layer in range(int(found[1]) + own, config.num_hidden_layers, own):
                state[f"model.layers.{layer}.{found[2]}"] = state[name]
    sharded, told = type(model).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=model.dtype,
        distributed_config=DistributedConfig(tp_size=num_ranks),
        output_loading_info=True,
    )
    assert not any(told.values()), f"layers of {shape} do not repeat those of {own}: {told}"
    _separate(sharded)
    torch.manual_seed(0)  # loading may have drawn: ranks make equal drafts next
    return sharded.eval()


def _separate(model: nn.Module) -> None:
    """Give every weight a storage of its own. Transformers' parts are views of what they were loaded from where they
    can be: they keep all of that in memory, and layers that repeat others would be read once for both."""
    for parameter in model.parameters():
        local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)  # of a DTensor, what this rank has
        local.data = local.data.clone(memory_format=torch.contiguous_format)


def make_head(shape: str, model: Any, ids: torch.Tensor | None = None) -> Eagle3Head:
    """Make a head with random weights that fits `model`, a target of `shape`, and drafts tokens of `ids` (or any)."""
    c, found = model.config, SHAPES[shape]
    aux = default_aux_layers(c.num_hidden_layers)
    if ids is None:
        ids = torch.arange(c.vocab_size)
    layer = found.layer_of_draft(c)
    config = Eagle3Config(layer, c.hidden_size, c.vocab_size, min(found.draft_vocab, len(ids)), aux)
    head = Eagle3Head(config).to(model.device, model.dtype)
    head.set_hot_vocab(ids[torch.randperm(len(ids))][: config.draft_vocab_size].to(model.device))
    return head.eval().requires_grad_(False)


def make_nextn(model: Any) -> NextNHead:
    """Make a NextN head with random weights for `model`: a layer of its own kind, its embedding and its output head."""
    with _made_on(model.device, model.dtype):
        head = NextNHead(model)
    head.apply(model._init_weights)  # experts are empty when they are made
    return head.eval().requires_grad_(False)
