"""`specdec bench grammar`: reads the options, loads the target, and exits with 1 if an answer violates its schema."""

from collections.abc import Iterator
from typing import Any

import torch
import typer

from specdec.tools.commands.choices import OnTarget, Recorded, Row, draft_of, listed, name_of_target, numbers
from specdec.tools.measure import grammar, grammar_speed
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.schemas import make_cases
from specdec.tools.measure.shapes import make_head, make_target
from specdec.tools.options import option
from specdec.tools.train.target import device_of, dtype_of


class BenchGrammar(OnTarget, Recorded):
    """Generate JSON of random schemas; check that finished answers parse and validate, and that greedy text equals
    plain constrained decoding. With --new-tokens, also time texts under schemas beside free text.

    Exits with 1 if a finished answer is invalid, if greedy text differs from plain rounds', or, in float32, if plain
    rounds' text differs from the live model's.
    """

    draft: str = option("Folder, Hub id, shipped name, lookup or none; default: the shipped EAGLE-3.", "shipped")
    schemas: int = option("Random schemas; 0: none.", 60, min=0)
    seed: int = option("Seed of the schemas.", 0)
    shape: list[str] | None = option("Draft shapes S:K:D; default 3:1:4,4:4:16; for lookup 3:1:4, for none plain.")
    batches: list[str] | None = option("Requests decoded together; default 8.")
    temperature: list[str] | None = option("Temperatures; default 0,1.")
    max_new_tokens: int = option("Maximum number of new tokens.", 160)
    seconds: float = option("Seconds per shape, batch and temperature; later schemas are skipped.", 1e9)
    library: str = option("Grammar library: auto, llguidance or xgrammar.", "auto")
    bits: bool = option("Also compare logits by bits; without it, greedy rounds may run without masks.", True)
    new_tokens: int = option("New tokens of each timed text; 0: time none.", 0, min=0)
    random: str | None = option(
        "Random weights of a named shape such as 8b, with the target's tokenizer, for timing only."
    )

    def run(self) -> None:
        draft: tuple[Any, str | None] = draft_of(self.draft)
        usual = {None: "plain", "lookup": "3:1:4"}.get(draft[1], "3:1:4,4:4:16")
        shapes = [DraftShape.parse(text) for text in listed(self.shape, usual)]
        batches = numbers("batches", self.batches, 1) or (8,)
        temperatures = [float(text) for text in listed(self.temperature, "0,1")]
        plan = grammar.Plan(shapes, batches, temperatures, self.max_new_tokens, self.seconds, self.library, self.bits)
        model, tokenizer = self.load()
        if self.random is not None:
            if self.schemas:
                raise ValueError("--random with --schemas: random weights answer nothing; give --schemas 0")
            eos = model.generation_config.eos_token_id
            where = device_of(self.device)
            model = make_target(self.random, where, dtype_of(self.dtype, where))
            model.generation_config.eos_token_id = eos
            draft = (make_head(self.random, model), "eagle3")
        name = self.random or name_of_target(self.target)
        file = ResultFile(self.out, "grammar", name, {"device": str(model.device), "dtype": str(model.dtype)})

        def measured() -> Iterator[Row]:
            if self.schemas:
                yield from grammar.run(model, tokenizer, draft, make_cases(self.schemas, tokenizer, self.seed), plan)
            if self.new_tokens:
                yield from grammar_speed.run(
                    model, tokenizer, draft, shapes, batches, self.new_tokens, grammar=self.library
                )

        rows = self.record(file, measured(), lambda row: _timed(row) if "speed" in row else _checked(row))
        self.finish({"rows": rows}, file.name)
        raise typer.Exit(1 if any(_is_wrong(row, model.dtype == torch.float32) for row in rows) else 0)


def _is_wrong(row: Row, is_exact: bool) -> bool:
    """Return whether a row reports an error; below float32 plain rounds may round differently from the live model."""
    if "speed" in row:
        return False
    must_equal = "equal" in row and (row["steps"] > 0 or is_exact)
    return row["valid"] < row["finished"] or (must_equal and row["equal"] < row["compared"])


def _checked(row: Row) -> str:
    what = f"{DraftShape.of(row)} batch {row['batch']} T={row['temperature']:g}"
    equal = f", {row['equal']} of {row['compared']} equal to plain decoding" if "equal" in row else ""
    bits = f", {row['same_bits']} by bits" if "same_bits" in row else ""
    done = f"{row['valid']} of {row['finished']} finished answers valid, of {row['schemas']}{equal}{bits}"
    return f"{what}: {done}; tau {row['tau']:.2f}, {row['seconds']:.1f} s, {row['tokens_per_s']:.0f} tokens/s"


def _timed(row: Row) -> str:
    ratio = f", {row['tokens_per_s_of_text']:.2f} of free text's" if "tokens_per_s_of_text" in row else ""
    what = f"{DraftShape.of(row)} batch {row['batch']} {row['speed']}: {row['tokens_per_s']:.0f} tokens/s{ratio}"
    masks = f"; masks {row['mask_ms']:.2f} ms, {row['late_ms']:.2f} late" if "mask_ms" in row else ""
    texts = f"texts {row['took'][0]:.1f} to {row['took'][-1]:.1f} ms"
    return f"{what}; {texts}, round {row['round_ms']:.2f} ms, tau {row['tau']:.2f}{masks}"
