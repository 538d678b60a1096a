"""Whether the host waits for the device as it admits, prefills and plays rounds of experts and recurrent models.

    python bench/waits.py --out DIR                       # every causal-LM type of transformers that has such layers
    python bench/waits.py --types qwen3_moe qwen3_next    # only these

Each is a tiny random model (see bench/admission.py) in bf16, fp16 and fp32, without graphs, since a replay cannot wait.
On CUDA, PyTorch's sync debug mode raises an error where an operation waits. Without it, operations are told by their
names and arguments (bench/waiting.py): that holds for what PyTorch runs in models, rounds and prefills of the torch
backend, not for branches that only CUDA takes, nor for our kernels. The last line is one JSON object.
"""

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import specdec
from specdec.errors import AttachError
from specdec.measure.results import write_results
from specdec.targets.experts import expert_configs
from specdec.targets.mixers import find_mixers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.admission import tiny
from bench.waiting import waits_raise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEEN_BY = "sync debug mode" if DEVICE.type == "cuda" else "operations on a CPU"
PROMPTS = [list(range(20, 20 + n)) for n in (13, 5)]


def main() -> None:
    """One row a type and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="only these; default: all of transformers")
    parser.add_argument("--processes", type=int, default=1, help="that share the types; compiling keeps them busy")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no type is begun")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    types = args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows, left, end = [], [], time.time() + args.budget
    with ProcessPoolExecutor(args.processes, get_context("spawn"), initializer=be_quiet) as pool:
        for model_type, found in zip(types, pool.map(rows_of, types, repeat(end)), strict=True):
            left += [model_type] if found is None else []
            rows += found or []
            for row in found or []:
                print(*row.values(), sep="  ", flush=True)
    print("not begun within the budget:", ", ".join(left) or "none")
    if args.out:
        write_results(args.out, "waits", "tiny", vars(args) | {"not_begun": left}, rows)
    print(json.dumps(Counter(row["says"].partition(":")[0] for row in rows)))


def be_quiet() -> None:
    """What transformers says of tiny models is not of interest."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def rows_of(model_type: str, end: float) -> list[dict[str, Any]] | None:
    """Return what `examine` yields, from a process of the pool; None if it is `end` by now, in seconds of the epoch."""
    return None if time.time() > end else list(examine(model_type))


def examine(model_type: str) -> Iterator[dict[str, Any]]:
    """Yield a row a dtype for a type with experts or recurrent layers; nothing for others."""
    try:
        model = tiny(model_type)
        kinds = [name for name, found in (("experts", expert_configs), ("recurrent", find_mixers)) if found(model)]
    except Exception:  # a type that cannot be built is told of by bench/admission.py
        return
    for dtype in DTYPES if kinds else ():
        yield {
            "what": "waits",
            "type": model_type,
            "layers": ", ".join(kinds),
            "dtype": str(dtype).removeprefix("torch."),
            "seen_by": SEEN_BY,
            "says": outcome(model.to(DEVICE, dtype)),
        }


def outcome(model: PreTrainedModel) -> str:
    """Return "never", "refused: why" of what cannot be attached, or "waits: where"."""
    try:
        engine = specdec.attach(model, algo="lookup", num_steps=3, max_batch=2, max_seq_len=64, cuda_graph=False)
    except (AttachError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0][:160]}"
    try:
        engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)  # a first run compiles kernels
        core: Any = engine._core
        for name in ("_fill", "_prefill", "_round"):
            setattr(core, name, guarded(getattr(core, name)))
        engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
    except RuntimeError as error:
        return f"waits: {str(error).splitlines()[0][:160]}"
    finally:
        engine.detach()
    return "never"


def guarded(call: Any) -> Any:
    """Return `call` as a function within which an operation that waits is an error."""

    def run(*args: Any) -> Any:
        with waits_are_errors():
            return call(*args)

    return run


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """RuntimeError within it where the host waits for the device, or, without one, where it would."""
    if DEVICE.type != "cuda":
        with waits_raise():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
