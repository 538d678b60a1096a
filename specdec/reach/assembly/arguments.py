"""Checks the arguments of `attach` before any work, refuses them by name, and builds the EngineConfig."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.core.config import EngineConfig
from specdec.core.errors import AttachError
from specdec.core.ranges import shown, suggest
from specdec.reach.checkpoints.advice import follow_advice
from specdec.reach.checkpoints.tensors import TensorFiles
from specdec.reach.targets.shape import position_limit

DEFAULT_MAX_SEQ_LEN = 2048


def engine_config(target: PreTrainedModel, algo: str | None, settings: dict[str, Any]) -> EngineConfig:
    """Return an engine's config; algo: None for plain decoding. ValueError for settings that do not go together."""
    settings = dict(settings)
    if "max_seq_len" not in settings:
        limit, _ = position_limit(target.config.get_text_config())
        settings["max_seq_len"] = min(limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
    if algo is None:
        _refuse_draft_settings(settings)
        settings.update(num_steps=0, topk=1, num_draft_tokens=1)
    config = EngineConfig(**settings)
    if algo is not None and config.num_steps == 0:
        raise ValueError(
            "num_steps=0 with a draft: expected at least 1 draft step a round; leave the draft out for plain decoding"
        )
    return config


def advised(target: PreTrainedModel, draft: Any, opened: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` completed by the drafting settings that the draft's folder recommends, if the target is on a
    GPU.

    opened: the files of `draft`, if it is a head's checkpoint. CheckpointError for advice that cannot be read.
    """
    if target.device.type != "cuda":
        return settings
    folder = opened.folder if isinstance(opened, TensorFiles) else draft
    is_folder = isinstance(folder, str | Path) and Path(folder).is_dir()
    return follow_advice(Path(folder), settings, EngineConfig.max_batch) if is_folder else settings


def live_model(target: Any) -> PreTrainedModel:
    """Return `target`, a live causal LM, or the one in a PeftModel; AttachError for anything else."""
    if isinstance(target, PreTrainedModel):
        return target
    if isinstance(target, nn.Module) and hasattr(target, "get_base_model"):
        return _without_wrapper(target)
    if isinstance(target, str | Path):
        what, cure = repr(str(target)), "it is a name: load it first, AutoModelForCausalLM.from_pretrained(...).eval()"
    elif isinstance(getattr(target, "_orig_mod", None), PreTrainedModel):
        what, cure = "the result of torch.compile()", "pass the model itself, and compile=True to attach()"
    else:
        what, cure = f"a {type(target).__name__}", "expected a transformers causal LM (a PreTrainedModel)"
    raise AttachError(what, [cure])


def _without_wrapper(wrapped: Any) -> PreTrainedModel:
    """Return the model that PEFT has wrapped; AttachError if the wrapper itself computes something."""
    config = getattr(wrapped, "active_peft_config", None)
    is_activated = bool(getattr(config, "alora_invocation_tokens", None))
    if getattr(config, "is_prompt_learning", False) or is_activated:
        kind = "activated LoRA (alora_invocation_tokens)" if is_activated else config.peft_type.value  # type: ignore[union-attr]
        what = f"its {kind} works in the wrapper's own forward, which an engine does not run"
        raise AttachError(f"a {type(wrapped).__name__}", [f"{what}: expected adapters in layers, such as plain LoRA"])
    return live_model(wrapped.get_base_model())


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError for objects that cannot decode ids, such as a tokenizer's name."""
    if tokenizer is not None and (isinstance(tokenizer, type) or not callable(getattr(tokenizer, "decode", None))):
        name = repr(str(tokenizer)) if isinstance(tokenizer, str | Path) else "..."
        raise ValueError(
            f"tokenizer={tokenizer!r}: expected a tokenizer, which has a decode method, not its name or class; pass "
            f"AutoTokenizer.from_pretrained({name})"
        )


def processor_of(given: Any) -> tuple[Any, Any]:
    """Return the processor that `attach(tokenizer=)` was given, None if it renders no chats, and the tokenizer."""
    own = getattr(given, "tokenizer", None)
    if own is None or not hasattr(given, "image_processor"):
        return None, given
    return (given if getattr(given, "chat_template", None) else None), own


def check_adapters(adapters: Any) -> None:
    """Raise ValueError unless `adapters` lists names, or maps names to folders or Hub ids."""
    names = list(adapters) if isinstance(adapters, Sequence | Mapping) and not isinstance(adapters, str) else [None]
    sources = adapters.values() if isinstance(adapters, Mapping) else ()
    if not all(isinstance(n, str) and n for n in names) or not all(isinstance(s, str | Path) for s in sources):
        raise ValueError(
            f"adapters={adapters!r}: expected names of adapters that are loaded in the model, or a dict from names to "
            "folders or Hub ids"
        )


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError for settings that are not fields of EngineConfig."""
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"{name}={shown(settings[name])}: attach() has no such setting: expected one of {', '.join(known)}"
                f"{suggest(name, known)}"
            )


def check_mapping(name: str, settings: Any) -> None:
    """Raise ValueError unless `settings`, the argument `name`, is None or a mapping from names."""
    if settings is None or (isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)):
        return
    raise ValueError(f'{name}={settings!r}: expected a dict from names to values, such as {{"max_batch": 32}}')


def _refuse_draft_settings(settings: dict[str, Any]) -> None:
    given = sorted(
        {"num_steps", "topk", "num_draft_tokens", "auto_steps", "draft_vocab", "draft_weights"} & set(settings)
    )
    if given:
        raise ValueError(f"{', '.join(given)}: plain decoding drafts nothing; give a draft or leave them out")
