"""Loads the target that generates and teaches, from the values of command-line options."""

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.reach.targets.pretrained import load_pretrained

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(target: str, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """Load target and tokenizer; "auto" is CUDA in bfloat16 if there is a CUDA device, else the CPU in float32."""
    where = device_of(device)
    return load_pretrained(target, dtype=dtype_of(dtype, where), device=where)


def device_of(device: str) -> str:
    """Return `device`, for "auto" CUDA where there is any; ValueError for a device that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    named = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if named is None:
        raise ValueError(f"device={device!r}: expected auto, cpu, cuda, or one of several such as cuda:1")
    if device != "cpu" and int(named[1] or 0) >= count:
        raise ValueError(
            f"device={device!r}: PyTorch {torch.__version__} sees {count} CUDA devices here; take cpu or auto, or "
            "install a PyTorch and a driver for your GPU (`specdec env` shows both)"
        )
    return device


def dtype_of(dtype: str, device: str) -> torch.dtype:
    """Return the dtype of that name; "auto" is bfloat16 on CUDA, else float32."""
    name = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected auto or one of {sorted(DTYPES)}")
    return DTYPES[name]


def special_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Return the ids a hot vocabulary must have: the tokenizer's special tokens and those that end a generation."""
    ends = model.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return {i for i in (*tokenizer.all_special_ids, *listed) if i is not None and i < vocab_size}
