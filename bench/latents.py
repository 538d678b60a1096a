"""Times attention over latents beside keys and values that are expanded: `python bench/latents.py`, in 2 minutes.

Some layers of GLM-4.7-Flash, random weights, one long prompt. A row for each way and draft: bytes of the pool (and of
all the model's layers), ms of the prefill, ms of a round through `generate`, `report().bits`. Rounds with lookup must
write the text of plain ones. `--attention` times the attention of a layer instead, by tiling. The last line is one
JSON object.
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeLiteConfig

from specdec import attach
from specdec.api import Engine
from specdec.backends import AttentionCall, LayerSpec
from specdec.core.batch import ForwardMode
from specdec.core.cache.pool import KVPool
from specdec.tools.measure.results import write_results
from specdec.tools.measure.shapes import APART, NO_END, made_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFTS: dict[str, dict[str, Any]] = {"plain": {}, "lookup, S=3": {"algo": "lookup", "num_steps": 3}}
REPEATS = 50  # of a timed call of attention


def main() -> None:
    """One engine a way and draft, or attention alone."""
    args = arguments()
    rows = attention_rows(args.tokens) if args.attention else engine_rows(args)
    if args.out:
        name = "latents-attention" if args.attention else "latents"
        write_results(args.out, name, "glm-4.7-flash", {**vars(args), "out": None}, rows)
    print(json.dumps({"rows": rows}))


def engine_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time prefill and rounds."""
    model, rows = make_model(args.layers), list[dict[str, Any]]()
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 150000, (2, args.batch, args.tokens), generator=random).tolist()
    limits = {"max_batch": args.batch, "max_seq_len": args.tokens + args.new_tokens + 64, "prefix_cache": True}
    for way in ("expanded", "latents"):
        texts = []
        for draft, settings in DRAFTS.items():
            with attach(model, latents=way == "latents", graph_sampling="greedy", **limits, **settings) as engine:
                _, timed = (call(engine, given, 1)[0] for given in prompts)  # the first one warms up
                out = call(engine, prompts[1], args.new_tokens)[1]
                texts.append(out.tokens)
                found = engine.report()
                layers = model.config.num_hidden_layers
                rows.append(
                    {"way": way, "draft": draft, "pool_gb": round(found.kv_bytes / 1e9, 3)}
                    | {"pool_gb_47_layers": round(found.kv_bytes / 1e9 / layers * 47, 2)}
                    | {"prefill_ms": round(timed), "round_ms": round(round_ms(engine, prompts[1], args.new_tokens), 3)}
                    | {
                        "latents": found.latents,
                        "bits": found.bits,
                        "compiled": found.compiled[:40],
                        "backend": found.backend,
                    }
                )
                print(rows[-1], flush=True)
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        assert texts[0] == texts[1], f"{way}: rounds with a draft write another text than plain ones"
    return rows


def make_model(num_layers: int) -> Any:
    """Make the first layers of GLM-4.7-Flash with random weights."""
    config = Glm4MoeLiteConfig(**NO_END, num_hidden_layers=num_layers, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with made_on(DEVICE, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.get_input_embeddings().weight.data.normal_(0, APART)
    return model.eval()


def call(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[float, Any]:
    """Return ms and output of a call of `generate`."""
    start = time.perf_counter()
    out = engine.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
    return 1e3 * (time.perf_counter() - start), out


def round_ms(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """Return ms of a round, of prompts whose K/V is cached."""
    first = median(call(engine, prompts, 1)[0] for _ in range(3))
    timed = [call(engine, prompts, new_tokens) for _ in range(3)]
    return median((ms - first) / max(r.acceptance.num_rounds for r in out.requests) for ms, out in timed)


def attention_rows(tokens: int) -> list[dict[str, Any]]:
    """Time the attention of one layer: plain steps and verifications of 4 tokens of 1 and 8 requests, and a prefill
    of 2048 tokens; of K/V expanded as it is, of latents by tiling. us."""
    from specdec.backends.triton import backend as triton

    own, rows = triton.choose_tiling, list[dict[str, Any]]()
    latent = LayerSpec(20, 1, 576, 512, 0.0625, v_in_k=True)
    tilings = list(product((16, 32), (32, 64), (4, 8), (2, 3)))
    for layer, chosen in [(LayerSpec(20, 20, 256, 256, 0.0625), None), (latent, None), *((latent, t) for t in tilings)]:

        def choose(*given: Any, chosen: Any = chosen) -> Any:
            names = ("block_m", "block_n", "num_warps", "num_stages")
            return replace(own(*given), **dict(zip(names, chosen or (), strict=False)))

        triton.choose_tiling = choose  # type: ignore[assignment]
        row: dict[str, Any] = {"layer": "latents" if layer.v_in_k else "expanded", "tiling": chosen or "own"}
        for name, batch, q_len in (("1x1", 1, 1), ("1x4", 1, 4), ("8x1", 8, 1), ("8x4", 8, 4), ("prefill", 1, 2048)):
            try:
                row[name] = round(attention_us(triton.TritonBackend(), layer, batch, q_len, tokens), 1)
            except Exception as error:  # of shared memory
                row[name] = type(error).__name__
        rows.append(row)
        print(row, flush=True)
    triton.choose_tiling = own
    return rows


def attention_us(backend: Any, layer: LayerSpec, batch: int, q_len: int, tokens: int) -> float:
    """Return us of one layer's attention over `tokens` keys of each request."""
    dtype, width = torch.bfloat16, tokens + q_len
    table = (1 + torch.arange(batch * width, device=DEVICE, dtype=torch.int32)).view(batch, width)
    rows, lens = torch.arange(batch, device=DEVICE), torch.full((batch,), tokens, device=DEVICE)
    pool = KVPool([layer.shape], batch * width + 1, dtype, torch.device(DEVICE))
    if q_len > 64:
        metadata = backend.metadata.prefill(table, rows, [tokens] * batch, [q_len] * batch)
    else:
        mode = ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY
        metadata = backend.metadata.uniform(mode, table, rows, lens, q_len=q_len, max_prefix=tokens)
    q = torch.randn(batch * q_len, layer.num_heads, layer.qk_dim, device=DEVICE, dtype=dtype)
    attention = AttentionCall(q, None, None, q.new_empty(*q.shape[:2], layer.v_dim), pool, 0, layer)
    backend.plan(metadata)
    backend.attend(attention)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    num = REPEATS if q_len <= 64 else 3
    begin.record()
    for _ in range(num):
        backend.attend(attention)
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / num


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768, help="of prompts")
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
