"""Named shapes of real models: targets with random weights, which are as fast as trained ones, whole or sharded over
ranks, drafts for them, and the imposed acceptance."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.torch_version import TorchVersion
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_next import Qwen3NextConfig

from specdec.backends.recurrent.state_pool import ConvSpec, RecurrentSpec, ScanSpec
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.block import BlockConfig, BlockHead
from specdec.reach.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.reach.heads.fresh import block_config, new_block
from specdec.reach.heads.nextn import NextNHead
from specdec.reach.targets.weight_bytes import expert_modules

IMPOSED = "weights random, acceptance imposed: position j is accepted with probability 0.8 * 0.75**(j-1)"
APART = 8.0  # std of embeddings before experts: else all tokens become alike in deep layers, and choose the same ones
OWN_LAYERS = 16  # layers of a sharded target with own weights; others are copies, since a rank first makes all
LONG = {"max_position_embeddings": 131072}  # so that long contexts can be timed; costs nothing until it is used
NO_END = {"bos_token_id": None, "eos_token_id": None}  # random weights would emit it by chance


@dataclass(frozen=True)
class Shape:
    """A model: the class of its config, and the sizes given to it.

    draft_vocab: hot vocabulary of its EAGLE-3 head; draft_layer: that head's layer, by default of the model's sizes.
    state: the state of each of its recurrent layers.
    """

    config: type[PreTrainedConfig]
    sizes: dict[str, Any]
    draft_vocab: int = 32000
    draft_layer: LayerConfig | None = None
    state: tuple[RecurrentSpec, ...] = ()

    def make_config(self, **options: Any) -> Any:
        """Return the config. options: override the shape's sizes."""
        return self.config(**{**self.sizes, **NO_END, **options})

    def layer_of_draft(self, config: Any) -> LayerConfig:
        """Return the layer of an EAGLE-3 head for a model of this shape and that config."""
        if self.draft_layer is not None:
            return self.draft_layer
        heads, width = config.num_attention_heads, config.hidden_size
        return LayerConfig(width, config.intermediate_size, heads, config.num_key_value_heads, width // heads)


def _llama(theta: float, is_tied: bool, *sizes: int) -> dict[str, Any]:
    """Return a Llama's config. sizes: of vocabulary, hidden states, MLP; layers, heads, key/value heads."""
    names = ["vocab_size", "hidden_size", "intermediate_size"]
    names += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    rope = {"rope_type": "default", "rope_theta": theta}
    return {**dict(zip(names, sizes, strict=True)), **LONG, "rope_parameters": rope, "tie_word_embeddings": is_tied}


_MOE = dict(num_hidden_layers=48, hidden_size=2048, vocab_size=151936, intermediate_size=6144, head_dim=128)
_MOE |= dict(num_attention_heads=32, num_key_value_heads=4, norm_topk_prob=True, moe_intermediate_size=768)
_MAMBA: dict[str, Any] = dict(num_hidden_layers=64, hidden_size=2560, vocab_size=50288, state_size=128, num_heads=80)
_MAMBA |= dict(head_dim=64, expand=2, n_groups=1, initializer_range=0.02, tie_word_embeddings=True)
_TINY = dict(num_hidden_layers=8, hidden_size=32, vocab_size=96, num_attention_heads=2, num_key_value_heads=2)
_TINY |= dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, linear_num_key_heads=2)
_TINY |= dict(shared_expert_intermediate_size=24, linear_num_value_heads=4, linear_key_head_dim=8)
_REPEATED = 2 if TorchVersion(transformers.__version__) < "5.23" else 1  # Qwen's mixers repeated shared keys
_DELTA = (ConvSpec(8192, 4), ScanSpec(32, 16 * _REPEATED, 128, 128, "head", is_corrected=True))  # as in Qwen3-Next
_SSD = (ConvSpec(5376, 4), ScanSpec(80, 1, 128, 64, "head", is_corrected=False))
_TINY_DELTA = (ConvSpec(80, 4), ScanSpec(4, 2 * _REPEATED, 8, 12, "head", is_corrected=True))
_DELTA_HEAD = LayerConfig(2048, 6144, 16, 2, 256, rms_norm_eps=1e-6)

SHAPES: dict[str, Shape] = {
    "135m": Shape(LlamaConfig, _llama(1e5, True, 49152, 576, 1536, 30, 9, 3), draft_vocab=16384),
    "8b": Shape(LlamaConfig, _llama(5e5, False, 128256, 4096, 14336, 32, 32, 8)),
    "70b": Shape(LlamaConfig, _llama(5e5, False, 128256, 8192, 28672, 80, 64, 8)),
    "tiny": Shape(LlamaConfig, _llama(1e4, False, 96, 32, 48, 8, 2, 2), draft_vocab=48),
    "30b-a3b": Shape(
        Qwen3MoeConfig,
        {**_MOE, **LONG, "num_experts": 128, "num_experts_per_tok": 8},
        draft_layer=LayerConfig(2048, 6144, 32, 4, 128, rms_norm_eps=1e-6),
    ),
    "gpt-oss-20b": Shape(
        GptOssConfig,
        {"num_hidden_layers": 24, "num_local_experts": 32},  # else the class's own sizes, which are those of 120b
        draft_layer=LayerConfig(2880, 7680, 64, 8, 64),
    ),
    "35b-a3b": Shape(Qwen3_5MoeTextConfig, LONG, draft_layer=_DELTA_HEAD, state=_DELTA),  # the class's own sizes
    "qwen3-next-12": Shape(Qwen3NextConfig, {"num_hidden_layers": 12, **LONG}, draft_layer=_DELTA_HEAD, state=_DELTA),
    "mamba2-2.7b": Shape(Mamba2Config, _MAMBA, draft_layer=LayerConfig(2560, 7680, 20, 5, 128), state=_SSD),
    "tiny-hybrid": Shape(
        Qwen3_5MoeTextConfig,
        {**_TINY, **LONG, "linear_value_head_dim": 12},
        draft_vocab=48,
        draft_layer=LayerConfig(32, 48, 2, 2, 16),
        state=_TINY_DELTA,
    ),
}


def check_shape(shape: str) -> str:
    """Return `shape` if there is one of that name; else ValueError."""
    if shape not in SHAPES:
        raise ValueError(f"--shape {shape!r}: expected one of {', '.join(SHAPES)} (or a real model as --target)")
    return shape


def recurrent_layers(shape: str) -> tuple[RecurrentSpec, ...]:
    """List the states of all recurrent layers of `shape`."""
    kinds = getattr(SHAPES[shape].make_config(), "layer_types", None) or ()
    return SHAPES[shape].state * list(kinds).count("linear_attention")


def acceptance_rates(steps: int) -> list[float]:
    """Return the share of rounds in which draft position 1, 2, .. is accepted: imposed by every speed bench."""
    return [0.8 * 0.75**j for j in range(steps)]


def make_target(shape: str, device: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Make a target of that shape with random weights, the same in every run, and no EOS.

    Weights are created on the device, in their dtype, and initialised as transformers does, so that states stay finite.
    dtype: default bfloat16, on CPU float32. options: of its config, overriding the shape's.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    config = SHAPES[check_shape(shape)].make_config(**options, dtype=dtype)
    torch.manual_seed(0)
    with made_on(device, dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        assert not name.endswith("inv_freq") or buffer.dtype == torch.float32, "rotary frequencies must stay exact"
    if expert_modules(model):
        model.get_input_embeddings().weight.data.normal_(0, APART)
    return model.eval()


@contextmanager
def made_on(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in `dtype` on `device` within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def fewer_layers(shape: str, num_ranks: int) -> dict[str, Any]:
    """Return the options of `make_target` for a model that `shard` will share among `num_ranks` ranks.

    ValueError for a shape that transformers has no plan for, or whose heads cannot be shared by so many ranks.
    """
    config = SHAPES[check_shape(shape)].make_config()
    if num_ranks == 1:
        return {}
    if not config.base_model_tp_plan:
        known = ", ".join(name for name, other in SHAPES.items() if other.config.base_model_tp_plan)
        raise ValueError(
            f"--shape {shape!r} on {num_ranks} ranks: transformers has no tensor-parallel plan for a "
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

    Until the caller drops `model`, a rank has both. Computed, in bfloat16: of 35b-a3b 29 GB (16 whole layers) and 35 GB
    (half of 40), of 70b 32 and 72 GB. Afterwards nothing keeps the whole ones.
    """
    config, own = SHAPES[shape].make_config(dtype=model.dtype), model.config.num_hidden_layers
    state = model.state_dict()
    for name in list(state):
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is not None:
            for layer in range(int(found[1]) + own, config.num_hidden_layers, own):
                state[f"model.layers.{layer}.{found[2]}"] = state[name]
    options = {"dtype": model.dtype, "distributed_config": DistributedConfig(tp_size=num_ranks)}
    sharded, report = type(model).from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **options
    )
    assert not any(report.values()), f"layers of {shape} do not repeat those of {own}: {report}"
    _separate(sharded)
    torch.manual_seed(0)  # loading may have drawn numbers: ranks make equal drafts next
    return sharded.eval()


def _separate(model: nn.Module) -> None:
    """Give every weight its own storage. Transformers' parts are views of the loaded tensors where possible: they keep
    those in memory, and layers that repeat others would be read once for both."""
    for parameter in model.parameters():
        local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)  # of a DTensor, this rank's part
        local.data = local.data.clone(memory_format=torch.contiguous_format)


def make_head(shape: str, model: Any, ids: torch.Tensor | None = None) -> Eagle3Head:
    """Make a head with random weights that fits `model`, a target of `shape`, and drafts tokens of `ids` (or any)."""
    config = head_config(shape, model.config, None if ids is None else len(ids))
    head = Eagle3Head(config).to(model.device, model.dtype)
    ids = torch.arange(config.vocab_size) if ids is None else ids
    head.set_hot_vocab(ids[torch.randperm(len(ids))][: config.draft_vocab_size].to(model.device))
    return head.eval().requires_grad_(False)


def head_config(shape: str, config: Any, most: int | None = None) -> Eagle3Config:
    """Return the config of an EAGLE-3 head for a target of `shape` and that config; most: tokens it may draft."""
    vocab_size, layer = config.vocab_size, SHAPES[shape].layer_of_draft(config)
    scored = min(SHAPES[shape].draft_vocab, most or vocab_size)
    return Eagle3Config(layer, config.hidden_size, vocab_size, scored, default_aux_layers(config.num_hidden_layers))


def make_nextn(model: Any) -> NextNHead:
    """Make a NextN head with random weights for `model`: a layer of its own kind, with its embedding and output
    head."""
    with made_on(model.device, model.dtype):
        head = NextNHead(model)
    head.apply(model._init_weights)  # experts are uninitialised when created
    return head.eval().requires_grad_(False)


def make_block(shape: str, model: Any, ids: torch.Tensor, num_layers: int) -> BlockHead:
    """Make a random block head of `num_layers` layers for `model` that drafts tokens of `ids`, as in `make_head`."""
    config = block_head_config(shape, model, num_layers, len(ids))
    hot_ids = ids[torch.randperm(len(ids))][: config.draft_vocab_size].sort().values
    return new_block(model, config, hot_ids.to(model.device), seed=0).to(model.dtype).eval().requires_grad_(False)


def block_head_config(shape: str, model: Any, num_layers: int, most: int | None = None) -> BlockConfig:
    """Return the config of a block head of `num_layers` layers for `model`; most: tokens it may draft."""
    scored = min(SHAPES[shape].draft_vocab, most or model.config.vocab_size)
    return block_config(model, scored, num_layers=num_layers)


def block_layers(algo: str) -> int:
    """Return the number of layers of a block head named by `algo`, block or block:N; 0 for other algorithms."""
    name, _, layers = algo.partition(":")
    return int(layers or 2) if name == "block" and (layers or "2").isdecimal() else 0
