"""Cases of the speed benches: targets and heads of two shapes (and a tiny one, for tests), and ways to speculate."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.functional.sampling import SamplingParams
from specdec.heads.base import LayerConfig
from specdec.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.targets.pretrained import load_pretrained

PROMPT = 128  # tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
COPY_BYTES_PER_MS = 4.24e9  # of an H200, read and written bytes counted
CONFIGS = ((0, 1, 1), (3, 1, 4), (5, 1, 6), (5, 8, 32))  # num_steps, topk, num_draft_tokens

MAX_POSITIONS = 131072  # of every shape, so that long contexts can be timed; costs nothing until it is used

LAWS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}

_TARGETS: dict[str, dict[str, Any]] = {
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
    "tiny": dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
}
_DRAFT_VOCAB = {"135m": 16384, "8b": 32000, "tiny": 48}


@dataclass(frozen=True)
class Case:
    """One way to speculate at one batch size."""

    shape: str
    batch: int
    steps: int = 0
    topk: int = 1
    width: int = 1
    kind: str = "greedy"

    @property
    def law(self) -> SamplingParams:
        """How every request samples."""
        return LAWS[self.kind]

    @property
    def row(self) -> dict[str, Any]:
        """The keys every result row of this case has."""
        return {
            "shape": self.shape,
            "batch": self.batch,
            "steps": self.steps,
            "topk": self.topk,
            "draft_tokens": self.width,
            "tokens": PROMPT,
            "sampling": self.kind,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """For `attach`, beside the modes compared."""
        shared = {"max_seq_len": 2048, "prefill_graph": "off", "graph_sampling": self.kind}
        if not self.steps:
            return dict(shared)
        draft = {"num_steps": self.steps, "topk": self.topk, "num_draft_tokens": self.width}
        return {**shared, **draft, "synthetic_acceptance": acceptance_rates(self.steps)}


def acceptance_rates(steps: int) -> list[float]:
    """Share of rounds in which draft position 1, 2, .. is accepted: what every speed bench imposes."""
    return [0.8 * 0.75**j for j in range(steps)]


def make_target(shape: str, path: str | None) -> Any:
    """The model at `path`, or one of that shape with random weights."""
    if path is not None:
        return load_pretrained(path, dtype=DTYPE, device=DEVICE)[0]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            config = LlamaConfig(**_TARGETS[shape], max_position_embeddings=MAX_POSITIONS, dtype=DTYPE)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    for name, buffer in model.named_buffers():
        assert not name.endswith("inv_freq") or buffer.dtype == torch.float32, "rotary frequencies must stay exact"
    return model.eval()


def make_head(shape: str, model: Any, path: str | None, ids: torch.Tensor | None = None) -> Any:
    """The head at `path`, or one that fits `model` with random weights and drafts tokens of `ids` (default: any)."""
    if path is not None:
        return path
    c = model.config
    heads = (c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads)
    aux = default_aux_layers(c.num_hidden_layers)
    layer = LayerConfig(c.hidden_size, c.intermediate_size, *heads)
    if ids is None:
        ids = torch.arange(c.vocab_size)
    config = Eagle3Config(layer, c.hidden_size, c.vocab_size, min(_DRAFT_VOCAB[shape], len(ids)), aux)
    head = Eagle3Head(config).to(DEVICE, DTYPE)
    head.set_hot_vocab(ids[torch.randperm(len(ids))][: config.draft_vocab_size].to(DEVICE))
    return head.eval().requires_grad_(False)


def target_weights(shape: str) -> int:
    """Parameters of the products of a forward: layers and output head."""
    h, inter, layers, vocab, attention = _sizes(shape)
    return layers * (attention + 3 * h * inter) + vocab * h


def floor_ms(case: Case) -> float:
    """Bytes that must be read, over the copy rate: the target's weights once and the head's once a pass."""
    h, inter, _, _, attention = _sizes(case.shape)
    head = 2 * attention - h * h + 3 * h * inter + _DRAFT_VOCAB[case.shape] * h  # q, k, v see two widths
    passes = case.steps  # S-1 draft forwards and the extend
    return round(2 * (target_weights(case.shape) + passes * head + (3 * h * h if passes else 0)) / COPY_BYTES_PER_MS, 3)


def attention_sizes(shape: str) -> tuple[int, int, int, int]:
    """Layers, heads, KV heads and the width of a head."""
    c = _TARGETS[shape]
    heads = c["num_attention_heads"]
    return c["num_hidden_layers"], heads, c["num_key_value_heads"], c["hidden_size"] // heads


def _sizes(shape: str) -> tuple[int, ...]:
    """hidden and intermediate size, layers, vocabulary, and weights of one attention layer."""
    c = _TARGETS[shape]
    h, inter, layers, vocab = (c[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    head_dim = h // c["num_attention_heads"]
    return h, inter, layers, vocab, 2 * h * h + 2 * h * c["num_key_value_heads"] * head_dim
