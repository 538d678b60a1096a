"""An lm-eval model on an engine: `lm_eval.simple_evaluate(model=EngineLM(engine), tasks=[...])`.

lm-eval's own model for transformers (HFLM) prepares requests: token ids, windows, chat templates, truncation. The
engine replaces its forwards: likelihoods through packed prefills, texts through rounds. Needs lm-eval, which no other
module imports.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from specdec.core import grouped

WINDOWS = 512  # requests per call of `Engine.score`; between calls results are cached and progress is shown
QUEUE = 16  # requests per call of `Engine.generate`, in units of max_batch

# (texts or None, ids of the context, ids of the continuation), as HFLM passes them
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


class EngineLM(HFLM):
    """The interface of lm-eval (generate_until, loglikelihood, loglikelihood_rolling) on an engine.

    engine: attached, with a tokenizer; its max_seq_len is the longest context that lm-eval may use. options: HFLM's
    own, such as add_bos_token, prefix_token_id, enable_thinking, think_end_token.
    """

    def __init__(self, engine: Any, **options: Any):
        if engine.tokenizer is None:
            raise ValueError("the engine has no tokenizer, and lm-eval's requests are text; attach(..., tokenizer=...)")
        model, length = engine.target_module, engine.config.max_seq_len
        super().__init__(model, tokenizer=engine.tokenizer, max_length=length, batch_size=WINDOWS, **options)
        self.engine = engine

    def _loglikelihood_tokens(
        self, requests: list[TokenRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score continuations; a context that is too long is cut at its beginning, as in HFLM."""
        results: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as progress:
            for part in _parts(requests, WINDOWS):
                contexts = [self._window(context, continuation) for _, context, continuation in part]
                scores = self.engine.score(contexts, [continuation for _, _, continuation in part])
                for (texts, _, _), score in zip(part, scores, strict=True):
                    results.append((score.logprob, score.is_greedy))
                    if texts is not None:  # windows of a rolling likelihood are not separate requests
                        self.cache_hook.add_partial("loglikelihood", texts, results[-1])
                progress.update(len(part))
        return results

    def _window(self, context: list[int], continuation: list[int]) -> list[int]:
        """Return the end of `context` that fits before `continuation`, whose last token is not read."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, the engine reads {self.max_length}; attach with a "
                "larger max_seq_len (max_length=...)"
            )
        return context[-room:]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate for every request until one of its stop strings, EOS or its length; returns texts without them."""
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as progress:
            for same in grouped(range(len(requests)), lambda i: repr(requests[i].args[1])).values():
                for part in _parts(same, QUEUE * self.engine.config.max_batch):
                    asked = [requests[i].args for i in part]
                    for i, request, text in zip(part, asked, self._generate(asked), strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", request, text)
                    progress.update(len(part))
        return [texts[i] for i in range(len(requests))]

    def _generate(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return texts of (context, options) pairs with equal options."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(asked[0][1], self.max_gen_toks))
        until = handle_stop_sequences(options.pop("until"), eos=self.tok_decode([self.eot_token_id], False))
        num_new = options.pop("max_gen_toks")
        if "max_length" in options:
            raise ValueError(f"max_length={options['max_length']} in generation arguments: give max_gen_toks")
        if num_new >= self.max_length:
            raise ValueError(
                f"max_gen_toks={num_new} leaves no room for a prompt in the engine's max_seq_len={self.max_length}; "
                "lower it (--gen_kwargs), or raise it at attach (max_length=...)"
            )
        if options.get("temperature") == 0.0 and not options.get("do_sample"):
            del options["temperature"]  # greedy decoding has none
        prompts = [self._prompt(context, self.max_length - num_new) for context, _ in asked]
        plain, mixed = self._split_stops(until)
        out = self.engine.generate(prompts, max_new_tokens=num_new, stop=plain, **options)
        return [self._text(tokens, until, mixed) for tokens in out.tokens]

    def _prompt(self, context: str, most: int) -> list[int]:
        ids, _mask = self.tok_batch_encode([context], left_truncate_len=most, truncation=self.truncation)
        return ids[0].tolist()

    def _split_stops(self, until: Sequence[str]) -> tuple[list[str], list[list[int]]]:
        """Return the stop strings for the engine, and the ids of those it refuses: special tokens within text."""
        added = self.tokenizer.added_tokens_decoder
        special = {i: str(token) for i, token in added.items() if token.special}
        plain, mixed = [], []
        for string in filter(None, dict.fromkeys(until)):
            is_mixed = string not in special.values() and any(token in string for token in special.values())
            if is_mixed:
                mixed.append(self.tokenizer.encode(string, add_special_tokens=False))
            else:
                plain.append(string)
        return plain, mixed

    def _text(self, tokens: list[int], until: list[str], mixed: Sequence[list[int]]) -> str:
        """Return the text of generated `tokens`, cut as HFLM cuts it."""
        ends = [i + len(ids) for ids in mixed for i in range(len(tokens)) if tokens[i : i + len(ids)] == ids]
        tokens = tokens[: min(ends, default=len(tokens))]
        think = self.think_end_token
        if isinstance(think, int) and think in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(think) :]
        text = self.tok_decode(tokens)
        if isinstance(think, int):
            return postprocess_generated_text(text.lstrip(), stop=until, think_end_token=None)
        return postprocess_generated_text(text, stop=until, think_end_token=think)


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]
