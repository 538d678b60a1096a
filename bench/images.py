"""Times prompts with an image beside prompts of text of equal length: `python bench/images.py --shape 7b --out DIR`.

A Qwen2.5-VL with random weights, one image and a text prompt. Rows: ms to the first token, ours and transformers' own
(`generate` with max_new_tokens=1), and of the vision tower alone; ms of a plain step, and of a round of S=3 with a
random EAGLE-3 head and imposed acceptance, without the first token. Medians. The last line is one JSON object.
"""

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from launches import DEVICE, DRAFTS, finish, launch_ms, make_parser  # in this folder
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from specdec import attach
from specdec.reach.heads.eagle3 import Eagle3Head
from specdec.reach.heads.fresh import eagle3_config
from specdec.tools.measure.shapes import made_on

IMAGE, START, END = 151655, 151652, 151653
TEXT: dict[str, dict[str, Any]] = {
    "7b": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
    ),
    "tiny": dict(
        hidden_size=128, intermediate_size=64, num_hidden_layers=8, num_attention_heads=1, num_key_value_heads=1
    ),
}
VISION: dict[str, dict[str, Any]] = {
    "7b": dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584),
    "tiny": dict(depth=2, hidden_size=64, intermediate_size=64, num_heads=4, out_hidden_size=128),
}


def main() -> None:
    """Time transformers, then an engine without a draft and one with it."""
    args = arguments()
    start, rows = time.perf_counter(), list[dict[str, Any]]()
    model = make_model(args.shape)
    image = image_prompt(model, args.side, args.tokens)
    ids = image["input_ids"]
    text = {"input_ids": torch.arange(5, 5 + ids.shape[1], device=DEVICE).unsqueeze(0)}
    text["attention_mask"] = torch.ones_like(text["input_ids"])
    prompts = {"image": image, "text": text}

    def row(what: str, prompt: str, mode: str, ms: float) -> None:
        rows.append({"what": what, "prompt": prompt, "tokens": ids.shape[1], "mode": mode, "ms": round(ms, 3)})
        print(f"{time.perf_counter() - start:6.1f} s", rows[-1], flush=True)

    for name, prompt in prompts.items():
        call = {**prompt, "max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        row("ttft", name, "transformers", timed(partial(model.generate, **call)))
    for draft, settings in DRAFTS.items():
        head = make_head(model) if settings else None
        limits = {"max_batch": 1, "max_seq_len": ids.shape[1] + args.new_tokens + 64, "graph_sampling": "greedy"}
        with attach(model, head, **limits, **settings) as engine:
            if not settings:
                images = engine._attached().target.images
                row("vision", "image", "specdec", timed(partial(images.embed, image, False)))
            for name, prompt in prompts.items():
                first = partial(engine.generate, prompt, max_new_tokens=1, ignore_eos=True, do_sample=False)
                row("ttft", name, f"specdec {draft}", timed(first))
                ms = launch_ms(engine, prompt, args.new_tokens)
                row("round" if settings else "plain_step", name, draft, ms)
            report = engine.report()
            print({name: counts for name, counts in report.runners.items() if counts["eager"] or counts["replays"]})
        del engine, head, first
        gc.collect()
    finish(args, "images", args.shape, rows)


def make_model(shape: str) -> Any:
    """Return the model with random weights, made on the device in bfloat16, on a CPU in float32."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    text = {**TEXT[shape], **ends, "vocab_size": 152064, "rope_parameters": rope, "max_position_embeddings": 32768}
    vision = {**VISION[shape], "fullatt_block_indexes": [7, 15, 23, 31]}
    config = Qwen2_5_VLConfig(text_config={**text, "use_sliding_window": False}, vision_config=vision, dtype=dtype)
    torch.manual_seed(0)
    with made_on(DEVICE, dtype):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def image_prompt(model: Any, side: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return the inputs of an image of side x side tokens between half of `tokens` of text each."""
    vision = model.config.vision_config
    patches = (side * vision.spatial_merge_size) ** 2
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, *[side * vision.spatial_merge_size] * 2]], device=DEVICE)
    around = torch.arange(5, 5 + tokens // 2, device=DEVICE)
    image = torch.tensor([START, *[IMAGE] * side**2, END], device=DEVICE)
    ids = torch.cat([around, image, around + 100]).unsqueeze(0)
    made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
    return {
        **made,
        "pixel_values": torch.randn(patches, width, device=DEVICE, dtype=model.dtype),
        "image_grid_thw": grid,
    }


def make_head(model: Any) -> Any:
    """Return a random EAGLE-3 head with a vocabulary of 32,000."""
    config = eagle3_config(model, 32000, intermediate_size=model.config.get_text_config().intermediate_size)
    head = Eagle3Head(config).to(model.device, model.dtype)
    head.set_hot_vocab(torch.arange(config.draft_vocab_size, device=model.device))
    return head.eval().requires_grad_(False)


def timed(call: Callable[[], Any]) -> float:
    """Return the median ms of five calls, after two that warm up."""
    found = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return median(found[2:])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="7b", choices=sorted(TEXT))
    parser.add_argument("--side", type=int, default=32, help="of the image, in tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of text around it")
    parser.add_argument("--new-tokens", type=int, default=257)
    return parser.parse_args()


if __name__ == "__main__":
    main()
