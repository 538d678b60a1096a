"""Times attention over latents beside expanded keys and values: `python bench/latents.py`, in 2 minutes.

Some layers of GLM-4.7-Flash, random weights, one long prompt. One row per way and draft: bytes of the pool (and of all
the model's layers), ms of the prefill, ms of a round through `generate`, `report().bits`. Rounds with lookup must write
the text of plain ones. The last line is one JSON object.
"""

import argparse
import gc
from typing import Any

import torch
from launches import DEVICE, finish, launch_ms, make_parser  # in this folder
from transformers import AutoModelForCausalLM, Glm4MoeLiteConfig

from specdec import attach
from specdec.tools.measure.shapes import APART, NO_END, made_on

DRAFTS: dict[str, dict[str, Any]] = {"plain": {}, "lookup, S=3": {"algo": "lookup", "num_steps": 3}}


def main() -> None:
    """Time prefill and rounds of one engine per way and draft."""
    args = arguments()
    model, rows = make_model(args.layers), list[dict[str, Any]]()
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 150000, (2, args.batch, args.tokens), generator=random).tolist()
    limits = {"max_batch": args.batch, "max_seq_len": args.tokens + args.new_tokens + 64, "prefix_cache": True}
    for way in ("expanded", "latents"):
        texts = []
        for draft, settings in DRAFTS.items():
            with attach(model, latents=way == "latents", graph_sampling="greedy", **limits, **settings) as engine:
                _, first = (engine.generate(given, max_new_tokens=1, ignore_eos=True) for given in prompts)
                texts.append(engine.generate(prompts[1], max_new_tokens=args.new_tokens, ignore_eos=True).tokens)
                found = engine.report()
                layers = model.config.num_hidden_layers
                rows.append(
                    {"way": way, "draft": draft, "pool_gb": round(found.kv_bytes / 1e9, 3)}
                    | {"pool_gb_47_layers": round(found.kv_bytes / 1e9 / layers * 47, 2)}
                    | {"prefill_ms": round(1e3 * first.stats.time_s)}
                    | {"round_ms": round(launch_ms(engine, prompts[1], args.new_tokens), 3)}
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
    finish(args, "latents", "glm-4.7-flash", rows)


def make_model(num_layers: int) -> Any:
    """Make the first layers of GLM-4.7-Flash with random weights."""
    config = Glm4MoeLiteConfig(**NO_END, num_hidden_layers=num_layers, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with made_on(DEVICE, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.get_input_embeddings().weight.data.normal_(0, APART)
    return model.eval()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768, help="of prompts")
    parser.add_argument("--new-tokens", type=int, default=65)
    return parser.parse_args()


if __name__ == "__main__":
    main()
