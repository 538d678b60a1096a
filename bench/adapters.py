"""Times rounds with LoRA adapters per request: `python bench/adapters.py --shape 8b --out DIR`.

Random weights, imposed acceptance, random adapters of one rank on all linear layers. A row for plain steps and one for
rounds of S=3, each: without adapters; with adapters attached but unused; with one; with all of them in turn. ms of a
launch through `generate`, without the first token, the median of five pairs of calls. The last line is one JSON object.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from launches import DEVICE, DRAFTS, finish, launch_ms, make_parser  # in this folder
from safetensors.torch import save_file

from specdec import attach
from specdec.tools.measure.shapes import make_head, make_target

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Time an engine without adapters and one with them, plain and with a draft."""
    args = arguments()
    model = make_target(args.shape, DEVICE)
    names, rows = [f"adapter{i}" for i in range(args.num)], list[dict[str, Any]]()
    random = torch.Generator().manual_seed(0)
    size = (args.batch, args.tokens)
    prompts = torch.randint(5, model.config.vocab_size - 5, size, generator=random).tolist()
    limits = {"max_batch": args.batch, "max_seq_len": args.tokens + args.new_tokens + 64, "graph_sampling": "greedy"}
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(model, args.rank, Path(folder))
        for draft, settings in ((name, DRAFTS[name]) for name in args.drafts):
            for adapters in (None, dict.fromkeys(names, folder)):
                head = make_head(args.shape, model) if settings else None
                with attach(model, head, adapters=adapters or (), **limits, **settings) as engine:
                    asked = {"attached": None, "one": names[0], "all": [names[i % args.num] for i in range(args.batch)]}
                    for what, adapter in asked.items() if adapters else [("without", None)]:
                        ms = launch_ms(engine, prompts, args.new_tokens, adapter=adapter)
                        rows.append({"what": "adapters", "draft": draft, "adapters": what, "ms": ms})
                        print(rows[-1], flush=True)
                del engine
                gc.collect()
    finish(args, "adapters", args.shape, rows)


def save_adapter(model: Any, rank: int, folder: Path) -> None:
    """Write a random adapter of all linear layers in PEFT's layout."""
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(LAYERS):
            shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
            for part, shape in shapes.items():
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = (0.02 * torch.randn(shape)).to(model.dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="8b", help="as `specdec bench latency` has it")
    parser.add_argument("--num", type=int, default=16, help="adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of prompts")
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
