"""The training recipe as frozen data, and the default recipe of each algorithm."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.core.ranges import FLAG, Range, check_fields, optional, real, whole
from specdec.reach.heads.format import Training
from specdec.reach.heads.formats import formats
from specdec.tools.options import option, ranges_of

LIMITS = ("epochs", "max_steps", "max_tokens", "minutes")
# Fields that may differ between a checkpoint's run and the one that resumes it: limits, logging and computation.
FREE = frozenset({*LIMITS, "log_every", "eval_every", "save_every", "chunk_rows", "compile"})


def _positive(value: Any) -> float:
    number: float = real(0, math.inf).read(value)
    if not 0 < number < math.inf:
        raise ValueError
    return number


POSITIVE = Range("a finite number above 0", _positive)
WEIGHT = real(0, 1e6)
NUMBER, NUMBER_OR_NONE = whole(1), optional(whole(1), " for no limit")
SIZE = optional(whole(1), " for the default")
MINUTES = optional(POSITIVE, " for no limit")


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe. A run ends at the first of epochs, max_steps, max_tokens and minutes; give at least one.

    soft_weight: of the soft cross-entropy to the target's distribution; feature_weight: of SmoothL1 to its last hidden
    state. feature_noise: half width of uniform noise on the features that a head reads (EAGLE-1 used 0.1 at 512
    tokens). compile: fuse the losses' elementwise math into kernels. *_every: in steps; logging costs a sync.
    ValueError names the field, its value and what was expected.
    """

    epochs: int | None = option("Passes over the corpora.", allowed=NUMBER_OR_NONE)
    max_steps: int | None = option("Optimizer steps.", allowed=NUMBER_OR_NONE)
    max_tokens: int | None = option("Tokens seen in training, without padding.", allowed=NUMBER_OR_NONE)
    minutes: float | None = option("Time limit for training, in minutes; the schedule adapts to it.", allowed=MINUTES)
    num_steps: int = option("Draft steps unrolled (TTT).", 5, allowed=NUMBER)
    step_decay: float = option("The weight of draft step j is this to the power j.", 0.8, allowed=POSITIVE)
    survival: bool = option(
        "Weight draft step j by how often chains of the batch reach and pass it (D-PACE), not by --step-decay.",
        False,
        "--survival/--no-survival",
        allowed=FLAG,
    )
    normalise_steps: bool = option("Divide the step weights by their sum.", False, allowed=FLAG)
    soft_weight: float = option("Weight of the soft cross-entropy loss.", 1.0, allowed=WEIGHT)
    feature_weight: float = option("eagle: weight of the SmoothL1 loss to the target's states.", 0.0, allowed=WEIGHT)
    lk_weight: float = option("Weight of the -log(acceptance) loss.", 0.0, allowed=WEIGHT)
    feature_noise: float = option("Half the width of uniform noise on features.", 0.0, allowed=WEIGHT)
    prompt_weight: float = option(
        "standalone: loss weight of prompt tokens, relative to the answer's.", 0.0, allowed=WEIGHT
    )
    lr: float = option("Peak learning rate.", 2e-3, allowed=POSITIVE)
    weight_decay: float = option("Weight decay of matrices (AdamW).", 0.01, allowed=WEIGHT)
    warmup: float = option("Share of the run that warms up.", 0.015, allowed=real(0, 0.999))
    clip: float = option("Maximum gradient norm.", 0.5, allowed=POSITIVE)
    tokens_per_batch: int = option("Tokens per batch, padding included.", 32768, allowed=NUMBER)
    max_len: int = option("Maximum sequence length; longer ones are cut.", 2048, allowed=NUMBER)
    chunk_rows: int = option("Rows of logits in memory at a time.", 4096, allowed=NUMBER)
    compile: bool | None = option(
        "Compile the losses; default: on CUDA.",
        None,
        "--compile/--no-compile",
        allowed=optional(FLAG, " for on CUDA only"),
    )
    train_lm_head: bool = option("Train the draft's own output head, too.", False, allowed=FLAG)
    log_every: int = option("Steps between log lines.", 20, allowed=NUMBER)
    eval_every: int = option("Steps between evaluations.", 500, allowed=NUMBER)
    save_every: int = option("Steps between checkpoints.", 500, allowed=NUMBER)
    seed: int = option("Seed of data order, noise and new weights.", 0, allowed=whole(0))

    def __post_init__(self) -> None:
        check_fields(self, ranges_of(type(self)))
        limits = {name: getattr(self, name) for name in LIMITS}
        if not any(limits.values()):
            raise ValueError(f"{limits}: expected at least one, to end the run; pass minutes=10, say")
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
        weighted = "by survival" if self.survival else f"{self.step_decay:g}^j{unit}"
        losses = {
            "soft cross-entropy": self.soft_weight,
            "SmoothL1 to features": self.feature_weight,
            "LK": self.soft_weight * self.lk_weight,
            "prompts": self.prompt_weight,
        }
        parts = [name if weight == 1 else f"{weight:g} {name}" for name, weight in losses.items() if weight]
        return (
            f"{self.num_steps} steps weighted {weighted}, {' + '.join(parts)}, AdamW lr {self.lr:g} "
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
    """Shape of a draft to train; None: the algorithm's default.

    init: a trained draft to continue from, a folder or Hub id; of the other fields it allows only file_format,
    embed_type and, for an eagle3 head whose lm_head is rows of the target's, draft_vocab_size.
    intermediate_size: of the MLP. num_layers: decoder layers; in an EAGLE-3 head the first reads [embedding, feature]
    and the others are plain. eagle3, block: draft_vocab_size and aux_layers (three for eagle3). nextn: copy_layer
    starts its layer as the target's last one with full attention. standalone: hidden_size, num_heads, num_kv_heads,
    about 7 MB by default for a vocabulary of 49152; file_format "gguf", with the embedding stored as embed_type, or
    "safetensors".
    """

    init: str | None = option("A trained draft to continue from: a folder or Hub id.")
    intermediate_size: int | None = option("Width of the draft's MLP.", allowed=SIZE)
    num_layers: int | None = option("eagle3, block, standalone: decoder layers; default: 1, 2, 4.", allowed=SIZE)
    draft_vocab_size: int | None = option("eagle3, block: draft vocabulary size; default: 8192.", allowed=SIZE)
    aux_layers: tuple[int, ...] | None = None
    copy_layer: bool = option("nextn: start from a copy of the target's last layer, not at random.", False)
    hidden_size: int = option("standalone: hidden size.", 192, allowed=NUMBER)
    num_heads: int = option("standalone: query heads.", 3, allowed=NUMBER)
    num_kv_heads: int = option("standalone: key/value heads.", 1, allowed=NUMBER)
    file_format: str = option("standalone: file format, gguf or safetensors.", "gguf")
    embed_type: str = option("standalone: GGUF type of the embedding: Q4_0, Q5_0 or Q8_0.", "Q4_0")

    def __post_init__(self) -> None:
        check_fields(self, ranges_of(type(self)))


def training_of(algo: str) -> Training:
    """Return training defaults and card texts of `algo`; ValueError lists the algorithms that can be trained."""
    known = {row.algo: row.training for row in formats().values()} | {"standalone": STANDALONE}
    if algo not in known:
        raise ValueError(f"algo={algo!r}: expected one of {sorted(known)}")
    return known[algo]


def recipe(algo: str, **changes: Any) -> TrainConfig:
    """Return the TrainConfig of `algo` with `changes` to its fields; None keeps a default. ValueError as for both, and
    for step weights together with survival, which sets the weights itself."""
    given = {name: value for name, value in changes.items() if value is not None}
    config = TrainConfig(**{**training_of(algo).recipe, **given})
    if config.survival and (unread := [name for name in ("step_decay", "normalise_steps") if given.get(name)]):
        raise ValueError(
            f"{', '.join(unread)}: survival already weights the steps of {algo!r}; leave it out, or pass "
            "survival=False (--no-survival)"
        )
    return config
