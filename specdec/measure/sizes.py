"""The named shapes: models that people run, by their config's class and sizes; nothing here makes weights."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Mamba2Config, PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig

from specdec.backends.state_pool import ConvSpec, RecurrentSpec, ScanSpec
from specdec.heads.base import LayerConfig

MAX_POSITIONS = 131072  # of every shape, so that long contexts can be timed; costs nothing until it is used
NO_END = {"bos_token_id": None, "eos_token_id": None}  # random weights would say it by chance


@dataclass(frozen=True)
class Shape:
    """A model: the class of its config, and the sizes that are given to it.

    draft_vocab: hot vocabulary of its EAGLE-3 head; draft_layer: that head's layer, by default of the model's sizes.
    state: what each of its recurrent layers keeps.
    """

    config: type[PreTrainedConfig]
    sizes: dict[str, Any]
    draft_vocab: int = 32000
    draft_layer: LayerConfig | None = None
    state: tuple[RecurrentSpec, ...] = ()

    @property
    def is_dense(self) -> bool:
        """Whether it is a Llama: every token meets all weights, and nothing but K/V is kept of it."""
        return self.config is LlamaConfig

    def make_config(self, **options: Any) -> Any:
        """Return the config. options: in place of the shape's sizes."""
        return self.config(**{**self.sizes, **NO_END, **options})

    def layer_of_draft(self, config: Any) -> LayerConfig:
        """Return the layer of an EAGLE-3 head for a model of this shape and that config."""
        if self.draft_layer is not None:
            return self.draft_layer
        heads, width = config.num_attention_heads, config.hidden_size
        return LayerConfig(width, config.intermediate_size, heads, config.num_key_value_heads, width // heads)


def _llama(theta: float, is_tied: bool, **sizes: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta}
    return {**sizes, **_LONG, "rope_parameters": rope, "tie_word_embeddings": is_tied}


_LONG = {"max_position_embeddings": MAX_POSITIONS}
_DELTA = (ConvSpec(8192, 4), ScanSpec(32, 32, 128, 128, "head", is_corrected=True))  # as Qwen3-Next has it
_DELTA_HEAD = LayerConfig(2048, 6144, 16, 2, 256, rms_norm_eps=1e-6)

SHAPES: dict[str, Shape] = {
    "135m": Shape(
        LlamaConfig,
        _llama(
            100000.0,
            is_tied=True,
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
        ),
        draft_vocab=16384,
    ),
    "8b": Shape(
        LlamaConfig,
        _llama(
            500000.0,
            is_tied=False,
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
    ),
    "70b": Shape(
        LlamaConfig,
        _llama(
            500000.0,
            is_tied=False,
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
    ),
    "tiny": Shape(
        LlamaConfig,
        _llama(
            10000.0,
            is_tied=False,
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=8,
            num_attention_heads=2,
            num_key_value_heads=2,
        ),
        draft_vocab=48,
    ),
    "30b-a3b": Shape(
        Qwen3MoeConfig,
        dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            **_LONG,
        ),
        draft_layer=LayerConfig(2048, 6144, 32, 4, 128, rms_norm_eps=1e-6),
    ),
    "35b-a3b": Shape(Qwen3_5MoeTextConfig, {**_LONG}, draft_layer=_DELTA_HEAD, state=_DELTA),  # the class's own sizes
    "qwen3-next-12": Shape(Qwen3NextConfig, {"num_hidden_layers": 12, **_LONG}, draft_layer=_DELTA_HEAD, state=_DELTA),
    "mamba2-2.7b": Shape(
        Mamba2Config,
        dict(
            vocab_size=50288,
            hidden_size=2560,
            num_hidden_layers=64,
            state_size=128,
            num_heads=80,
            head_dim=64,
            expand=2,
            n_groups=1,
            initializer_range=0.02,
            tie_word_embeddings=True,
        ),
        draft_layer=LayerConfig(2560, 7680, 20, 5, 128),
        state=(ConvSpec(5376, 4), ScanSpec(80, 1, 128, 64, "head", is_corrected=False)),
    ),
    "tiny-hybrid": Shape(
        Qwen3_5MoeTextConfig,
        dict(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=8,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            **_LONG,
        ),
        draft_vocab=48,
        draft_layer=LayerConfig(32, 48, 2, 2, 16),
        state=(ConvSpec(80, 4), ScanSpec(4, 4, 8, 12, "head", is_corrected=True)),
    ),
}


def check_shape(shape: str) -> str:
    """Return `shape` if there is one of that name; else ValueError."""
    if shape not in SHAPES:
        raise ValueError(f"--shape {shape!r}: expected one of {', '.join(SHAPES)} (or a real model as --target)")
    return shape


def recurrent_layers(shape: str) -> tuple[RecurrentSpec, ...]:
    """List what the recurrent layers of `shape` keep, all of them."""
    found = SHAPES[shape]
    kinds = getattr(found.make_config(), "layer_types", None) or ()
    return found.state * list(kinds).count("linear_attention")
