"""A request: one prompt being served, and what is known of its text on the host.

The device decides when a request is finished (EOS, stop ids, length); the host learns it from the copied results, and
adds stop strings, which only text can show.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import TokenLogprob
from specdec.core.sampling_params import SamplingParams
from specdec.core.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from specdec.core.grammar.matcher import Constraint
    from specdec.core.text.embedded import EmbeddedPrompt


@dataclass(eq=False)
class Request:
    """One prompt being served.

    prompt: [T+1] int64, tokens to prefill and the token after them: the prompt's ids and a 0; after a preemption the
    prompt's ids and all emitted tokens.
    adapter: number of its LoRA adapter, 0 for none.
    embedded: its prompt's image embeddings, if any, until it ends.
    priority: higher ones are admitted first; place: its order in the queue, (-priority, number of arrival).
    deadline: seconds after queueing at which it ends with the tokens it has; None: no deadline.
    row: set while it runs; num_prefilled: tokens of `prompt` whose K/V is written; num_cached: prompt tokens that it
    found in the prefix cache.
    is_kept: whether its K/V may serve other requests.
    stops: positions where pieces of its prefill end, to snapshot the states of recurrent layers; state: the snapshot
    that it resumes from, if any.
    num_preempted: times that it was put back in the queue because pages ran out.
    num_behind: upper bound of tokens at the end of its text that the draft has not seen but can; 0 if it sees all.
    num_covered: tokens, beyond its prompt, that its KV slots hold, besides those a round writes past them.
    num_certain: lower bound of the tokens it will have once all launches for it have come back.
    string_ids: stop ids that stand for stop strings (special tokens).
    failure: the error that ended it, with finish_reason "error"; the caller that waits for the request raises it.
    round_lens: tokens that each verify round emitted, after trimming.
    logprobs: one for each of `tokens`; None if the engine does not compute them. digests: the same; empty if not.
    constraint: its grammar's state after `tokens`; None without a grammar.
    on_change: called by `notify`.
    arrived: when it was queued (`Scheduler.add`), seconds; first_token_s and time_s count from there.
    """

    prompt_ids: list[int]
    prompt: np.ndarray
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    detokenizer: Detokenizer
    string_ids: tuple[int, ...] = ()
    priority: int = 0
    adapter: int = 0
    place: tuple[int, int] = (0, 0)
    deadline: float | None = None
    row: int | None = None
    num_prefilled: int = 0
    num_cached: int = 0
    is_kept: bool = True
    stops: set[int] = field(default_factory=set)
    state: int | None = None
    num_behind: int = 0
    num_covered: float = 0
    num_certain: int = 0
    num_preempted: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    failure: BaseException | None = None
    round_lens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    digests: list[int] = field(default_factory=list)
    constraint: "Constraint | None" = None
    embedded: "EmbeddedPrompt | None" = None
    on_change: "Callable[[Request], None] | None" = None
    arrived: float = 0.0
    first_token_s: float | None = None
    time_s: float | None = None
    _num_read: int = 0
    _text: str | None = None

    @property
    def acceptance(self) -> AcceptanceStats:
        """Acceptance of its rounds so far."""
        return AcceptanceStats().add(self.round_lens)

    @property
    def is_running(self) -> bool:
        """True while it holds a row and is not finished."""
        return self.row is not None and self.finish_reason is None

    @property
    def is_prefilled(self) -> bool:
        """True once its whole prompt is in the cache."""
        return self.num_prefilled == self.num_to_prefill

    @property
    def num_to_prefill(self) -> int:
        """Tokens to prefill before its first round, or its next after a preemption."""
        return len(self.prompt) - 1

    @property
    def num_to_stop(self) -> int:
        """Most tokens of the next piece of its prefill."""
        ahead = [stop for stop in self.stops if stop > self.num_prefilled]
        return min(ahead, default=self.num_to_prefill) - self.num_prefilled

    def piece(self, most: int, is_first: bool) -> int:
        """Return the number of tokens of its next prefill piece, up to `most`; see `EmbeddedPrompt.num_whole`."""
        num = min(self.num_to_stop, most)
        return num if self.embedded is None else self.embedded.num_whole(self.num_prefilled, num, is_first)

    def begin(self, row: int, num_cached: int) -> None:
        """Start running in `row`, whose slots hold K/V of the first `num_cached` tokens of `prompt`."""
        self.row, self.num_prefilled, self.num_certain = row, num_cached, len(self.tokens)
        self.num_behind = 0
        if not self.tokens:
            self.num_cached = num_cached

    def restart(self) -> None:
        """Prefill its text so far when it runs again, up to the last token, which no round has read."""
        if self.tokens:
            self.prompt = np.array([*self.prompt_ids, *self.tokens], dtype=np.int64)

    def rewind(self) -> None:
        """Discard tokens in flight: only its text so far counts, whose K/V is written up to the last token."""
        self.restart()
        self.num_prefilled, self.num_certain = self.num_to_prefill, len(self.tokens)

    def take(self, tokens: list[int], logprobs: Sequence[TokenLogprob] = (), digests: Sequence[int] = ()) -> None:
        """Append emitted `tokens` with their `logprobs` and `digests`; set `finish_reason` if they end the request.

        The device has cut them at stop ids and at the length. Text is decoded here only if there are stop strings.
        """
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.arrived
        reason, count = None, len(tokens)
        if tokens[-1] in self.stop_ids:
            reason = self._why_stopped(tokens[-1])
        elif len(self.tokens) + count >= self.max_new_tokens:
            reason = "length"
        if self.detokenizer.stop_strings:
            pieces = [self.detokenizer.feed(tokens)]
            if reason is not None:
                pieces.append(self.detokenizer.finish())
            if self.detokenizer.stopped:
                reason = "stop_string"
                count = self.detokenizer.num_fed - len(self.tokens)  # what comes after it in this round is dropped
        self.digests += digests[:count]
        if self.logprobs is not None:
            self.logprobs += logprobs[:count]
        self.tokens += tokens[:count]  # another thread may read: what belongs to tokens is there before them
        if self.detokenizer.stop_strings:
            self.pieces += pieces
        self.finish_reason = reason  # last: a thread that reads text takes it for complete then

    def notify(self) -> None:
        """Call `on_change`: the request has new tokens, or has ended and holds no row or slots any more."""
        if self.on_change is not None:
            self.on_change(self)

    def read(self) -> str:
        """Return the text that has become certain since the last call; all the rest once the request is finished."""
        is_over = self.finish_reason is not None
        self._catch_up(is_over)
        begin, self._num_read = self._num_read, len(self.pieces)  # first: another thread's step may append pieces
        return "".join(self.pieces[begin : self._num_read])

    def decode(self) -> str:
        """Return the text of a finished request; it is decoded in one go, unless parts were needed before, and kept."""
        if self._text is None and self.pieces:
            self._catch_up(is_over=True)
            self._text = "".join(self.pieces)
        elif self._text is None:
            self._text = self.detokenizer.decode(self.tokens)
        return self._text

    def _catch_up(self, is_over: bool) -> None:
        """Decode the tokens left. With stop strings `take` does that, unless an error ended the request."""
        if self.detokenizer.stop_strings and not is_over:
            return
        tokens = self.tokens[self.detokenizer.num_fed :]
        if tokens:
            self.pieces.append(self.detokenizer.feed(tokens))
        if is_over:
            self.pieces.append(self.detokenizer.finish())

    def _why_stopped(self, token: int) -> str:
        if token in self.eos_ids:
            return "eos"
        return "stop_string" if token in self.string_ids else "stop_id"
