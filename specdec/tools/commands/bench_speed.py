"""`specdec bench latency` and `specdec bench peers`: read the options and load target and draft."""

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
import typer
from transformers.utils import logging

from specdec import __version__, shipped
from specdec.core.text.prompts import chat_ids, read_questions
from specdec.reach.heads.load import detect_algo
from specdec.reach.targets.pretrained import BUNDLED, load_draft
from specdec.reach.targets.shape import vocab_size_of
from specdec.tools.commands.choices import (
    OnTarget,
    Recorded,
    Row,
    at_least,
    check_alone,
    draft_of,
    listed,
    named_draft,
    numbers,
)
from specdec.tools.commands.demo import PROMPTS
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.latency.cases import (
    Plan,
    Prompts,
    Timed,
    given_prompts,
    random_prompts,
    random_subject,
    read_tokenizer,
)
from specdec.tools.measure.latency.run import Run
from specdec.tools.measure.latency.timing import device_of_rank, host_probe_ms, is_first, num_ranks
from specdec.tools.measure.peers import Task, measure, ways
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.shapes import IMPOSED, block_layers, check_shape, make_head, make_target
from specdec.tools.options import flag, option
from specdec.tools.train.target import device_of, dtype_of, load

ALGOS = ("eagle3", "nextn", "block")


class Timing(OnTarget, Recorded):
    """Options of both: a real target with its draft, or a named shape."""

    target: str | None = option(  # type: ignore[assignment]
        "Hub id, folder, .gguf file or 'bundled', the default; its acceptance is real."
    )
    draft: str | None = option("Draft: folder, Hub id, shipped name, 'lookup', 'none'; default: shipped.")
    shape: str | None = option(
        "Instead of a target, random weights of a named shape such as 8b; acceptance is imposed."
    )

    def config(self, is_random: bool, model: Any, **given: Any) -> dict[str, Any]:
        """Return the description of a run for a result file."""
        warnings.filterwarnings("ignore", message="synthetic_acceptance is on")
        shown = {name: None if value is None else str(value) for name, value in given.items()}
        config = {"version": __version__, "target": self.target, "draft": self.draft, **shown}
        return {**config, "dtype": str(model.dtype), **({"acceptance": IMPOSED} if is_random else {})}


class Latency(Timing):
    """Measure time to first token, per token and per round through `engine.generate`, engine by engine.

    Under torchrun, the ranks share the target, a --shape. By default it runs a small grid of the bundled target with
    its draft, a minute or two on a CPU. Lists are separated by commas or given by repeating the option. Exit status 1
    if an engine failed.
    """

    algo: str = option(
        "Draft of a --shape: eagle3; nextn, a layer of the target's own kind; block or block:N, of 2 or N layers.",
        ALGOS[0],
    )
    prompts: Path | None = option("JSON lines of prompts; default: random token ids.")
    limit: int | None = option("Prompts to read from the file.", min=1)
    label: str = option("Label of the rows, such as before or after.", "now")
    batches: list[str] | None = option("Batch sizes, such as 1,8,32.")
    tokens: list[str] | None = option("Prompt lengths, such as 128,8192.")
    ttft_tokens: list[str] | None = option("Prompt lengths to time only the first token of, at batch 1; '' for none.")
    modes: list[str] | None = option(
        "Engine modes: compiled, fp8-draft (compiled, draft_weights='fp8'), prefix-cache (compiled, "
        "prefix_cache=True), graph, or an attention backend: torch, triton, flashinfer, triton+flashinfer."
    )
    drafts: list[str] | None = option(
        "Draft shapes: plain, or S:K:D such as 3:1:4, or S:K:D@N to draft from N tokens only."
    )
    tokenizer: str | None = option(
        "Add rows that include detokenizing: 'bundled', a folder, or 'own' for a --target's."
    )
    samplings: list[str] | None = option("Kinds of sampling: greedy, sampled, filtered. [default: greedy]")
    new_tokens: int | None = option("New tokens per call that measures the time per token.")
    repeats: int | None = option("Calls that measure the time to first token.")
    hf: bool = flag("Also time transformers' own generate on the same model, before, at batch 1.")
    budget: float = option("Seconds after which no measurement starts.", 1e9)

    def run(self) -> None:
        where, ranks = device_of_rank(device_of(self.device)), num_ranks()
        options = {name: getattr(self, name) for name in ("label", "budget", "new_tokens", "repeats")}
        for name in ("batches", "tokens", "ttft_tokens"):
            options[name] = numbers(name.replace("_", "-"), getattr(self, name))
        options |= {name: tuple(listed(getattr(self, name))) or None for name in ("modes", "drafts", "samplings")}
        plan = Plan.of(self._grid(where), **options)
        longest = None
        if self.prompts is not None and (listed(self.tokens) or listed(self.ttft_tokens)):
            raise ValueError("--tokens or --ttft-tokens with --prompts: prompts have lengths of their own; drop one")
        if self.shape is not None:
            check_alone(self.shape, target=self.target, draft=self.draft, prompts=self.prompts)
            if self.algo not in ALGOS and not block_layers(self.algo):
                raise ValueError(f"--algo {self.algo!r}: expected one of {', '.join(ALGOS)}")
            text = read_tokenizer(self.tokenizer)
            subject = random_subject(self.shape, where, dtype_of(self.dtype, where), text, ranks, self.algo)
        elif self.algo != ALGOS[0]:
            raise ValueError(f"--algo {self.algo!r}: only a --shape takes it; name one, or the draft as --draft")
        elif ranks > 1:
            raise ValueError(f"{ranks} ranks: only a --shape can be sharded; name one, or leave torchrun out")
        else:
            subject, longest = self._real_subject(where)
        if longest is not None:
            plan = replace(plan, tokens=(longest,), ttft_tokens=())
        if subject.algo is None:
            if self.drafts is not None and set(plan.drafts) != {"plain"}:
                raise ValueError(f"--drafts {','.join(plan.drafts)}: there is no draft; expected plain, or a --draft")
            plan = replace(plan, drafts=("plain",))
        self._measure(subject, plan)

    def _grid(self, device: str) -> str:
        if self.shape is None:
            return "small" if device.startswith("cuda") else "quick"
        return "tiny" if check_shape(self.shape).startswith("tiny") else "small"

    def _real_subject(self, device: str) -> tuple[Timed, int | None]:
        """Load target and draft. Prompts: chat questions, of which the longest's length is returned, or random ids."""
        questions = None if self.prompts is None else read_questions(self.prompts, self.limit)
        source, algo = draft_of(named_draft(self.draft, self.target))
        model, own = load(self.target or BUNDLED, self.dtype, device)
        prompts: Prompts = random_prompts(torch.arange(vocab_size_of(model)))
        longest = None
        if questions is not None:
            ids = chat_ids(questions, own)
            prompts, longest = given_prompts(ids), max(map(len, ids))
        text = own if self.tokenizer == "own" else read_tokenizer(self.tokenizer)
        return Timed(Path(self.target or BUNDLED).name.lower(), model, source, algo, prompts, text), longest

    def _measure(self, subject: Timed, plan: Plan) -> None:
        """Measure, write every row, print the table; of several ranks, only the first writes and prints."""
        run = Run(subject, plan)
        measured = run.rows(self.hf)
        config = self.config(subject.is_random, subject.model, prompts=self.prompts, tokenizer=self.tokenizer)
        config |= {"label": plan.label, "host_probe_ms": host_probe_ms(), "new_tokens": plan.new_tokens}
        config |= {"skipped": run.skipped, "failed": run.failed}  # lists that grow
        if is_first():
            file = ResultFile(self.out, f"latency-{plan.label}", subject.shape, config)
            rows = self.record(file, measured, _line)
            for line in [IMPOSED] * subject.is_random + [f"skipped: {case}" for case in run.skipped]:
                print(line)
            self.finish({"skipped": run.skipped, "rows": rows}, file.name)
        else:
            deque(measured, 0)
        if run.failed:
            raise typer.Exit(1)


class Peers(Timing):
    """Time the same greedy requests in transformers, other libraries and specdec engines, in one process.

    Texts end at EOS or --new-tokens. Ways without batching get --few requests, one by one. A way that fails gives a
    row with its error.
    """

    assistant: str | None = option(
        "Small LM with the target's vocabulary, draft of the others; default: shipped-standalone."
    )
    prompts: Path | None = option("JSON lines of prompts, such as GSM8K's; default: the demo's four.")
    limit: int | None = option("Batch size; default 32 on CUDA, else 4.")
    few: int = option("Requests for ways without batching.", 4)
    tokens: int = option("Length of random prompts (--shape).", 128)
    new_tokens: int | None = option("Maximum number of new tokens; default 128, or 32 on CPU.")

    def run(self) -> None:
        where = device_of(self.device)
        is_large = where.startswith("cuda")
        num = at_least("limit", (32 if is_large else 4) if self.limit is None else self.limit)
        length = at_least("new-tokens", (128 if is_large else 32) if self.new_tokens is None else self.new_tokens)
        few, tokens = at_least("few", self.few), at_least("tokens", self.tokens)
        logging.set_verbosity_error()
        getLogger("ContinuousBatchingLogger").setLevel(ERROR)  # it warns of intended settings
        if self.shape is not None:
            given = {"target": self.target, "draft": self.draft, "assistant": self.assistant, "prompts": self.prompts}
            check_alone(self.shape, **given)
            model: Any = make_target(self.shape, where, dtype_of(self.dtype, where))
            draws = torch.randint(3, model.config.vocab_size, (num, tokens), generator=torch.Generator().manual_seed(0))
            task = Task(model, draws.tolist(), length, make_head(self.shape, model), "eagle3", few=few, is_random=True)
        else:
            questions = list(PROMPTS) if self.prompts is None else read_questions(self.prompts)
            source, algo = draft_of(named_draft(self.draft, self.target))
            algo = algo if source is None else detect_algo(source)
            model, tokenizer = load(self.target or BUNDLED, self.dtype, where)
            ids = islice(cycle(chat_ids(questions, tokenizer)), num)
            task = Task(model, list(ids), length, source, algo, self._small_lm(model), few)
        name = self.shape or Path(self.target or BUNDLED).name.lower()
        config = self.config(task.is_random, model, assistant=self.assistant, prompts=self.prompts)
        file = ResultFile(self.out, "peers", name, config)
        measured: Iterator[Row] = ({"shape": name, **row} for row in measure(task, ways(task)))
        rows = self.record(file, measured, _line)
        if task.is_random:
            print(IMPOSED)
        self.finish({"rows": rows}, file.name)

    def _small_lm(self, model: Any) -> Any:
        """Return the small LM for assisted generation, or None; by default the shipped one of the bundled target."""
        name = self.assistant or ("shipped-standalone" if self.target in (None, BUNDLED) else "none")
        return None if name == "none" else load_draft(shipped.find(name), dtype=model.dtype, device=model.device)[0]


def _line(row: Row) -> str:
    if "mode" in row:
        case = f"{row['mode']} {DraftShape.of(row)}, {row['batch']} x {row['tokens']} tokens"
        return f"{case}: {row['what']} {row['ms']:g} ms"
    return f"{row['what']}: " + (f"{row['tokens_per_s']} tokens/s" if "tokens_per_s" in row else row["error"])
