"""`model.generate` by an engine, for pipelines, streamers, evaluation and training code.

transformers prepares a call as always: it resolves the config, makes the mask, the processors and the stopping
criteria, and repeats prompts. The engine replaces the decoding loop after that (`GenerationMixin._sample`). A call that
the engine cannot decode as that loop would is refused, or left to it.
"""

import inspect
import types
import warnings
from collections.abc import Callable
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from specdec.core.batch import refuse_autocast
from specdec.core.engine.generation import Settings
from specdec.core.engine.prompts import embed_prompts
from specdec.core.engine.request import Request
from specdec.core.engine.scoring import continuation_logits
from specdec.tools.doors.checks import (
    check_forward_arguments,
    check_processors,
    check_rotary,
    refuse_counted_padding,
)
from specdec.tools.doors.lockstep import Lockstep

WAYS = ("raise", "fallback")


@dataclass(frozen=True)
class GenerateCall:
    """A prepared call: requests that are not queued yet, and the criteria that the engine does not know.

    pads: finished rows are padded with `pad_token`, as in transformers if there is an EOS.
    """

    input_ids: torch.Tensor
    requests: list[Request]
    criteria: StoppingCriteriaList
    pads: bool
    pad_token: int
    streamer: Any


class EngineGenerate:
    """A decoding loop for `generate(custom_generate=...)`: rounds of one engine, with the results of `_sample`.

    on_unsupported: "raise" ValueError for calls that the engine does not support, or "fallback" to transformers' own
    loop, with a warning. transformers passes no streamer to a `custom_generate`: use `Engine.install` for streamers.
    """

    def __init__(self, engine: Any, on_unsupported: str = "raise"):
        if on_unsupported not in WAYS:
            raise ValueError(f"on_unsupported={on_unsupported!r}: expected one of {WAYS}")
        if engine.adapters:
            raise ValueError(
                "this engine has adapters by request, and model.generate would get none of them: call "
                "engine.generate(adapter=NAME), or attach without adapters"
            )
        self.engine = engine
        self.on_unsupported = on_unsupported

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        prepared = (logits_processor, stopping_criteria, generation_config)
        try:
            call = _read(self.engine, model, input_ids, *prepared, streamer, model_kwargs)
        except ValueError as error:
            name = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
            loop = getattr(type(model), name, None)  # modes that transformers has moved to the Hub have none
            if self.on_unsupported == "raise" or loop is None:
                raise
            if streamer is not None and name == "_beam_search":
                raise ValueError(
                    "streamer: transformers cannot stream beam search; leave it or num_beams out"
                ) from error
            warnings.warn(f"decoded by transformers, without speculation: {error}", stacklevel=4)
            return loop(model, input_ids, *prepared, streamer=streamer, **model_kwargs)
        sequences = _run(self.engine, call)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, **_scores(self.engine, call, sequences, logits_processor, generation_config)
        )


class InstalledGenerate:
    """`generate` of an attached model, by an engine. Copies and pickles of the model have transformers' own."""

    def __init__(self, decode: EngineGenerate, model: Any):
        self._model = model
        self._generate = generate_by(decode)
        self.__doc__ = self._generate.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._generate(self._model, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _own_generate, (self._model,)


def _own_generate(model: Any) -> types.MethodType:
    """Return the `generate` of the model's type, as a method of `model`."""
    return types.MethodType(type(model).generate, model)


def install(engine: Any, on_unsupported: str) -> Callable[[], None]:
    """Replace `generate` of the attached model; return the function that restores it."""
    model = engine.target_module
    if vars(model).get("generate", _own_generate(model)) != _own_generate(model):  # a copy has its own as an attribute
        raise ValueError("model.generate is replaced already; uninstall() that engine, or delete model.generate, first")
    decode = EngineGenerate(engine, on_unsupported)
    model.generate = ours = InstalledGenerate(decode, model)

    def undo() -> None:
        if vars(model).get("generate") is ours:  # keep what others have set since
            del model.generate

    return undo


def generate_by(decode: EngineGenerate) -> Callable[..., Any]:
    """Return a `generate`, a method of a model, that prepares calls as the model's own does and decodes by `decode`."""

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(model).generate
        given = inspect.signature(own).bind(model, *args, **kwargs).arguments
        options = {**given.pop("kwargs", {}), **given}
        del options["self"]
        if options.get("custom_generate") is not None:
            return own(model, **options)
        error = _refused_unprepared(options)
        if error is not None:
            if decode.on_unsupported == "raise":
                raise ValueError(error)
            warnings.warn(f"decoded by transformers: {error}", stacklevel=3)
            return own(model, **options)
        streamer = options.get("streamer")  # stays in options, too: transformers puts the prompt

        def loop(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
            return decode(model, input_ids, streamer=streamer, **prepared)

        return own(model, **_with_stop_strings(model, options, decode.engine.tokenizer) | {"custom_generate": loop})

    generate.__doc__ = f"By a specdec engine: {type(decode.engine.target_module).generate.__doc__}"
    return generate


def _refused_unprepared(options: dict[str, Any]) -> str | None:
    """Return why the engine cannot decode a call; None if it may. transformers passes neither the assistant nor the
    tokenizer to custom decoding loops, so this is checked before it prepares the call."""
    if options.get("assistant_model") is not None:
        return "assistant_model: the engine has a draft of its own; attach another one, or leave this one out"
    if options.get("token_healing", getattr(options.get("generation_config"), "token_healing", None)):
        return "token_healing: trim the prompt yourself, or leave it out"
    return None


def _with_stop_strings(model: Any, options: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Turn stop strings, of the call or the model, into a criterion: transformers passes their tokenizer only to its
    own loops."""
    configs = (options.get("generation_config"), model.generation_config)
    shipped = (getattr(config, "stop_strings", None) for config in configs)
    strings = options["stop_strings"] if "stop_strings" in options else next(filter(None, shipped), None)
    if not strings:
        return options
    tokenizer = options.get("tokenizer") or tokenizer
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} need a tokenizer: generate(tokenizer=...) or attach(tokenizer=...)")
    criteria = [*(options.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
    options = {name: value for name, value in options.items() if name != "tokenizer"}
    return {**options, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def _read(
    engine: Any,
    model: Any,
    input_ids: torch.Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> GenerateCall:
    """Check a prepared call and make its requests; ValueError if the engine cannot decode it as transformers would."""
    if model is not engine.target_module:
        raise ValueError(f"this {type(model).__name__} is not the model that the engine is attached to")
    refuse_autocast(model.device)
    images = check_forward_arguments(model_kwargs, engine._attached().target.images)
    check_processors(model, input_ids, processors, config, model_kwargs)
    length = input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        like = tuple(input_ids.shape)
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: expected that of input_ids, {like}")
    prompts = [row[keep].tolist() for row, keep in zip(input_ids.cpu(), mask.cpu().bool(), strict=True)]
    wanted = [name for name in ("output_scores", "output_logits") if getattr(config, name)]
    config = _without_ends(config)
    settings = Settings.merge(None, config)  # ValueError names the first that the engine does not honour
    if not bool(mask.all()):
        refuse_counted_padding(settings)
    limits = [c.max_length - length for c in criteria if type(c) is MaxLengthCriteria]
    ends = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    eos_ids = sorted({i for ids in ends for i in ids.flatten().tolist() if i >= 0})  # -1 is no token
    others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    limit = min(limits, default=engine.config.max_seq_len - max(map(len, prompts)))
    law = settings.params(length)
    law = replace(law, min_new_tokens=min(law.min_new_tokens, max(limit, 0)))  # transformers only warns of more
    requests = engine._requests(
        prompts,
        sampling=[law] * len(prompts),
        generation_config=config,
        max_new_tokens=limit,
        eos_token_id=eos_ids or None,
        stop=(),  # strings and clocks are criteria by now
        max_time=None,
    )
    positions = model_kwargs.get("position_ids")
    if images:
        if positions is not None and positions.dim() == 3:  # rotary positions follow those of text
            images["position_ids"] = positions[1:] if len(positions) > 3 else positions
        embed_prompts(engine._attached(), requests, {"input_ids": input_ids, "attention_mask": mask, **images})
    if wanted and any(request.embedded is not None for request in requests):
        raise ValueError(f"{wanted[0]}: the engine scores texts without images only; leave it out, or uninstall()")
    check_rotary(requests, mask, positions)
    pad = getattr(config, "_pad_token_tensor", None)
    pad_token = 0 if pad is None else int(pad)
    return GenerateCall(input_ids, requests, StoppingCriteriaList(others), bool(ends), pad_token, streamer)


def _run(engine: Any, call: GenerateCall) -> torch.Tensor:
    """Run rounds until every row is finished by transformers' rules; return sequences [B, T + new]."""
    rows = Lockstep(call.input_ids, call.requests, call.criteria, call.pad_token if call.pads else None)
    with closing(engine._run(call.requests)) as run:
        for _ in run:
            _put(call.streamer, rows.advance())
            if rows.is_over:
                break  # requests that are ahead of a criterion are abandoned
    if any(r.finish_reason == "error" for r in call.requests):
        raise RuntimeError("generation ended: the target's logits are not finite")
    assert rows.is_over, "requests ended, and their rows did not"
    if call.streamer is not None:
        call.streamer.end()
    return rows.sequences()


def _scores(
    engine: Any, call: GenerateCall, sequences: torch.Tensor, processors: Any, config: Any
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return logits and processed scores of every column, [B, V] fp32 each, if requested.

    Rounds keep no logits: the target reads all sequences once more, as a prefill, which gives the same up to rounding.
    """
    wanted = {name for name in ("scores", "logits") if getattr(config, f"output_{name}")}
    if not wanted:
        return {}
    width = call.input_ids.shape[1]
    prompts = [request.prompt_ids for request in call.requests]
    by_row = continuation_logits(engine._attached(), prompts, sequences[:, width:].tolist())
    logits = torch.stack(by_row, 1).unbind()
    found = {"logits": logits} if "logits" in wanted else {}
    if "scores" in wanted:
        befores = (sequences[:, : width + i] for i in range(len(logits)))
        found["scores"] = tuple(processors(ids, row.clone()) for ids, row in zip(befores, logits, strict=True))
    return found


def _put(streamer: Any, columns: list[list[int]]) -> None:
    """Pass new tokens to a streamer: those of a single row together, else one column per call."""
    if streamer is None or not columns:
        return
    if len(columns[0]) == 1:
        streamer.put(torch.tensor([token for (token,) in columns], device="cpu"))
        return
    for column in columns:
        streamer.put(torch.tensor(column, device="cpu"))


def _without_ends(config: Any) -> Any:
    """Copy `config` without settings that transformers has applied already, or applies by its criteria."""
    config = copy(config)
    config.num_return_sequences, config.max_time, config.stop_strings = 1, None, None
    config.output_scores = config.output_logits = False
    return config
