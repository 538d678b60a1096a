"""`specdec bench policy`: reads the options and loads target and draft."""

from typing import Any

import torch

from specdec.core.text.prompts import chat_ids, read_questions
from specdec.reach.targets.pretrained import BUNDLED
from specdec.reach.targets.shape import vocab_size_of
from specdec.tools.commands.bench_speed import Timing
from specdec.tools.commands.choices import (
    Row,
    at_least,
    by_name,
    check_alone,
    draft_of,
    listed,
    name_of_target,
    named_draft,
    numbers,
)
from specdec.tools.measure.latency.cases import Timed, random_prompts, random_subject
from specdec.tools.measure.policy import Grid, Prompts, measure_policy
from specdec.tools.measure.results import ResultFile
from specdec.tools.options import option
from specdec.tools.train.target import device_of, dtype_of, load

TAUS = ("1.2", "2.2", "4.5", "1.2/4.5")
SMALL: dict[str, Any] = {"batches": (1, 4), "contexts": (64,), "new_tokens": 24, "drift": 24}
LARGE: dict[str, Any] = {"batches": (1, 8, 32, 128), "contexts": (256, 2048), "new_tokens": 128, "drift": 128}
EITHER_OR = (("cells", "batches"), ("cells", "contexts"), *(("prompts", n) for n in ("cells", "contexts", "taus")))


class Policy(Timing):
    """Time num_steps="auto" beside plain decoding and every fixed shape, at imposed acceptance.

    A cell is a batch, a context and a tau of the longest chain: 1.2/4.5 drifts from the first to the second and back
    within each text. The table has tokens/s, their ratios to plain decoding (of an engine without a draft) and to the
    best fixed shape, and the share of rounds with each shape. --shape 8b takes some minutes on an H200. With --prompts
    a cell is a batch and a file, and acceptance is the draft's own.
    """

    batches: list[str] | None = option("Batch sizes, such as 1,8,32; default on CUDA 1,8,32,128, else 1,4.")
    contexts: list[str] | None = option("Prompt lengths, such as 256,8192; default on CUDA 256,2048, else 64.")
    cells: list[str] | None = option("BATCHxCONTEXT, such as 256x256,8x16384, instead of every batch at every context.")
    prompts: list[str] | None = option("JSON lines with turns, question or prompt; only first turns are used.")
    taus: list[str] | None = option(f"Imposed acceptance length; default {','.join(TAUS)}.")
    new_tokens: int | None = option("New tokens per request; default on CUDA 128, else 24; at batch 1 four times that.")
    drift: int | None = option("Tokens between changes of tau in a text; default on CUDA 128, else 24.")
    repeats: int = option("Runs per way and cell.", 1)
    topk: int = option("Branches per step of a tree to compare with the chains; 1: none.", 1)
    draft_tokens: int | None = option("Nodes of that tree.")

    def run(self) -> None:
        device = device_of(self.device)
        usual = LARGE if device.startswith("cuda") else SMALL
        for one, other in EITHER_OR:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"--{one} with --{other}: both define the cells; drop one")
        if self.topk == 1 and self.draft_tokens is not None:
            raise ValueError(f"--draft-tokens {self.draft_tokens} with --topk 1: only trees use it; give --topk, too")
        batches = numbers("batches", self.batches, 1) or usual["batches"]
        contexts = numbers("contexts", self.contexts, 2) or usual["contexts"]
        files = by_name(listed(self.prompts), "stem")
        all_cells = [(batch, context) for context in files or contexts for batch in batches]
        grid = Grid(
            tuple(map(_cell, listed(self.cells))) or tuple(all_cells),
            ((),) if files else tuple(_taus(text) for text in (listed(self.taus) or TAUS)),
            at_least("new-tokens", usual["new_tokens"] if self.new_tokens is None else self.new_tokens, 8),
            at_least("drift", usual["drift"] if self.drift is None else self.drift, 4),
            at_least("repeats", self.repeats),
        )
        questions = {name: read_questions(file) for name, file in files.items()}
        subject, tokenizer = self._subject(device)
        prompts: Prompts = {name: chat_ids(own, tokenizer) for name, own in questions.items()}
        cells = [f"{batch}x{context}" for batch, context in grid.cells]
        config = self.config(False, subject.model, cells=cells, taus=grid.taus, new_tokens=grid.new_tokens)
        config |= {"repeats": grid.repeats, "acceptance": "the draft's own" if files else "imposed"}
        file = ResultFile(self.out, "policy", subject.shape, config)
        tree = {} if self.topk == 1 else {"topk": self.topk, "num_draft_tokens": self.draft_tokens}
        rows = measure_policy(subject, grid, prompts or None, **tree)
        self.finish({"rows": self.record(file, rows, _line)}, file.name)

    def _subject(self, device: str) -> tuple[Timed, Any]:
        """Return the target and draft to measure, and the target's tokenizer."""
        if self.shape is not None:
            check_alone(self.shape, target=self.target, draft=self.draft, prompts=self.prompts)
            return random_subject(self.shape, device, dtype_of(self.dtype, device), None), None
        source, algo = draft_of(named_draft(self.draft, self.target))
        if algo is None:
            raise ValueError("--draft none: the policy needs a draft; name one")
        model, tokenizer = load(self.target or BUNDLED, self.dtype, device)
        ids = torch.arange(vocab_size_of(model))
        return Timed(name_of_target(self.target or BUNDLED), model, source, algo, random_prompts(ids)), tokenizer


def _cell(text: str) -> tuple[int, int]:
    """Return batch and context of "256x2048"."""
    batch, _, context = text.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) > 0 and int(context) > 1):
        raise ValueError(f"--cells {text!r}: expected BATCHxCONTEXT such as 8x16384, of at least 1 and 2")
    return int(batch), int(context)


def _taus(text: str) -> tuple[float, ...]:
    """Return the numbers of "2" or "1.2/4.5"."""
    try:
        found = tuple(float(part) for part in text.split("/"))
    except ValueError:
        found = ()
    if not found or not all(1 <= tau < 6 for tau in found):
        raise ValueError(f"--taus {text!r}: expected a tau from 1 to below 6, or several with / between them")
    return found


def _line(row: Row) -> str:
    if row["what"] == "policy_summary":
        return f"least: {row['least_of_plain']} of plain, {row['least_of_best']} of the best; {row['mean_of_each']}"
    where = f"{row['batch']} x {row['prompts']}" if "prompts" in row else f"{row['batch']} x {row['context']} tokens"
    where += f", tau {row['accepts']}"
    return f"{where}: {row['tokens_per_s']} tokens/s, {row['of_plain']} of plain, {row['of_best']} of {row['best']}"
