"""The same requests by transformers' own ways and by engines: `PYTHONPATH=. python bench/peers.py --shape 8b`.

32 requests of 128 tokens, 128 new ones each, EOS ignored, greedy, one process. transformers: `generate` on the batch,
`generate_batch` (continuous batching, its CUDA graphs on, then with the settings that it picks itself; its manager is
kept between the runs), assisted decoding and prompt lookup, which take one request at a time: --few of them are timed.
Engines: without a draft, and S=3. With random weights acceptance is imposed, as in bench/latency.py; with --target and
--draft, real ones, it is real, and prompts are GSM8K's (--data). Every way runs twice, the second time counts; what
fails is a row with its error. The last line is one JSON object.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from round_cases import DEVICE, acceptance_rates, make_head, make_target

import specdec
from specdec.measure.results import write_results
from specdec.targets.pretrained import load_pretrained
from specdec.text.prompts import chat_ids, read_questions

Run = Callable[[list[list[int]]], list[list[int]]]  # prompts -> new tokens of each


def main() -> None:
    """Time every way, print a table, write the result file after every row."""
    args = _arguments()
    if args.target is None:
        model, tokenizer = make_target(args.shape, None), None
        vocab = model.get_output_embeddings().weight.shape[0]
        draws = torch.randint(3, vocab, (args.requests, args.tokens), generator=torch.Generator().manual_seed(0))
        prompts = draws.tolist()
    else:
        model, tokenizer = load_pretrained(args.target, dtype=torch.bfloat16, device=DEVICE)
        prompts = chat_ids(read_questions(args.data / "gsm8k/test.jsonl", args.requests), tokenizer)
    rows: list[dict[str, Any]] = []
    path = None
    for what, num, make in ways(model, args):
        row = {"what": what, "shape": args.shape, "requests": num, "new_tokens": args.new_tokens}
        row |= timed(make, prompts[:num], args.new_tokens)
        rows.append(row)
        print(json.dumps(row), flush=True)
        path = write_results(args.out, "peers", args.shape, {"target": args.target or "random weights"}, rows, path)
    table = Table("way", "requests", "tokens/s", "of generate_batch")
    base = max(
        (r["tokens_per_s"] for r in rows if r["what"].startswith("generate_batch") and "error" not in r), default=0
    )
    for r in rows:
        rate = r.get("tokens_per_s")
        ratio = f"{rate / base:.2f}x" if rate and base else "-"
        table.add_row(r["what"], str(r["requests"]), f"{rate:.0f}" if rate else r["error"][:60], ratio)
    Console(width=110).print(table)
    print(json.dumps({"file": path.name if path else None, "rows": rows}))


def timed(make: Callable[[], Any], prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """Seconds of the second of two runs, and tokens a second."""
    try:
        with make() as run:
            for _ in range(2):
                _wait()
                start = time.perf_counter()
                texts = run(prompts)
                _wait()
                seconds = time.perf_counter() - start
        assert all(len(text) == num_new for text in texts), "a request ended early"
    except Exception as error:  # a way that does not work here is a fact to report
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return {"seconds": round(seconds, 3), "tokens_per_s": round(len(prompts) * num_new / seconds, 1)}


class Way:
    """A context in which a Run works."""

    def __init__(self, run: Run, close: Callable[[], None] = lambda: None):
        self.run, self.close = run, close

    def __enter__(self) -> Run:
        return self.run

    def __exit__(self, *_: Any) -> None:
        self.close()


def ways(model: Any, args: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[], Way]]]:
    """Name, number of requests, and how to make each way; transformers' own first, on the model as it is."""
    num = args.new_tokens
    fixed = {"max_new_tokens": num, "min_new_tokens": num, "do_sample": False}

    def by_generate(prompts: list[list[int]], **options: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **fixed, **options)
        return out[:, width:].tolist()

    def one_by_one(**options: Any) -> Way:
        return Way(lambda prompts: [by_generate([p], **options)[0] for p in prompts])

    def by_batch(**options: Any) -> Way:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(max_new_tokens=num, do_sample=False, eos_token_id=-1, pad_token_id=0)
        settings = ContinuousBatchingConfig(**options)

        def run(prompts: list[list[int]]) -> list[list[int]]:
            own = {"generation_config": config, "continuous_batching_config": settings}
            found = model.generate_batch(prompts, **own, persistent_manager=True)
            return [found[name].generated_tokens for name in sorted(found, key=lambda n: int(n.split("_")[-1]))]

        return Way(run, model.destroy_cached_continuous_batching_manager)

    def engine(steps: int, **settings: Any) -> Way:
        given = {"max_batch": args.requests, "graph_sampling": "greedy", **settings}
        if steps:
            given["num_steps"] = steps
        if steps and args.target is None:
            given["synthetic_acceptance"] = acceptance_rates(steps)
        head = make_head(args.shape, model, args.draft) if steps else None
        attached = specdec.attach(model, head, **given)
        laws = [specdec.SamplingParams(seed=i) for i in range(args.requests)]

        def run(prompts: list[list[int]]) -> list[list[int]]:
            own = {"sampling": laws[: len(prompts)], "ignore_eos": True}
            return attached.generate(prompts, max_new_tokens=num, **own).tokens

        return Way(run, attached.detach)

    yield "generate", args.requests, lambda: Way(by_generate)
    yield "generate_batch, graphs", args.requests, lambda: by_batch(use_cuda_graph=True)
    yield "generate_batch", args.requests, by_batch
    yield "prompt lookup", args.few, lambda: one_by_one(prompt_lookup_num_tokens=3)
    if args.assistant is not None:
        small, _ = load_pretrained(args.assistant, dtype=torch.bfloat16, device=DEVICE)
        yield "assisted", args.few, lambda: one_by_one(assistant_model=small)
    compiled = {"compile": True} if args.compile else {}
    yield "specdec, no draft", args.requests, lambda: engine(0, **compiled)
    yield "specdec, S=3", args.requests, lambda: engine(3, **compiled)


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", "8b", "tiny"), default="135m")
    parser.add_argument("--target", default=None, help="a real target of that shape; default: random weights")
    parser.add_argument("--draft", default=None, help="its head, with --target")
    parser.add_argument("--assistant", default=None, help="a small model for assisted decoding, with --target")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with gsm8k/test.jsonl, with --target")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--few", type=int, default=4, help="requests of the ways that take one at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="compile the target's layers for the engines")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
