"""`specdec bench policy`: read the options and load what is measured."""

import torch

from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.bench_speed import Timing
from specdec.tools.commands.choices import (
    Row,
    at_least,
    check_alone,
    draft_of,
    listed,
    name_of_target,
    named_draft,
    numbers,
)
from specdec.tools.measure.latency.cases import Timed, random_prompts, random_subject
from specdec.tools.measure.policy import Grid, measure_policy
from specdec.tools.measure.results import ResultFile
from specdec.tools.options import option
from specdec.tools.train.target import device_of, dtype_of, load

TAUS = ("1.2", "2.2", "4.5", "1.2/4.5")
SMALL = Grid((1, 4), (64,), (), 24, drift=24)
LARGE = Grid((1, 8, 32, 128), (256, 2048), (), 128, drift=128)


class Policy(Timing):
    """Time num_steps="auto" beside plain decoding and every fixed shape, at imposed acceptance.

    A cell is a batch, a context and a tau that the longest chain has: 1.2/4.5 drifts from the first to the second and
    back within each text. Shown are tokens/s, their ratios to plain decoding (of an engine without a draft) and to the
    best fixed shape, and the share of rounds that each shape had. --shape 8b takes some minutes on an H200.
    """

    batches: list[str] | None = option("Prompts at once, such as 1,8,32; default on CUDA 1,8,32,128, else 1,4.")
    contexts: list[str] | None = option("Prompt lengths, such as 256,8192; default on CUDA 256,2048, else 64.")
    taus: list[str] | None = option(f"Acceptance; default {','.join(TAUS)}.")
    new_tokens: int | None = option("Tokens of a request in a run; default on CUDA 128, else 24; of one alone 4 times.")
    drift: int | None = option("Tokens of a text between changes of tau; default on CUDA 128, else 24.")
    repeats: int = option("Runs of each way in each cell.", 1)
    topk: int = option("Branches per step of a tree beside the chains; 1 for none.", 1)
    draft_tokens: int | None = option("Nodes of that tree.")

    def run(self) -> None:
        device = device_of(self.device)
        usual = LARGE if device.startswith("cuda") else SMALL
        grid = Grid(
            numbers("batches", self.batches, 1) or usual.batches,
            numbers("contexts", self.contexts, 2) or usual.contexts,
            tuple(_taus(text) for text in (listed(self.taus) or TAUS)),
            at_least("new-tokens", self.new_tokens or usual.new_tokens, 8),
            at_least("drift", self.drift or usual.drift, 4),
            at_least("repeats", self.repeats),
        )
        subject = self._subject(device)
        config = self.config(False, subject.model, batches=grid.batches, contexts=grid.contexts, taus=self.taus or TAUS)
        config |= {"new_tokens": grid.new_tokens, "acceptance": "imposed"}
        file = ResultFile(self.out, "policy", subject.shape, config)
        tree = {} if self.topk == 1 else {"topk": self.topk, "num_draft_tokens": self.draft_tokens}
        self.finish({"rows": self.record(file, measure_policy(subject, grid, **tree), _line)}, file.name)

    def _subject(self, device: str) -> Timed:
        if self.shape is not None:
            check_alone(self.shape, target=self.target, draft=self.draft)
            return random_subject(self.shape, device, dtype_of(self.dtype, device), None)
        source, algo = draft_of(named_draft(self.draft, self.target))
        if algo is None:
            raise ValueError("--draft none: there is no draft to choose about; name one")
        model, _ = load(self.target or BUNDLED, self.dtype, device)
        ids = torch.arange(model.get_output_embeddings().weight.shape[0])
        return Timed(name_of_target(self.target or BUNDLED), model, source, algo, random_prompts(ids))


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
    """Say a row in short."""
    if row["what"] == "policy_summary":
        return f"least: {row['least_of_plain']} of plain, {row['least_of_best']} of the best; {row['mean_of_each']}"
    where = f"{row['batch']} x {row['context']} tokens, tau {row['accepts']}"
    return f"{where}: {row['tokens_per_s']} tokens/s, {row['of_plain']} of plain, {row['of_best']} of {row['best']}"
