"""Tiny checkpoints written tensor by tensor to each layout's description, and a reference forward of each layout.

Nothing here imports our heads or writers: references are plain torch on the tensors under their names in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from safetensors.torch import save_file

VOCAB = 96
HIDDEN = 32
LAYERS = 8
HEADS, KV_HEADS, DIM = 4, 2, 8
MLP = 40
EPS = 1e-5

Tensors = dict[str, torch.Tensor]
# (embeddings [T, h], features or states [T, h] in causal order) -> recycled states [T, h_d], logits [T, dv]
Reference = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

BASE = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=MLP,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=256,
    rms_norm_eps=EPS,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)


def _deepseek() -> Any:
    ranks = dict(q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
    experts = dict(n_routed_experts=4, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
    return tf.DeepseekV3Config(**{**BASE, **MOE, **ranks, **experts, "num_key_value_heads": HEADS})


def _glm() -> Any:
    experts = dict(n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
    return tf.Glm4MoeConfig(**{**BASE, **MOE, **experts}, head_dim=DIM, use_qk_norm=True, partial_rotary_factor=0.5)


TARGETS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**BASE),
    "qwen2": lambda: tf.Qwen2Config(**BASE),
    "qwen3": lambda: tf.Qwen3Config(**BASE, head_dim=DIM),
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm,
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **{**BASE, "num_hidden_layers": 4},
        **MOE,
        **LINEAR,
        head_dim=DIM,
        num_experts=4,
        shared_expert_intermediate_size=24,
    ),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**{**BASE, "num_hidden_layers": 4}, **LINEAR, head_dim=DIM),
}


def target_of(family: str) -> Any:
    """A random target in which every layer affects the output."""
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(TARGETS[family]()).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape) * 0.5 / math.sqrt(parameter.shape[-1]))
        elif "norm" in name:
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def noise(*shape: int, seed: int = 0, scale: float | None = None) -> torch.Tensor:
    """Random weights, scaled by their width."""
    width = scale if scale is not None else 1.0 / math.sqrt(shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * width


def gain(size: int, seed: int) -> torch.Tensor:
    """A norm's weight, far enough from ones that a missing norm is noticed."""
    return 1.0 + noise(size, seed=seed, scale=0.3)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, *, legacy: bool = False) -> Path:
    """Write a checkpoint; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if legacy:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, str(folder / "model.safetensors"))
    return folder


def write_shards(folder: Path, config: dict[str, Any], *shards: Tensors) -> Path:
    """Write a checkpoint of several files and their index; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: t.contiguous() for name, t in shard.items()}, str(folder / file))
        weight_map.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def layer_tensors(
    at: str, *, width: int = HIDDEN, reads: int = HIDDEN, dim: int = DIM, bias: bool = False, qk_norm: bool = False
) -> Tensors:
    """Attention, MLP and the norm between, of a Llama-like layer; reads: width of the attention's input."""
    seed = sum(map(ord, at))
    shapes = {"q_proj": HEADS * dim, "k_proj": KV_HEADS * dim, "v_proj": KV_HEADS * dim}
    out = {f"{at}.self_attn.{n}.weight": noise(s, reads, seed=seed + i) for i, (n, s) in enumerate(shapes.items())}
    if bias:
        out |= {f"{at}.self_attn.{n}.bias": noise(s, seed=seed + 5 + i) for i, (n, s) in enumerate(shapes.items())}
    if qk_norm:
        out |= {f"{at}.self_attn.{n}.weight": gain(dim, seed + 9 + i) for i, n in enumerate(("q_norm", "k_norm"))}
    return out | {
        f"{at}.self_attn.o_proj.weight": noise(width, HEADS * dim, seed=seed + 3),
        f"{at}.mlp.gate_proj.weight": noise(MLP, width, seed=seed + 6),
        f"{at}.mlp.up_proj.weight": noise(MLP, width, seed=seed + 7),
        f"{at}.mlp.down_proj.weight": noise(width, MLP, seed=seed + 8),
        f"{at}.post_attention_layernorm.weight": gain(width, seed + 4),
    }


def rms(x: torch.Tensor, weight: torch.Tensor, *, plus_one: bool = False) -> torch.Tensor:
    """RMS norm; Gemma's variant multiplies by 1+w."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weight + 1 if plus_one else weight)


def llama3_frequencies(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama-3.1's rope scaling: low frequencies are divided by `factor`, high ones kept, those between mixed."""
    length, low, high = (
        scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    out = []
    for f in frequencies.tolist():
        turns = length * f / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(share * f + (1 - share) * f / scaling["factor"])
    return torch.tensor(out)


def rotated(x: torch.Tensor, theta: float, scaling: dict[str, Any] | None = None) -> torch.Tensor:
    """Apply RoPE to x [T, heads, dim] at positions 0..T-1; dimension i is paired with i + dim/2."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)])
    if scaling is not None:
        frequencies = llama3_frequencies(frequencies, scaling)
    angles = torch.arange(x.shape[0])[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attended(
    t: Tensors,
    at: str,
    x: torch.Tensor,
    theta: float,
    *,
    dim: int = DIM,
    window: int | None = None,
    scaling: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Causal attention of the layer `at` over rows x [T, reads]."""

    def project(name: str, num_heads: int) -> torch.Tensor:
        y = F.linear(x, t[f"{at}.self_attn.{name}_proj.weight"], t.get(f"{at}.self_attn.{name}_proj.bias"))
        y = y.view(x.shape[0], num_heads, dim)
        norm = t.get(f"{at}.self_attn.{name}_norm.weight")
        return y if norm is None else rms(y, norm)

    q, k, v = project("q", HEADS), project("k", KV_HEADS), project("v", KV_HEADS)
    q, k = rotated(q, theta, scaling), rotated(k, theta, scaling)
    rows = []
    for i in range(x.shape[0]):
        first = 0 if window is None else max(0, i - window + 1)
        heads = []
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = k[first : i + 1, group] @ q[i, head] / math.sqrt(dim)
            heads.append(scores.softmax(0) @ v[first : i + 1, group])
        rows.append(torch.cat(heads))
    return F.linear(torch.stack(rows), t[f"{at}.self_attn.o_proj.weight"])


def mlp(t: Tensors, at: str, x: torch.Tensor) -> torch.Tensor:
    """The layer's second half: norm, SwiGLU, residual."""
    y = rms(x, t[f"{at}.post_attention_layernorm.weight"])
    inner = F.silu(F.linear(y, t[f"{at}.mlp.gate_proj.weight"])) * F.linear(y, t[f"{at}.mlp.up_proj.weight"])
    return x + F.linear(inner, t[f"{at}.mlp.down_proj.weight"])


def plain_layer(t: Tensors, at: str, x: torch.Tensor, theta: float, **kw: Any) -> torch.Tensor:
    """A standard decoder layer."""
    return mlp(t, at, x + attended(t, at, rms(x, t[f"{at}.input_layernorm.weight"]), theta, **kw))


# ---- EAGLE-1/2


def eagle_tensors(*, fc_bias: bool, qkv_bias: bool = False) -> Tensors:
    out = {"fc.weight": noise(HIDDEN, 2 * HIDDEN, seed=21), **layer_tensors("layers.0", bias=qkv_bias)}
    return out | ({"fc.bias": noise(HIDDEN, seed=22)} if fc_bias else {})


def eagle_config(**more: Any) -> dict[str, Any]:
    """EAGLE config as SafeAILab writes it: a Llama config that names neither EAGLE nor its target."""
    shape = {k: BASE[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    return {**kind, **shape, **heads, "max_position_embeddings": 2048, "tie_word_embeddings": False, **more}


def eagle_reference(t: Tensors, head: torch.Tensor, theta: float) -> Reference:
    """head: the target's lm_head [V, h]."""

    def run(embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.linear(torch.cat([embeds, hidden], -1), t["fc.weight"], t.get("fc.bias"))
        state = mlp(t, "layers.0", x + attended(t, "layers.0", x, theta))
        return state, F.linear(state, head)

    return run


# ---- EAGLE-3, official and speculators


def hot_ids(dv: int) -> torch.Tensor:
    """[dv] ascending target ids, with gaps."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:dv].sort().values


def eagle3_tensors(at: str, *, width: int = HIDDEN, dv: int = 40, num_aux: int = 3, **layer: Any) -> Tensors:
    """at: "midlayer" or "layers.0"."""
    ids = hot_ids(dv)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {
        "fc.weight": noise(width, num_aux * HIDDEN, seed=31),
        **layer_tensors(at, width=width, reads=2 * width, **layer),
        f"{at}.input_layernorm.weight": gain(width, 32),
        f"{at}.hidden_norm.weight": gain(width, 33),
        "norm.weight": gain(width, 34),
        "lm_head.weight": noise(dv, width, seed=35),
        "d2t": ids - torch.arange(dv),
        "t2d": t2d,
    }


def official_config(dv: int = 40, **more: Any) -> dict[str, Any]:
    """EAGLE-3 config as SafeAILab writes it."""
    return {**eagle_config(), "draft_vocab_size": dv, **more}


def speculators_config(**more: Any) -> dict[str, Any]:
    """EAGLE-3 config as vLLM's speculators writes it; layer: changes of the layer's config."""
    layer = {k: v for k, v in eagle_config().items() if k != "architectures"}
    layer |= {"head_dim": DIM, "rope_theta": 10000.0, **more.pop("layer", {})}
    verifier = {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    how = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 40,
        "speculators_config": {**how, "verifier": verifier},
        **more,
    }


def fused(t: Tensors, features: torch.Tensor) -> torch.Tensor:
    """Features [T, num_aux*h] to g [T, h_d], through the norms that the checkpoint has."""
    if "input_norm.weight" in t:
        features = rms(features, t["input_norm.weight"])
    if "fc_norm.0.weight" in t:
        parts = features.split(HIDDEN, -1)
        features = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    return F.linear(features, t["fc.weight"])


def eagle3_reference(
    t: Tensors,
    at: str,
    theta: float,
    *,
    normed_residual: bool = False,
    recycles_normed: bool = False,
    deeper: tuple[str, ...] = (),
    **kw: Any,
) -> Reference:
    """deeper: names of further plain layers."""

    def run(embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = rms(hidden, t[f"{at}.hidden_norm.weight"])
        x = torch.cat([rms(embeds, t[f"{at}.input_layernorm.weight"]), g], -1)
        state = mlp(t, at, (g if normed_residual else hidden) + attended(t, at, x, theta, **kw))
        for name in deeper:
            state = plain_layer(t, name, state, theta, **kw)
        normed = rms(state, t["norm.weight"])
        return normed if recycles_normed else state, F.linear(normed, t["lm_head.weight"])

    return run


# ---- NextN / MTP


def nextn_reference(
    t: Tensors,
    names: tuple[str, str, str, str],
    block: Callable[[torch.Tensor], torch.Tensor],
    head: torch.Tensor,
    *,
    hidden_first: bool = False,
    plus_one: bool = False,
) -> Reference:
    """names: of both input norms, the projection and the final norm; block: the decoder layer."""
    enorm, hnorm, projection, out_norm = (t[f"{name}.weight"] for name in names)

    def run(embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [rms(embeds, enorm, plus_one=plus_one), rms(hidden, hnorm, plus_one=plus_one)]
        state = block(F.linear(torch.cat(parts[::-1] if hidden_first else parts, -1), projection))
        normed = rms(state, out_norm, plus_one=plus_one)
        return normed, F.linear(normed, head)

    return run


def hf_block(model: Any, tensors: Tensors) -> Callable[[torch.Tensor], torch.Tensor]:
    """A decoder layer like the target's last one, with `tensors` under transformers' names."""
    decoder = model.get_decoder()
    config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": "eager"})
    config._attn_implementation = "eager"
    index = len(decoder.layers) - 1
    layer = type(decoder.layers[index])(config, index).eval().requires_grad_(False)
    layer.load_state_dict(tensors)

    def run(x: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = torch.arange(length)[None]
        grids = positions.expand(3, 1, -1) if isinstance(model, tf.Qwen3_5ForCausalLM) else positions
        rope = decoder.rotary_emb(x[None], grids)
        out = layer(x[None], attention_mask=mask, position_embeddings=rope, use_cache=False)
        return (out[0] if isinstance(out, tuple) else out).reshape(length, -1)

    return run


def hf_layer_tensors(model: Any, seed: int) -> Tensors:
    """Random weights for a layer like the target's last one, under transformers' names."""
    state = model.get_decoder().layers[-1].state_dict()
    out = {}
    for i, (name, tensor) in enumerate(state.items()):
        scale = 0.3 if tensor.dim() == 1 else 1.0 / math.sqrt(tensor.shape[-1])
        around = 1.0 if "norm" in name and not type(model).__name__.startswith("Qwen3_5") else 0.0
        around = 0.0 if type(model).__name__.startswith("Qwen3Next") else around
        out[name] = around + noise(*tensor.shape, seed=seed + 13 * i, scale=scale)
    return out


def experts_apart(tensors: Tensors) -> Tensors:
    """Split fused experts as checkpoints store them: gate above up, one tensor per expert."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                half = both.shape[0] // 2
                prefix = f"{name.removesuffix('gate_up_proj')}{e}"
                out |= {f"{prefix}.gate_proj.weight": both[:half], f"{prefix}.up_proj.weight": both[half:]}
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": one for e, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out
