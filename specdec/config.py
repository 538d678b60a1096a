"""Engine settings: frozen, validated once, derived with `dataclasses.replace`. Knows nothing about models."""

from dataclasses import dataclass

MAX_TAIL = 64  # nodes a 64-bit ancestor mask can name


@dataclass(frozen=True)
class EngineConfig:
    """How an engine drafts and how much it can hold.

    num_steps S: draft depth, tokens on the longest drafted path (0 without a draft).
    topk K: branches kept a step; 1 drafts a chain.
    num_draft_tokens D: nodes verified a request and round, root included; a chain has S+1.
    max_batch: requests decoded together; more wait their turn.
    max_seq_len: longest prompt plus output of one request, in tokens.
    num_slots: KV slots (tokens) of the pool; None holds `max_batch` requests of `max_seq_len`.
    page_size: KV slots handed out together.
    max_prefill_tokens: prompt tokens of one prefill forward; longer prompts are prefilled in chunks.
    backend: attention backend, "auto" or a name in `specdec.backends`.
    """

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    max_batch: int = 8
    max_seq_len: int = 2048
    num_slots: int | None = None
    page_size: int = 1
    max_prefill_tokens: int = 8192
    backend: str = "auto"

    def __post_init__(self) -> None:
        _at_least("max_batch", self.max_batch, 1)
        _at_least("max_seq_len", self.max_seq_len, 2)
        _at_least("page_size", self.page_size, 1)
        _at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        _at_least("num_steps", self.num_steps, 0)
        _at_least("topk", self.topk, 1)
        if self.num_steps + 1 > MAX_TAIL:
            raise ValueError(f"num_steps={self.num_steps}: at most {MAX_TAIL - 1} (a tail holds {MAX_TAIL} nodes)")
        if self.num_steps == 0 and self.topk > 1:
            raise ValueError(f"topk={self.topk} with num_steps=0: a tree needs at least one draft step")
        if self.topk * max(self.num_steps - 1, 1) > MAX_TAIL:
            raise ValueError(
                f"topk={self.topk}, num_steps={self.num_steps}: topk*(num_steps-1) draft nodes exceed {MAX_TAIL}; "
                "lower one of them"
            )
        if self.num_draft_tokens is None:
            default = self.num_steps + 1 if self.topk == 1 else min(self.num_candidates + 1, 32)
            object.__setattr__(self, "num_draft_tokens", default)
        self._check_draft_tokens()
        if self.num_slots is not None:
            _at_least("num_slots", self.num_slots, self.page_size)

    def _check_draft_tokens(self) -> None:
        d = self.verify_width
        if self.topk == 1:
            if d != self.num_steps + 1:
                raise ValueError(
                    f"num_draft_tokens={d} with topk=1: a chain verifies num_steps+1={self.num_steps + 1} nodes; "
                    "leave num_draft_tokens out, or set topk > 1 for a tree"
                )
            return
        most = min(MAX_TAIL, self.num_candidates + 1)
        if not 2 <= d <= most:
            raise ValueError(
                f"num_draft_tokens={d}: expected 2..{most} for topk={self.topk}, num_steps={self.num_steps} "
                f"({self.num_candidates} candidates and the root, {MAX_TAIL} nodes at most)"
            )

    @property
    def num_candidates(self) -> int:
        """Nodes the draft proposes before the re-rank: K + (S-1)·K²; a chain has S."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def verify_width(self) -> int:
        """D: nodes verified a request and round, root included."""
        assert self.num_draft_tokens is not None
        return self.num_draft_tokens

    @property
    def tail_reserve(self) -> int:
        """Slots a round may write past L: max(K·(S-1), D, S+1)."""
        return max(self.topk * (self.num_steps - 1), self.verify_width, self.num_steps + 1)

    @property
    def pool_slots(self) -> int:
        """KV slots of the pool, the dummy page not counted."""
        if self.num_slots is not None:
            return self.num_slots
        per_request = self.max_seq_len + 2 * self.tail_reserve + self.page_size
        return self.max_batch * per_request


def _at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {low}")
