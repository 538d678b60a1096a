"""Device state of running requests, by row."""

from dataclasses import dataclass
from functools import cached_property

import torch

from specdec.core.functional.processors import ProcessorState
from specdec.core.functional.sampling import SamplingBatch
from specdec.core.sampling_params import SamplingParams

MAX_STOP_IDS = 16


@dataclass(frozen=True)
class EngineState:
    """Per-row device state, all [num_rows] unless said; the round reads and writes it, admission fills it.

    The last row is the dummy row: its request is permanently finished, it owns slot 0 only, and padding of captured
    batches points to it.
    seq_lens: L; roots: the token at L; remaining: tokens the request may still emit, 0 once it is over; adapters: the
    number of its LoRA adapter, 0 for none;
    stop_ids [num_rows, MAX_STOP_IDS], -1 padded; history [num_rows, width] int32: tokens by position up to the root;
    the prompt's are written where somebody reads them (processors, a worker that `reads_history`), and what lies past
    the root is left over; sampling: parameters by row; processors: penalties and bans by row.
    logprobs [num_rows, S+1, 1 + 2*num_top] float32: of the tokens emitted last, see `token_logprobs`; None if they are
    not computed. digests [num_rows, S+1] int64: of the logits that those were chosen from, see `row_digests`, or None.
    """

    seq_lens: torch.Tensor
    roots: torch.Tensor
    remaining: torch.Tensor
    adapters: torch.Tensor
    stop_ids: torch.Tensor
    history: torch.Tensor
    sampling: SamplingBatch
    processors: ProcessorState
    logprobs: torch.Tensor | None = None
    digests: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        num_rows: int,
        width: int,
        device: torch.device,
        logprobs: tuple[int, int] | None = None,
        digests: int | None = None,
    ) -> "EngineState":
        """All rows idle. width: positions of a request; logprobs: S+1 and num_top, digests: S+1, if computed."""

        def zeros() -> torch.Tensor:
            return torch.zeros(num_rows, dtype=torch.int64, device=device)

        stop_ids = torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        sampling = SamplingBatch.stack([SamplingParams()] * num_rows, device)
        history = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        processors = ProcessorState.empty(history)
        scores = None
        if logprobs is not None:
            scores = torch.zeros(num_rows, logprobs[0], 1 + 2 * logprobs[1], dtype=torch.float32, device=device)
        checksums = None if digests is None else torch.zeros(num_rows, digests, dtype=torch.int64, device=device)
        return cls(zeros(), zeros(), zeros(), zeros(), stop_ids, history, sampling, processors, scores, checksums)

    @cached_property
    def columns(self) -> list[torch.Tensor]:
        """Columns that admission writes, in the order of packing: [num_rows, ...] int64."""
        return [self.seq_lens, self.remaining, self.adapters, self.stop_ids, self.sampling.bits.T]

    @cached_property
    def num_admitted(self) -> int:
        """Numbers that a row has in `columns`."""
        return sum(column[0].numel() for column in self.columns)
