"""`specdec demo`: the same prompts with HF `generate`, plain decoding and speculation: drafted tokens and speeds."""

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from specdec.api import Engine, attach
from specdec.measure.lossless import reference
from specdec.outputs import RequestOutput
from specdec.text.detokenizer import Detokenizer
from specdec.text.prompts import chat_ids

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
class Run:
    """Tokens and seconds of one way to generate, over all prompts."""

    name: str
    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tau: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second, prefill included."""
        return sum(map(len, self.tokens)) / self.seconds


def run_demo(
    model: Any,
    tokenizer: Any,
    draft: Any,
    algo: str | None = "auto",
    *,
    max_new_tokens: int = 96,
    prompts: tuple[str, ...] = PROMPTS,
    **drafting: int,
) -> dict[str, Any]:
    """Run the three ways, print the table and one JSON line, and return what the line holds.

    drafting: num_steps, topk and num_draft_tokens as `attach` takes them.
    """
    console = Console()
    ids = chat_ids(list(prompts), tokenizer)
    hf = run_hf(model, ids, max_new_tokens)
    plain = run_engine("plain", lambda: attach(model, tokenizer=tokenizer, compile=False), ids, max_new_tokens)
    mark = Marking.of(console)
    console.print(mark.legend)

    def show(index: int, output: RequestOutput) -> None:
        console.print()
        console.print(exchange(prompts[index], output, tokenizer, mark, console.width))

    def speculative() -> Engine:
        settings: dict[str, Any] = {**drafting, "compile": False}
        return attach(model, draft, algo, tokenizer=tokenizer, **settings)

    spec = run_engine("speculative", speculative, ids, max_new_tokens, show)
    equal = hf.tokens == plain.tokens == spec.tokens
    _print_table(console, [hf, plain, spec], equal)
    result = {
        "hf_tok_s": round(hf.tokens_per_s, 2),
        "plain_tok_s": round(plain.tokens_per_s, 2),
        "spec_tok_s": round(spec.tokens_per_s, 2),
        "tau": round(spec.tau or 0.0, 3),
        "equal": equal,
    }
    print(json.dumps(result))
    return result


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
        sample = Text(f"{self.before}drafted and accepted{self.after}", self.style)
        return sample + Text(", the rest: the target's own tokens. All of it is the target's own text.", "")


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
    for is_drafted, tokens in _runs(output):
        if len(text) > most - len(CUT):
            return text.append(CUT)
        piece = re.sub(r"\s+", " ", detokenizer.feed(tokens))
        if not is_drafted or not piece.strip():
            text.append(piece)
            continue
        text.append(" " * piece.startswith(" "))
        text.append(mark.before + piece.lstrip() + mark.after, mark.style)
    return text.append(detokenizer.finish())


def _runs(output: RequestOutput) -> Iterable[tuple[bool, list[int]]]:
    """Yield (is drafted, tokens) of each round: its accepted drafts, then the target's own token."""
    start = len(output.tokens) - sum(output.round_lens)
    yield False, output.tokens[:start]
    for n in output.round_lens:
        yield True, output.tokens[start : start + n - 1]
        yield False, output.tokens[start + n - 1 : start + n]
        start += n


def run_hf(model: Any, prompts: list[list[int]], max_new_tokens: int) -> Run:
    """Run `model.generate`, one prompt at a time, after a short warm-up."""
    run = Run("HF generate")
    reference(model, prompts[0], 4)
    for prompt in _progress(prompts, run.name):
        start = time.perf_counter()
        run.tokens.append(reference(model, prompt, max_new_tokens))
        run.seconds += time.perf_counter() - start
    return run


def run_engine(
    name: str,
    make: Callable[[], Engine],
    prompts: list[list[int]],
    max_new_tokens: int,
    show: Callable[[int, RequestOutput], None] | None = None,
) -> Run:
    """Run every prompt through a fresh engine; `show` gets each output, outside the timed part."""
    run, engine = Run(name), make()
    try:
        engine.generate(prompts[0], max_new_tokens=4)
        num_emitted = num_rounds = 0
        for index, prompt in enumerate(_progress(prompts, name) if show is None else prompts):
            start = time.perf_counter()
            (output,) = engine.generate(prompt, max_new_tokens=max_new_tokens).requests
            run.seconds += time.perf_counter() - start
            run.tokens.append(output.tokens)
            num_emitted += output.acceptance.num_emitted
            num_rounds += output.acceptance.num_rounds
            if show is not None:
                show(index, output)
        run.tau = num_emitted / max(num_rounds, 1)
    finally:
        engine.detach()
    return run


def _progress(prompts: list[list[int]], name: str) -> Iterable[list[int]]:
    """Iterate over the prompts, with a progress bar on a terminal that disappears at the end."""
    return tqdm(prompts, desc=name, unit="prompt", leave=False, disable=None)


def _print_table(console: Console, runs: list[Run], equal: bool) -> None:
    table = Table("", "tokens/s", "against HF", "tau")
    for run in runs:
        tau = "-" if run.tau is None else f"{run.tau:.2f}"
        table.add_row(run.name, f"{run.tokens_per_s:.1f}", f"{run.tokens_per_s / runs[0].tokens_per_s:.2f}x", tau)
    console.print(table)
    console.print(f"outputs equal, token for token: {'yes' if equal else 'NO'}")
