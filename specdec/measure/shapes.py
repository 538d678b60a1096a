"""Targets and EAGLE-3 heads of named shapes with random weights, whose speed is a trained one's, whole or sharded over
ranks, and the acceptance that is imposed on them."""

import copy
import re
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from specdec.heads.base import LayerConfig
from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers

MAX_POSITIONS = 131072  # of every shape, so that long contexts can be timed; costs nothing until it is used

SHAPES: dict[str, dict[str, Any]] = {
    "135m": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    ),
    "8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    ),
    "70b": dict(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
}
NO_END = {"bos_token_id": None, "eos_token_id": None}  # random weights would say it by chance
DRAFT_VOCAB = {"135m": 16384, "8b": 32000, "70b": 32000, "tiny": 48}
OWN_LAYERS = 16  # of a sharded target that have weights of their own; the others have copies, as a rank makes all first


def check_shape(shape: str) -> str:
    """Return `shape` if there is one of that name; else ValueError."""
    if shape not in SHAPES:
        raise ValueError(f"--shape {shape!r}: expected one of {', '.join(SHAPES)} (or a real model as --target)")
    return shape


def acceptance_rates(steps: int) -> list[float]:
    """Return the share of rounds in which draft position 1, 2, .. is accepted: what every speed bench imposes."""
    return [0.8 * 0.75**j for j in range(steps)]


def make_target(shape: str, device: str, dtype: torch.dtype | None = None, **options: Any) -> LlamaForCausalLM:
    """Make a target of that shape with random weights, the same in every run, and no EOS.

    dtype: default bfloat16, on CPU float32. options: of its config, in place of the shape's.
    """
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            given = {**SHAPES[check_shape(shape)], "max_position_embeddings": MAX_POSITIONS, **NO_END, **options}
            model = LlamaForCausalLM(LlamaConfig(**given, dtype=dtype))
    finally:
        torch.set_default_dtype(before)
    for name, buffer in model.named_buffers():
        assert not name.endswith("inv_freq") or buffer.dtype == torch.float32, "rotary frequencies must stay exact"
    return model.eval()


def fewer_layers(shape: str, num_ranks: int) -> dict[str, Any]:
    """Return the options of `make_target` for a model that `shard` is going to share among so many ranks."""
    num_layers = min(OWN_LAYERS, SHAPES[check_shape(shape)]["num_hidden_layers"])
    return {} if num_ranks == 1 else {"num_hidden_layers": num_layers}


def shard(model: LlamaForCausalLM, shape: str, num_ranks: int) -> LlamaForCausalLM:
    """Return `model` as transformers loads it for one of `num_ranks` ranks, all of which call this, with the layers of
    `shape`; those that `model` lacks repeat its own."""
    own, config = model.config.num_hidden_layers, copy.deepcopy(model.config)
    config.num_hidden_layers = SHAPES[shape]["num_hidden_layers"]
    state = model.state_dict()
    for name in list(state):
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is not None:
            for layer in range(int(found[1]) + own, config.num_hidden_layers, own):
                state[f"model.layers.{layer}.{found[2]}"] = state[name]
    sharded = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=model.dtype,
        distributed_config=DistributedConfig(tp_size=num_ranks),
    )
    return sharded.eval()


def make_head(shape: str, model: Any, ids: torch.Tensor | None = None) -> Eagle3Head:
    """Make a head with random weights that fits `model`, a target of `shape`, and drafts tokens of `ids` (or any)."""
    c = model.config
    heads = (c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads)
    aux = default_aux_layers(c.num_hidden_layers)
    layer = LayerConfig(c.hidden_size, c.intermediate_size, *heads)
    if ids is None:
        ids = torch.arange(c.vocab_size)
    config = Eagle3Config(layer, c.hidden_size, c.vocab_size, min(DRAFT_VOCAB[shape], len(ids)), aux)
    head = Eagle3Head(config).to(model.device, model.dtype)
    head.set_hot_vocab(ids[torch.randperm(len(ids))][: config.draft_vocab_size].to(model.device))
    return head.eval().requires_grad_(False)
