"""Requests that advance at their own pace, presented in the lockstep of `transformers`: one column of tokens at a time.

Stopping criteria may look at the whole batch and keep state, so each is called as `GenerationMixin._sample` would: once
per column, on all rows, finished ones padded. A row that is ahead of a criterion is cut.
"""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.core.engine.request import Request


class Lockstep:
    """The columns that `requests` have completed so far.

    input_ids [B, T], int32 or int64; criteria: a StoppingCriteriaList; pad_token fills finished rows; None: they go on
    until all are finished, as in `transformers` without an EOS.
    """

    def __init__(self, input_ids: torch.Tensor, requests: Sequence[Request], criteria: Any, pad_token: int | None):
        self.is_done = [False] * len(requests)
        self._requests = requests
        self._criteria = criteria
        self._pad_token = pad_token
        self._input_ids = input_ids
        self._columns: list[list[int]] = []
        self._seen = input_ids  # [B, T + columns], kept only for criteria

    @property
    def is_over(self) -> bool:
        """True once every row is finished."""
        return all(self.is_done)

    def advance(self) -> list[list[int]]:
        """Take the columns that are complete by now, up to the end; return the new ones, B tokens each."""
        num_before = len(self._columns)
        self._finish_rows()
        while not self.is_over and (column := self._next_column()) is not None:
            self._columns.append(column)
            self._apply_criteria(column)
            self._finish_rows()
        return self._columns[num_before:]

    def sequences(self) -> torch.Tensor:
        """Return prompts and new tokens, [B, T + columns] int64, on the device of the prompts."""
        new = torch.tensor(self._columns, dtype=torch.int64, device="cpu").reshape(-1, len(self.is_done)).T
        return torch.cat([self._input_ids, new.to(self._input_ids.device)], 1)

    def _next_column(self) -> list[int] | None:
        """Return the next token of every row; None while one is missing."""
        at, column = len(self._columns), []
        for request, is_done in zip(self._requests, self.is_done, strict=True):
            if is_done and self._pad_token is not None:
                column.append(self._pad_token)
            elif len(request.tokens) > at:
                column.append(request.tokens[at])
            else:
                return None
        return column

    def _finish_rows(self) -> None:
        """Mark the rows that the engine has ended with the newest column.

        Another thread's step may append a row's last tokens before it marks the row as finished, so rows are checked
        again when the next columns are requested.
        """
        for i, request in enumerate(self._requests):
            if request.finish_reason is not None and len(request.tokens) == len(self._columns):
                self.is_done[i] = True

    def _apply_criteria(self, column: list[int]) -> None:
        """Mark the rows that a criterion ends with the newest column."""
        if not self._criteria:
            return
        newest = torch.tensor(column, device=self._seen.device).unsqueeze(1)
        self._seen = torch.cat([self._seen, newest], 1)
        stops = self._criteria(self._seen, None).tolist()
        self.is_done = [done or stop for done, stop in zip(self.is_done, stops, strict=True)]
