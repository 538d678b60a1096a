"""The training recipe as frozen data, and the recipe each algorithm starts from."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.core.ranges import FLAG, Range, check_fields, optional, real, whole
from specdec.reach.heads.format import Training
from specdec.reach.heads.formats import formats

LIMITS = ("epochs", "max_steps", "max_tokens", "minutes")
# Fields that may differ between a checkpoint's run and the one that resumes it: limits, logging and computation.
FREE = frozenset({*LIMITS, "log_every", "eval_every", "save_every", "chunk_rows", "compile"})


def _positive(value: Any) -> float:
    number: float = real(0, math.inf).read(value)
    if not 0 < number < math.inf:
        raise ValueError
    return number


POSITIVE = Range("a finite number above 0", _positive)
SHARE = real(0, 0.999)
WEIGHT = real(0, 1e6)
RANGES = MappingProxyType(
    {
        **dict.fromkeys(("num_steps", "tokens_per_batch", "max_len", "chunk_rows"), whole(1)),
        **dict.fromkeys(("log_every", "eval_every", "save_every"), whole(1)),
        **dict.fromkeys(("epochs", "max_steps", "max_tokens"), optional(whole(1), " for no limit")),
        "minutes": optional(POSITIVE, " for no limit"),
        **dict.fromkeys(("lr", "clip", "step_decay"), POSITIVE),
        **dict.fromkeys(("soft_weight", "feature_weight", "lk_weight", "prompt_weight"), WEIGHT),
        **dict.fromkeys(("feature_noise", "weight_decay"), WEIGHT),
        "warmup": SHARE,
        **dict.fromkeys(("normalise_steps", "train_lm_head"), FLAG),
        "compile": optional(FLAG, " for on CUDA only"),
        "seed": whole(0),
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe. A run ends at the first of epochs, max_steps, max_tokens and minutes; give at least one.

    num_steps: draft steps unrolled (TTT). step_decay: weight of step j is step_decay**j; normalise_steps: divided by
    the sum of all. soft_weight: of the soft cross-entropy; feature_weight: of SmoothL1 to the target's last hidden
    state (EAGLE-1/2); lk_weight: of -log acceptance. feature_noise: half the width of uniform noise on the features a
    head reads (EAGLE-1 used 0.1 at 512 tokens). prompt_weight: of a prompt row relative to an answer row (standalone).
    tokens_per_batch: padded tokens. max_len: longer sequences are cut. max_tokens: tokens seen in training, without
    padding. warmup: share of the run. clip: gradient norm. chunk_rows: rows whose logits are in memory at a time.
    compile: fuse the losses' elementwise math into kernels; None: on CUDA. *_every: in steps; logging costs a sync.
    """

    num_steps: int = 5
    step_decay: float = 0.8
    normalise_steps: bool = False
    soft_weight: float = 1.0
    feature_weight: float = 0.0
    lk_weight: float = 0.0
    feature_noise: float = 0.0
    prompt_weight: float = 0.0
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.015
    clip: float = 0.5
    tokens_per_batch: int = 32768
    max_len: int = 2048
    epochs: int | None = None
    max_steps: int | None = None
    max_tokens: int | None = None
    minutes: float | None = None
    chunk_rows: int = 4096
    compile: bool | None = None
    train_lm_head: bool = False
    log_every: int = 20
    eval_every: int = 500
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, RANGES)
        limits = {name: getattr(self, name) for name in LIMITS}
        if not any(limits.values()):
            raise ValueError(f"{limits}: expected one at least that ends the run; pass minutes=10, say")
        if not self.soft_weight + self.feature_weight:
            raise ValueError("soft_weight=0, feature_weight=0: expected one of them above 0")

    @property
    def step_weights(self) -> list[float]:
        """Weight of each step's loss."""
        weights = [self.step_decay**j for j in range(self.num_steps)]
        total = sum(weights) if self.normalise_steps else 1.0
        return [w / total for w in weights]

    @property
    def words(self) -> str:
        """Summary of the recipe in one line, for the card."""
        unit = " normalised" if self.normalise_steps else ""
        losses = {
            "soft cross-entropy": self.soft_weight,
            "SmoothL1 to features": self.feature_weight,
            "LK": self.soft_weight * self.lk_weight,
            "prompts": self.prompt_weight,
        }
        parts = [name if weight == 1 else f"{weight:g} {name}" for name, weight in losses.items() if weight]
        return (
            f"{self.num_steps} steps weighted {self.step_decay:g}^j{unit}, {' + '.join(parts)}, AdamW lr {self.lr:g} "
            f"cosine, warm-up {self.warmup:.1%}, clip {self.clip:g}, {self.tokens_per_batch} tokens a batch"
        )


STANDALONE = Training(
    MappingProxyType({"warmup": 0.03, "clip": 1.0}),
    frozenset({"intermediate_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"})
    | {"file_format", "embed_type"},
    "Standalone draft model",
    "A small Llama, for targets with the same tokenizer.",
)


@dataclass(frozen=True)
class HeadShape:
    """Shape of a fresh student; None: the algorithm's default.

    init: a trained draft to continue from, a folder or Hub id; of the rest only file_format and embed_type go with it.
    intermediate_size: of the MLP. eagle3: draft_vocab_size, and three aux_layers. nextn: copy_layer starts its layer as
    the target's last one with full attention. standalone: hidden_size, num_layers, num_heads, num_kv_heads, whose
    defaults take about 7 MB for a vocabulary of 49152; file_format "gguf", with the embedding as embed_type, or
    "safetensors".
    """

    init: str | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int = 8192
    aux_layers: tuple[int, ...] | None = None
    copy_layer: bool = False
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 3
    num_kv_heads: int = 1
    file_format: str = "gguf"
    embed_type: str = "Q4_0"


def training_of(algo: str) -> Training:
    """Return training defaults and card texts of `algo`; ValueError names what can be trained."""
    known = {row.algo: row.training for row in formats().values()} | {"standalone": STANDALONE}
    if algo not in known:
        raise ValueError(f"algo={algo!r}: expected one of {sorted(known)}")
    return known[algo]


def recipe(algo: str, **changes: Any) -> TrainConfig:
    """Return `algo`'s recipe with `changes`; a change of None keeps the default."""
    given = {name: value for name, value in changes.items() if value is not None}
    return TrainConfig(**{**training_of(algo).recipe, **given})
