"""The settings of `generation_config` and keyword arguments of `transformers`: each is honoured or refused by name.

As in `model.generate`, an argument of the call overrides the call's config, which overrides the model's own; settings
that are not set have the defaults of `transformers`. Knows no engine: the results are SamplingParams and limits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

from specdec.core.ranges import FLAG, TOKEN_IDS, shown, suggest, whole
from specdec.core.sampling_params import RANGES, SamplingParams

# Defaults for settings that are not set: as in `transformers`, sampling keeps the best 50 tokens.
HF_DEFAULTS = MappingProxyType({"do_sample": False, "temperature": 1.0, "top_k": 50})

# Used only with do_sample, as in `transformers`, with the values that ask for nothing, or for the best token.
NEUTRAL: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"temperature": (0, 1), "top_k": (0, 1, 50), "top_p": (0, 1), "min_p": (0, 1)}
)
LAW = tuple(NEUTRAL)
RULES = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "min_length",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
)
LENGTHS = ("max_new_tokens", "max_length")
STOPS = ("eos_token_id", "stop_strings")
OURS = ("logit_bias", "seed", "frequency_penalty", "presence_penalty")  # not in `transformers`
HONOURED = frozenset({"do_sample", *LAW, *RULES, *LENGTHS, *STOPS, *OURS})

# Settings that change neither tokens nor text here: caches, speed, ids that only padding and encoders need.
_CACHES = ("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size")
_SPEED = ("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type")
_ASSISTANTS = (
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
)
_BEAMS = ("early_stopping", "length_penalty")  # beams themselves are refused by `num_beams`
_OTHERS = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "renormalize_logits", "return_dict_in_generate")
HARMLESS = frozenset({*_CACHES, *_SPEED, *_ASSISTANTS, *_BEAMS, *_OTHERS, "transformers_version"})


def _unless(*neutral: Any) -> Callable[[Any], bool]:
    def is_off(value: Any) -> bool:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return any(value is n or (is_number and value == n) for n in neutral)

    return is_off


# Refused unless their value means "off": name -> (test for "off", reason or advice).
_ONE, _OFF = _unless(1, 1.0), _unless(False, 0, 0.0)
REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "num_beams": (_ONE, "one sequence is decoded, not beams"),
        "num_beam_groups": (_ONE, "one sequence is decoded, not beams"),
        "diversity_penalty": (_OFF, "one sequence is decoded, not beams"),
        "constraints": (_unless(), "constrained beam search is not supported"),
        "force_words_ids": (_unless(), "constrained beam search is not supported"),
        "num_return_sequences": (_ONE, "give the prompt several times instead"),
        "max_time": (_unless(), "generate and submit take deadline= for it"),
        "encoder_repetition_penalty": (_unless(1.0), "use repetition_penalty"),
        "encoder_no_repeat_ngram_size": (_OFF, "use no_repeat_ngram_size"),
        "forced_bos_token_id": (_unless(), "append the token to the prompt"),
        "forced_eos_token_id": (_unless(), "append the token to the output"),
        "exponential_decay_length_penalty": (_unless(), "use max_new_tokens, or logit_bias on EOS"),
        "remove_invalid_values": (_OFF, "logits that are not finite end a request with finish_reason 'error'"),
        "guidance_scale": (_ONE, "classifier-free guidance needs a second forward"),
        "watermarking_config": (_unless(), "watermarks are not supported"),
        "token_healing": (_OFF, "trim the prompt yourself"),
        "penalty_alpha": (_OFF, "contrastive search is not supported"),
        "dola_layers": (_unless(), "DoLa decoding is not supported"),
        "output_scores": (_OFF, "model.generate returns them under engine.install()"),
        "output_logits": (_OFF, "model.generate returns them under engine.install()"),
        "output_attentions": (_OFF, "attentions are not returned"),
        "output_hidden_states": (_OFF, "hidden states are not returned"),
    }
)
# The same, for settings that `transformers` uses only when sampling.
REFUSED_SAMPLED: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "typical_p": (_ONE, "use top_p or min_p"),
        "top_h": (_unless(), "use top_p or min_p"),
        "epsilon_cutoff": (_OFF, "use min_p"),
        "eta_cutoff": (_OFF, "use min_p"),
    }
)
# Arguments of `generate` that are not settings.
REFUSED_ARGUMENTS = MappingProxyType(
    {
        "logits_processor": "processors run in Python; express it with the settings that SamplingParams has",
        "stopping_criteria": "use stop, stop_token_ids or max_new_tokens",
        "prefix_allowed_tokens_fn": "it runs in Python; express it as a grammar: generate(..., grammar=Grammar(...))",
        "streamer": "use Engine.stream()",
        "assistant_model": "attach the draft: specdec.attach(target, draft)",
        "negative_prompt_ids": "classifier-free guidance needs a second forward",
        "inputs_embeds": "prompts are token ids or text",
        "custom_generate": "call model.generate for it",
        "tokenizer": "attach(..., tokenizer=...) takes it",
    }
)

_ACCEPTED = HONOURED | HARMLESS
# Arguments of `Engine.generate` that are not settings, and what others call some of its arguments.
_ENDS = ("stop", "stop_token_ids", "ignore_eos", "deadline")
_PROMPTS = ("input_ids", "attention_mask", "adapter")
_ENGINES = (*_PROMPTS, "sampling", "generation_config", *_ENDS, "priority", "grammar", "skip_special_tokens")
_ALIASES = MappingProxyType(
    dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_new_tokens")
    | {"min_tokens": "min_new_tokens", "stop_sequences": "stop", "bad_words": "bad_words_ids", "temp": "temperature"}
    | {"inputs": "input_ids", "prompt": "prompts", "prompts": "prompt"}
)
_LENGTH = whole(0)
# Settings that SamplingParams has under the same name, besides LAW.
_TAKEN_OVER = (*(name for name in (*RULES, *OURS) if name not in ("min_length", "sequence_bias")),)
_EVERY_REFUSED = MappingProxyType({**REFUSED, **REFUSED_SAMPLED})
_KNOWN = (*_ACCEPTED, *_EVERY_REFUSED, *REFUSED_ARGUMENTS, *_ENGINES)
GREEDY = SamplingParams()


@dataclass(frozen=True)
class Settings:
    """All settings of one call. values: those that are set, by name; given: names of those the call itself sets."""

    values: Mapping[str, Any]
    given: frozenset[str]

    @classmethod
    def merge(
        cls, model_config: Any, call_config: Any = None, arguments: Mapping[str, Any] | None = None
    ) -> "Settings":
        """Merge the arguments of a call, its GenerationConfig, and the model's own.

        None turns a setting off. ValueError names an unsupported setting, its value and what to do.
        """
        arguments = {n: tuple(v) if isinstance(v, Iterator) else v for n, v in (arguments or {}).items()}
        _refuse_arguments(arguments)
        of_call = _set_values(call_config)
        values = {**_set_values(model_config), **of_call, **arguments}
        settings = cls(values, frozenset({*of_call, *arguments}))
        settings._check()
        law = {n: arguments[n] for n in LAW if arguments.get(n) is not None}
        if law:
            SamplingParams(**law)  # a value that is wrong anyway raises here
        is_used = settings.samples or law.get("temperature") == 0  # which the best token fulfils, whatever else is said
        idle = [n for n in law if law[n] not in NEUTRAL[n] and not is_used]
        if idle:
            raise ValueError(
                f"{idle[0]}={arguments[idle[0]]!r} does nothing with do_sample=False, which is the default: pass "
                f"do_sample=True, or sampling=SamplingParams({idle[0]}={arguments[idle[0]]!r}); on the command line, "
                "--temperature 1"
            )
        return settings

    def get(self, name: str) -> Any:
        """Return the value of a setting, by default that of `transformers`; None: off."""
        return self.values[name] if name in self.values else HF_DEFAULTS.get(name)

    @property
    def samples(self) -> bool:
        """True if tokens are sampled, not chosen by argmax."""
        return bool(self.get("do_sample"))

    def params(self, prompt_len: int) -> SamplingParams:
        """Return the SamplingParams of a request whose prompt has `prompt_len` tokens."""
        samples = self.samples
        names = (*LAW, *_TAKEN_OVER) if samples else _TAKEN_OVER
        chosen = {name: value for name in names if (value := self.get(name)) is not None}
        if samples:
            chosen.setdefault("temperature", 1.0)
        if self.counts_prompts:
            chosen["min_new_tokens"] = max(_LENGTH.check("min_length", self.get("min_length")) - prompt_len, 0)
        bias = self.get("sequence_bias")
        if bias is not None:
            biases, own = _single_tokens(bias), RANGES["logit_bias"].check("logit_bias", chosen.get("logit_bias", {}))
            chosen["logit_bias"] = {**biases, **{token: own[token] + biases.get(token, 0.0) for token in own}}
        return SamplingParams(**chosen) if chosen else GREEDY

    @property
    def counts_prompts(self) -> bool:
        """True if `params` depends on the prompt's length."""
        return self.get("min_new_tokens") is None and self.get("min_length") is not None

    def max_new_tokens(self, prompt_len: int) -> int | None:
        """Return the most tokens a request may emit, None for no limit; ValueError if max_length leaves no room."""
        if self.get("max_new_tokens") is not None:
            return self.get("max_new_tokens")
        if self.get("max_length") is None:
            return None
        limit = _LENGTH.check("max_length", self.get("max_length")) - prompt_len
        if limit < 1:
            raise ValueError(
                f"max_length={self.get('max_length')} leaves no room after a prompt of {prompt_len} tokens; "
                "raise it, or give max_new_tokens"
            )
        return limit

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        ids = self.get("eos_token_id")
        if ids is None:
            return frozenset()
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        return frozenset(TOKEN_IDS.check("eos_token_id", [ids] if not isinstance(ids, Sequence) else ids))

    def _check(self) -> None:
        if self.get("do_sample") is not None:
            FLAG.check("do_sample", self.get("do_sample"))
        for name, value in self.values.items():
            if value is None or name in _ACCEPTED or (name in REFUSED_SAMPLED and not self.samples):
                continue
            is_off, cure = _EVERY_REFUSED.get(name, (_unless(), "it is not known to specdec"))
            if not is_off(value):
                whose = "this call" if name in self.given else "the model's generation_config"
                raise ValueError(
                    f"{name}={shown(value)}, of {whose}, would change the text and is not supported: {cure}"
                    + ("" if name in self.given else f", or pass {name}=None to go without")
                )


def shipped_settings(model_config: Any) -> dict[str, Any]:
    """Return the settings of a model's own generation_config that change text, for a report."""
    values = _set_values(model_config).items()
    return {n: v for n, v in values if n not in HARMLESS and not (n in _EVERY_REFUSED and _EVERY_REFUSED[n][0](v))}


def _set_values(config: Any) -> dict[str, Any]:
    """Return the values that a GenerationConfig sets, by name."""
    if config is None:
        return {}
    if not hasattr(config, "to_dict"):
        raise ValueError(f"generation_config={config!r}: expected a transformers GenerationConfig")
    # Names with an underscore are bookkeeping of transformers: tensors made from ids, where a config came from.
    return {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name in REFUSED_ARGUMENTS and value is not None:
            raise ValueError(f"{name} is not supported: {REFUSED_ARGUMENTS[name]}")
    unknown = next((name for name in arguments if name not in _KNOWN), None)
    if unknown is not None:
        raise ValueError(
            f"{unknown}={shown(arguments[unknown])}: generate() has no such option: expected settings of "
            f"GenerationConfig, {', '.join((*OURS, *_ENGINES))}{suggest(unknown, _KNOWN, _ALIASES)}"
        )


def _single_tokens(sequence_bias: Any) -> dict[int, float]:
    """Return `sequence_bias` of single tokens as `logit_bias`; ValueError for longer sequences."""
    pairs = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
    try:
        biases = {tuple(tokens): bias for tokens, bias in pairs}
    except (TypeError, ValueError):
        raise ValueError(
            f"sequence_bias={shown(sequence_bias)}: expected a mapping from tuples of token ids to biases, or pairs"
        ) from None
    for tokens in biases:
        if len(TOKEN_IDS.check("sequence_bias", tokens)) != 1:
            raise ValueError(
                f"sequence_bias of {list(tokens)}: only single tokens can be biased; bad_words_ids bans sequences"
            )
    return RANGES["logit_bias"].check("sequence_bias", {token: bias for (token,), bias in biases.items()})
