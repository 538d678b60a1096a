"""What scoring choices costs: `python bench/scores.py --data FOLDER --label now --out DIR`.

GSM8K questions after the same worked examples, several answers each, through `engine.score`, as lm-eval asks for
them. FOLDER has GSM8K's train.jsonl and test.jsonl. To hold two versions against each other, run this file with
PYTHONPATH set to each of them, a `--label` each; the sums of all likelihoods tell whether they agree. The last line is
one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec import attach
from specdec.measure.results import write_results
from specdec.targets.pretrained import BUNDLED, load_pretrained

WRONG = (3, -1, 10)  # what is added to the right number, in the other choices


def main() -> None:
    """Score all pairs `repeats` times, in one call each time."""
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_pretrained(args.target, dtype=dtype, device=device)
    prompts, choices = read_pairs(args.data, args.examples, args.questions)
    pairs = list(zip(prompts, choices, strict=True))
    num_tokens = sum(len(tokenizer(p)["input_ids"]) + len(tokenizer(c)["input_ids"]) - 1 for p, c in pairs)
    seconds, sums = [], []
    with attach(model, algo=None, tokenizer=tokenizer, max_batch=args.max_batch) as engine:
        engine.score(prompts[:1], choices[:1])  # a first run warms up
        for _ in range(args.repeats):
            start = time.perf_counter()
            scores = engine.score(prompts, choices)
            seconds.append(time.perf_counter() - start)
            sums.append(sum(score.logprob for score in scores))
    row: dict[str, Any] = {"what": "score", "label": args.label, "tokenizer": True, "pairs": len(pairs)}
    row |= {"examples": args.examples, "tokens": num_tokens, "ms": round(1e3 * median(seconds), 1)}
    config = {name: value for name, value in vars(args).items() if name not in ("out", "data", "label")}
    config["sum_of_logprobs"] = round(sums[0], 4)
    if args.out:
        write_results(args.out, f"scores-{args.label}", "135m" if args.target == BUNDLED else "model", config, [row])
    print(json.dumps({"sum_of_logprobs": sums, "rows": [row]}))


def read_pairs(folder: Path, num_examples: int, num_questions: int) -> tuple[list[str], list[str]]:
    """Return prompts and continuations, every question as often as it has choices."""
    examples = [
        f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in read(folder / "train.jsonl", num_examples)
    ]
    prompts, choices = [], []
    for row in read(folder / "test.jsonl", num_questions):
        right = int(row["answer"].rpartition("#### ")[2].replace(",", ""))
        for number in (right, *(right + other for other in WRONG)):
            prompts.append("".join(examples) + f"Question: {row['question']}\nAnswer: ####")
            choices.append(f" {number}")
    return prompts, choices


def read(path: Path, count: int) -> list[dict[str, str]]:
    """Return the first `count` rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()[:count]]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K")
    parser.add_argument("--target", default=BUNDLED)
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--label", default="now", help="of this version, such as before or after")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
