"""`specdec demo`: the same prompts with HF `generate`, plain decoding and speculation: drafted tokens and speeds."""

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.api import Engine, attach
from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import RequestOutput
from specdec.core.text.detokenizer import Detokenizer
from specdec.core.text.prompts import chat_ids
from specdec.reach.targets.pretrained import BUNDLED, load_pretrained
from specdec.tools.commands.choices import (
    Draft,
    Drafting,
    DraftTokens,
    Json,
    MaxNew,
    Steps,
    TopK,
    drafting_of,
    finish,
    named_draft,
)
from specdec.tools.measure.break_even import slow_products
from specdec.tools.measure.lossless import reference
from specdec.tools.train.cli import Device, Target
from specdec.tools.train.target import device_of

PROMPTS = (
    "A baker sells 24 rolls in the morning and half as many in the afternoon. Each roll costs $2. "
    "How much money does she earn in the day?",
    "Tom reads 15 pages a day. His book has 180 pages and he has already read 60. How many more days does he need?",
    "Explain in a few sentences why the sky is blue.",
    "A train travels 60 miles per hour for 3 hours and then 40 miles per hour for 2 hours. How far does it go?",
)
LABEL_WIDTH = 7
ANSWER_LINES = 4  # shown of each answer, so that all fits one screen; the whole answer is measured
CUT = " ..."


@dataclass
class DemoWay:
    """One way to generate: what it emitted and took, over all prompts."""

    name: str
    key: str
    call: Callable[[list[int]], Any]
    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tau: float | None = None

    @classmethod
    def of(cls, name: str, key: str, engine: Engine, max_new_tokens: int) -> "DemoWay":
        """An engine's way."""
        return cls(name, key, lambda ids: engine.generate(ids, max_new_tokens=max_new_tokens).requests[0])

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second, prefill included."""
        return sum(map(len, self.tokens)) / self.seconds

    def run(self, ids: list[int]) -> Any:
        """Generate for one more prompt; return the ids of the answer, or an engine's output."""
        start = time.perf_counter()
        output = self.call(ids)
        self.seconds += time.perf_counter() - start
        self.tokens.append(output.tokens if isinstance(output, RequestOutput) else output)
        return output


def command(
    target: Target = BUNDLED,
    draft: Draft = None,
    steps: Steps = None,
    topk: TopK = None,
    draft_tokens: DraftTokens = None,
    max_new_tokens: MaxNew = 96,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Compare HF generate, plain decoding and speculation, and show which tokens were drafted."""
    name = named_draft(draft, target)
    if name == "none":
        raise ValueError(
            "--draft 'none', the default for other targets than bundled: the demo compares drafting with plain "
            "decoding; name a draft made for the target, or 'lookup'"
        )
    model, tokenizer = load_pretrained(target, dtype=torch.float32, device=device_of(device))
    drafting = drafting_of(name, model, 1, steps, topk, draft_tokens)
    if drafting.note:
        slow = slow_products(model, 1 + drafting.settings.get("num_steps", 1))[:3]
        print(drafting.note + (f"; slow products of a few rows: {', '.join(slow)}" if slow else ""))
    finish(json, run_demo(model, tokenizer, drafting, max_new_tokens=max_new_tokens))


def run_demo(
    model: Any, tokenizer: Any, drafting: Drafting, *, max_new_tokens: int = 96, prompts: tuple[str, ...] = PROMPTS
) -> dict[str, Any]:
    """Run the three ways prompt by prompt, so that a host whose load changes slows all of them; print texts and table.

    Without a draft, where none pays on this host, there are two ways. Returns the figures.
    """
    console = Console()
    mark = Marking.of(console)
    console.print(mark.legend)
    ids, stats = chat_ids(list(prompts), tokenizer), AcceptanceStats()
    ways = [DemoWay("HF generate", "hf", lambda own: reference(model, own, max_new_tokens))]
    engines = [attach(_twin(model), tokenizer=tokenizer, max_batch=1, compile=False)]
    ways.append(DemoWay.of("plain", "plain", engines[0], max_new_tokens))
    try:
        if drafting.algo is not None:
            engines.append(drafting.attach(_twin(model), tokenizer, max_batch=1, compile=False))
            ways.append(DemoWay.of("speculative", "spec", engines[1], max_new_tokens))
        reference(model, ids[0], 4)
        for engine in engines:
            engine.generate(ids[0], max_new_tokens=4)
        for prompt, own in zip(prompts, ids, strict=True):
            *_, output = [way.run(own) for way in ways]
            stats = stats.merge([output.acceptance])
            console.print()
            console.print(exchange(prompt, output, tokenizer, mark, console.width))
    finally:
        for engine in engines:
            engine.detach()
    ways[-1].tau = stats.tau
    equal = all(way.tokens == ways[0].tokens for way in ways)
    _print_table(console, ways, equal)
    figures = {f"{way.key}_tok_s": round(way.tokens_per_s, 2) for way in ways}
    return {**figures, "tau": round(stats.tau, 3), "equal": equal}


def _twin(model: Any) -> Any:
    """Return a model of its own modules that shares all weights with `model`."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


@dataclass(frozen=True)
class Marking:
    """Markup of drafted tokens that the target accepted: a style, and the text before and after them."""

    style: str
    before: str
    after: str

    @classmethod
    def of(cls, console: Console) -> "Marking":
        """Choose colour where there is colour, underlines on a terminal without, brackets in a pipe or a file."""
        if not console.is_terminal or console.is_dumb_terminal:
            return cls("", "[", "]")
        return cls("underline" if console.no_color or console.color_system is None else "bold green", "", "")

    @property
    def legend(self) -> Text:
        """A line that explains the marks."""
        legend = Text().append(f"{self.before}drafted and accepted{self.after}", self.style)
        return legend.append(", the rest: the target's own tokens. All of it is the target's own text.")


def exchange(prompt: str, output: RequestOutput, tokenizer: Any, mark: Marking, width: int) -> Table:
    """Format a prompt and its answer, labelled, wrapped for `width` columns; long answers are cut."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(width=LABEL_WIDTH, style="bold")
    lines.add_column(width=width - LABEL_WIDTH - 1)
    lines.add_row("prompt", Text(prompt))
    # a line breaks some characters early
    lines.add_row("answer", marked(output, tokenizer, mark, ANSWER_LINES * (width - LABEL_WIDTH - 9)))
    return lines


def marked(output: RequestOutput, tokenizer: Any, mark: Marking, most: int) -> Text:
    """Format `output` on one line, drafted tokens marked round by round, cut after about `most` characters."""
    text, detokenizer = Text(), Detokenizer(tokenizer)
    for is_drafted, run in groupby(zip(output.is_drafted, output.tokens, strict=True), key=itemgetter(0)):
        if len(text) > most - len(CUT):
            return text.append(CUT)
        piece = re.sub(r"\s+", " ", detokenizer.feed([token for _, token in run]))
        if is_drafted and piece.strip():
            text.append(" " * piece.startswith(" "))
            text.append(mark.before + piece.lstrip() + mark.after, mark.style)
        else:
            text.append(piece)
    return text.append(detokenizer.finish())


def _print_table(console: Console, ways: list[DemoWay], equal: bool) -> None:
    table = Table("", "tokens/s", "against HF", "tau")
    for way in ways:
        tau = "-" if way.tau is None else f"{way.tau:.2f}"
        table.add_row(way.name, f"{way.tokens_per_s:.1f}", f"{way.tokens_per_s / ways[0].tokens_per_s:.2f}x", tau)
    console.print(table)
    console.print(f"outputs equal, token for token: {'yes' if equal else 'NO'}")
