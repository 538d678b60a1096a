"""`specdec demo`: the same prompts with HF `generate`, plain decoding and speculation: drafted tokens and speeds."""

import copy
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.api import Engine, attach
from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import RequestOutput
from specdec.core.text.detokenizer import Detokenizer
from specdec.core.text.prompts import chat_ids
from specdec.tools.commands.choices import Drafting, Reported, WithDraft, named_draft
from specdec.tools.measure.lossless import reference
from specdec.tools.options import command_of, option
from specdec.tools.train.target import load

PROMPTS = (
    "A baker sells 24 rolls in the morning and half as many in the afternoon. Each roll costs $2. "
    "How much money does she earn in the day?",
    "Tom reads 15 pages a day. His book has 180 pages and he has already read 60. How many more days does he need?",
    "Explain in a few sentences why the sky is blue.",
    "A train travels 60 miles per hour for 3 hours and then 40 miles per hour for 2 hours. How far does it go?",
)
WAYS = (("HF generate", "hf"), ("plain", "plain"), ("speculative", "spec"))  # names in the table and in the figures
LABEL_WIDTH = 7
ANSWER_LINES = 4  # shown of each answer, so that all fits one screen; the whole answer is measured
CUT = " ..."


class Demo(WithDraft, Reported):
    """Compare HF generate, plain decoding and speculation, and show which tokens were drafted."""

    max_new_tokens: int = option("Maximum number of new tokens.", 96)
    without = frozenset({"dtype"})

    def run(self) -> None:
        if named_draft(self.draft, self.target) == "none":
            raise ValueError(
                "--draft 'none', the default for other targets than bundled: the demo compares drafting with plain "
                "decoding; name a draft made for the target, or 'lookup'"
            )
        model, tokenizer = load(self.target, "float32", self.device)
        drafting = self.drafting(model)
        if drafting.note:
            print(drafting.note)
        self.finish(run_demo(model, tokenizer, drafting, max_new_tokens=self.max_new_tokens))


demo = command_of(Demo)


def run_demo(
    model: Any, tokenizer: Any, drafting: Drafting, *, max_new_tokens: int = 96, prompts: tuple[str, ...] = PROMPTS
) -> dict[str, Any]:
    """Run the three ways prompt by prompt, so that changes of the host's load affect all of them; print texts and
    table.

    If no draft pays off on this host, there are two ways. Returns the figures.
    """
    console = Console()
    mark = Marking.of(console)
    console.print(mark.legend)
    ids, stats = chat_ids(list(prompts), tokenizer), AcceptanceStats()
    with ExitStack() as stack:
        engines = [stack.enter_context(attach(_twin(model), tokenizer=tokenizer, max_batch=1, compile=False))]
        if drafting.algo is not None:
            drafted = drafting.attach(_twin(model), tokenizer, max_batch=1, compile=False)
            engines.append(stack.enter_context(drafted))
        ways: list[Callable[[list[int], int], Any]] = [partial(reference, model)]
        ways += [partial(_answer, engine) for engine in engines]
        for way in ways:  # not timed: compiles and loads kernels
            way(ids[0], 4)
        texts: list[list[list[int]]] = [[] for _ in ways]
        seconds = [0.0] * len(ways)
        for prompt, own in zip(prompts, ids, strict=True):
            for i, way in enumerate(ways):
                start = time.perf_counter()
                output = way(own, max_new_tokens)
                seconds[i] += time.perf_counter() - start
                texts[i].append(output.tokens if i else output)
            stats = stats.merge([output.acceptance])
            console.print()
            console.print(exchange(prompt, output, tokenizer, mark, console.width))
    speeds = [sum(map(len, own)) / time_s for own, time_s in zip(texts, seconds, strict=True)]
    table = Table("", "tokens/s", "against HF", "tau")
    for (name, _), speed in zip(WAYS, speeds, strict=False):
        tau = f"{stats.tau:.2f}" if name == WAYS[len(ways) - 1][0] else "-"
        table.add_row(name, f"{speed:.1f}", f"{speed / speeds[0]:.2f}x", tau)
    console.print(table)
    equal = all(own == texts[0] for own in texts)
    console.print(f"outputs equal, token for token: {'yes' if equal else 'NO'}")
    figures = {f"{key}_tok_s": round(speed, 2) for (_, key), speed in zip(WAYS, speeds, strict=False)}
    return {**figures, "tau": round(stats.tau, 3), "equal": equal}


def _answer(engine: Engine, ids: list[int], max_new_tokens: int) -> RequestOutput:
    return engine.generate(ids, max_new_tokens=max_new_tokens).requests[0]


def _twin(model: Any) -> Any:
    """Return a copy of the module tree of `model` that shares all its weights."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


@dataclass(frozen=True)
class Marking:
    """Markup of drafted tokens that the target accepted: a style, and the text before and after them."""

    style: str
    before: str
    after: str

    @classmethod
    def of(cls, console: Console) -> "Marking":
        """Choose colour if the console has it, underlines on a terminal without, brackets in a pipe or a file."""
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
    # some characters need an early line break
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
