"""`specdec bench grammar`: read the options, load the target, and exit with 1 where an answer is not of its schema."""

import torch
import typer

from specdec import shipped
from specdec.tools.commands.choices import OnTarget, Recorded, Row, draft_of, listed, name_of_target, numbers
from specdec.tools.measure import grammar
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.results import ResultFile
from specdec.tools.options import option


class BenchGrammar(OnTarget, Recorded):
    """Generate JSON of random schemas: do finished answers parse and validate, is greedy text that of plain constrained
    decoding, how many tokens/s beside free text.

    Exits with 1 where an answer that has ended is not valid, or, in float32, where greedy text differs.
    """

    draft: str = option("Folder, Hub id, shipped name, lookup or none; default: the shipped EAGLE-3.", "shipped")
    schemas: int = option("Random schemas.", 60, min=1)
    seed: int = option("Of the schemas.", 0)
    shape: list[str] | None = option("S:K:D; default 3:1:4,4:4:16.")
    batches: list[str] | None = option("Requests decoded together; default 8.")
    temperature: list[str] | None = option("Default 0,1.")
    max_new_tokens: int = option("Tokens to emit at most.", 160)
    library: str = option("auto, llguidance or xgrammar.", "auto")

    def run(self) -> None:
        shapes = [DraftShape.parse(text) for text in listed(self.shape, "3:1:4,4:4:16")]
        batches = numbers("batches", self.batches, 1) or (8,)
        temperatures = [float(text) for text in listed(self.temperature, "0,1")]
        plan = grammar.Plan(shapes, batches, temperatures, self.max_new_tokens, self.library)
        model, tokenizer = self.load()
        draft = (shipped.path(), "auto") if self.draft == "shipped" else draft_of(self.draft)
        cases = grammar.make_cases(self.schemas, tokenizer, self.seed)
        file = ResultFile(self.out, "grammar", name_of_target(self.target), {"device": str(model.device)})
        rows = self.record(file, grammar.run(model, tokenizer, draft, cases, plan), _line)
        self.finish({"rows": rows}, file.name)
        may_round = model.dtype != torch.float32
        wrong = [
            row
            for row in rows
            if row["valid"] < row["finished"] or not (may_round or row.get("equal", row["schemas"]) == row["schemas"])
        ]
        raise typer.Exit(1 if wrong else 0)


def _line(row: Row) -> str:
    """Say a row in short."""
    what = f"{DraftShape.of(row)} batch {row['batch']} T={row['temperature']:g}"
    equal = f", {row['equal']} equal to plain constrained decoding" if "equal" in row else ""
    speed = f"{row['tokens_per_s']:.1f} tokens/s (free text {row['free_tokens_per_s']:.1f})"
    return f"{what}: {row['valid']} of {row['finished']} finished answers valid, of {row['schemas']}{equal}; {speed}"
