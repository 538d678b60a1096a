"""The face: `attach()` a draft to a live causal LM, and the `Engine` that generates the same text faster."""

import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.assembly import assemble, resolve_algo
from specdec.batch import on_device
from specdec.config import EngineConfig
from specdec.engine import Core
from specdec.errors import CapacityError, DetachedError
from specdec.metrics import AcceptanceStats
from specdec.models.hf import HFTarget
from specdec.outputs import GenerationOutput, GenerationStats, Report, RequestOutput
from specdec.sampling import SamplingParams
from specdec.scheduler import Request
from specdec.state import MAX_STOP_IDS
from specdec.text import Detokenizer, prompts_to_ids

DEFAULT_MAX_SEQ_LEN = 2048


def attach(
    target: PreTrainedModel,
    draft: str | Path | nn.Module | None = None,
    algo: str | None = "auto",
    *,
    tokenizer: Any = None,
    **settings: Any,
) -> "Engine":
    """Attach to a live `transformers` causal LM and return an engine that generates its text.

    target: the model, in eval mode, on one device. It stays usable; `Engine.detach()` leaves it as it was.
    draft: a checkpoint folder, a .gguf file, a Hub id, a loaded head, a live causal LM of the same vocabulary
        ("standalone"), or None for plain decoding. For "nextn" the target's own checkpoint, if it holds MTP layers, or
        a folder that holds only them.
    algo: "auto" (what the checkpoint is, None without a draft), None (plain decoding) or a name of
        `specdec.draft.algo_spec.ALGORITHMS`.
    tokenizer: for text prompts, texts and stop strings; token ids need none.
    settings: fields of `EngineConfig` (num_steps, topk, num_draft_tokens, max_batch, max_seq_len, cuda_graph, ...).

    On CUDA all graphs are captured here, which takes seconds; nothing is captured later.

    Raises AttachError (a ValueError) with every reason why the model cannot be attached, CheckpointError with every
    problem of the draft, CapacityError if it will not fit the device, ValueError for settings out of range and, under
    strict, GraphError for a graph that cannot be made. Nothing is left on the model then.
    """
    name = resolve_algo(draft, algo)
    if "max_seq_len" not in settings:
        limit = getattr(target.config.get_text_config(), "max_position_embeddings", DEFAULT_MAX_SEQ_LEN)
        settings["max_seq_len"] = min(limit, DEFAULT_MAX_SEQ_LEN)
    if name is None:
        _refuse_draft_settings(settings)
        settings.update(num_steps=0, topk=1, num_draft_tokens=1)
    config = EngineConfig(**settings)
    hf = HFTarget(target)
    try:
        with on_device(hf.device):
            return Engine(hf, config, draft, name, tokenizer)
    except BaseException:
        hf.detach()
        raise


class Engine:
    """Generates the target's own text. Made by `attach`; one target, one draft, one KV pool."""

    def __init__(
        self,
        target: HFTarget,
        config: EngineConfig,
        draft: str | Path | nn.Module | None,
        algo: str | None,
        tokenizer: Any,
    ):
        if config.synthetic_acceptance is not None:
            warnings.warn(
                "synthetic_acceptance is on: the engine's text means nothing, only its speed does", stacklevel=3
            )
        self.config = config
        self.tokenizer = tokenizer
        core, self._backend_reason = assemble(target, config, draft, algo, tokenizer)
        self._core: Core | None = core
        self._total = AcceptanceStats()

    def generate(
        self,
        prompts: Any,
        *,
        attention_mask: Any = None,
        max_new_tokens: int | Sequence[int] = 256,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> GenerationOutput:
        """Generate for one prompt or a ragged batch; see `specdec.text.prompts_to_ids` for what a prompt can be.

        sampling: None is greedy; one SamplingParams for all (request i then uses seed + i) or one a prompt.
        stop: strings that end a request; its text ends before the string. stop_token_ids: ids that end it.
        Every argument is checked before any work starts; ValueError (CapacityError for what can never fit).
        """
        requests = self._requests(prompts, attention_mask, max_new_tokens, sampling, stop, stop_token_ids, ignore_eos)
        start = time.perf_counter()
        for _ in self._run(requests):
            pass
        return _output(requests, time.perf_counter() - start)

    def stream(self, prompt: Any, **options: Any) -> Generator[str, None, RequestOutput]:
        """Yield the text of ONE prompt as it becomes certain; the options are those of `generate`.

        The generator's return value is the RequestOutput. Closing it early frees the request's slots.
        """
        if self.tokenizer is None:
            raise ValueError("stream() yields text and the engine has no tokenizer; attach(..., tokenizer=...)")
        defaults: dict[str, Any] = {
            "attention_mask": None,
            "max_new_tokens": 256,
            "sampling": None,
            "stop": (),
            "stop_token_ids": (),
            "ignore_eos": False,
        }
        unknown = set(options) - set(defaults)
        if unknown:
            raise ValueError(f"stream() got unknown options {sorted(unknown)}; expected some of {sorted(defaults)}")
        requests = self._requests(prompt, **{**defaults, **options})
        if len(requests) != 1:
            raise ValueError(f"stream() takes one prompt, got {len(requests)}; use generate() for a batch")
        return self._stream(requests)

    def report(self) -> Report:
        """What the engine is, which paths ran how often, and its acceptance so far."""
        core = self._attached()
        return Report(
            model=type(core.target.model).__name__,
            draft=core.round.worker.facts,
            backend=core.context.backend.name,
            backend_reason=self._backend_reason,
            config=asdict(self.config),
            kv_bytes=core.context.pool.num_bytes,
            num_free_pages=core.slot_tables.num_free_pages,
            num_pages=core.slot_tables.num_pages,
            capture=core.graphs.capture.name,
            prefill_graph=core.prefill.mode,
            compile_seconds=core.compile_seconds,
            graphs=core.prefill.costs + core.graphs.costs,
            runners={
                name: {"replays": c.replays, "eager": c.eager, "rejects": dict(c.rejects)}
                for name, c in core.counters.runners.items()
            },
            paths={mode.name: {"replays": c.replays, "eager": c.eager} for mode, c in core.counters.forwards.items()},
            acceptance=self._total,
        )

    @property
    def target_module(self) -> PreTrainedModel:
        """The live target."""
        return self._attached().target.model

    @property
    def draft_module(self) -> nn.Module | None:
        """The head or the standalone model that drafts, if any."""
        return self._attached().round.worker.module

    def check_integrity(self) -> None:
        """Assert that every KV slot is free or owned by exactly one running request."""
        self._attached().slot_tables.check_integrity()

    def detach(self) -> None:
        """Leave the model as it was and free the pools. The engine cannot generate afterwards."""
        core = self._attached()
        self._core = None
        core.close()

    def _attached(self) -> Core:
        if self._core is None:
            raise DetachedError("this engine was detached from its model; call specdec.attach() for a new one")
        return self._core

    def _stream(self, requests: list[Request]) -> Generator[str, None, RequestOutput]:
        start, request, num_given = time.perf_counter(), requests[0], 0
        for _ in self._run(requests):
            text, num_given = request.text[num_given:], len(request.text)
            if text:
                yield text
        return _output(requests, time.perf_counter() - start).requests[0]

    def _run(self, requests: list[Request]) -> Iterator[None]:
        """Step until `requests` are over; whatever happens, none of them keeps rows or slots.

        Calls may interleave (two streams, say): each steps all running requests and waits for its own.
        """
        core = self._attached()
        core.check_addresses()
        core.scheduler.add(requests)
        try:
            while any(r.finish_reason is None for r in requests):
                self._attached()  # detached between two pieces of a stream: say so
                core.step()
                self._raise_failure(requests)
                yield
            self._raise_failure(requests)
        finally:
            core.abandon([r for r in requests if r.finish_reason is None])
            self._total = self._total.merge([r.acceptance for r in requests])

    @staticmethod
    def _raise_failure(requests: list[Request]) -> None:
        """Raise what has ended one of `requests`: another caller's step may have met it."""
        for request in requests:
            if request.failure is not None:
                raise request.failure

    def _requests(
        self,
        prompts: Any,
        attention_mask: Any,
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        stop_token_ids: Sequence[int],
        ignore_eos: bool,
    ) -> list[Request]:
        """Check everything, then make the requests; nothing has run yet."""
        core = self._attached()
        batch = prompts_to_ids(prompts, self.tokenizer, attention_mask)
        limits = _per_prompt("max_new_tokens", max_new_tokens, len(batch))
        laws = _sampling_per_prompt(sampling, len(batch))
        strings = [stop] if isinstance(stop, str) else list(stop)
        if strings and self.tokenizer is None:
            raise ValueError(f"stop={stop!r} needs a tokenizer; attach(..., tokenizer=...)")
        if not all(strings):
            raise ValueError(f"stop={stop!r}: stop strings must not be empty")
        eos = frozenset() if ignore_eos else _eos_ids(core.target.model)
        stop_ids = tuple(sorted({*eos, *stop_token_ids}))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(stop_ids)} stop ids (EOS included): at most {MAX_STOP_IDS}")
        for i, (ids, limit) in enumerate(zip(batch, limits, strict=True)):
            self._check(core, i, ids, limit)
        return [
            Request(ids, limit, law, stop_ids, eos, Detokenizer(self.tokenizer, strings))
            for ids, limit, law in zip(batch, limits, laws, strict=True)
        ]

    def _check(self, core: Core, index: int, ids: list[int], max_new_tokens: int) -> None:
        if not ids:
            raise ValueError(f"prompt {index} is empty; a target needs at least one token to continue")
        vocab = core.target.spec.vocab_size
        if not all(0 <= t < vocab for t in ids):
            bad = next(t for t in ids if not 0 <= t < vocab)
            raise ValueError(f"prompt {index} holds token {bad}; the target's vocabulary has {vocab} tokens")
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r} for prompt {index}: expected an integer of at least 1")
        total = len(ids) + max_new_tokens
        if total > self.config.max_seq_len:
            raise CapacityError(
                f"prompt {index} has {len(ids)} tokens and may emit {max_new_tokens}: {total} exceed "
                f"max_seq_len={self.config.max_seq_len}; shorten it, lower max_new_tokens, or attach with more"
            )
        core.slot_tables.check_fits(core.scheduler.slots_needed(len(ids), max_new_tokens))


def _refuse_draft_settings(settings: dict[str, Any]) -> None:
    given = sorted({"num_steps", "topk", "num_draft_tokens"} & set(settings))
    if given:
        raise ValueError(f"{', '.join(given)}: plain decoding drafts nothing; give a draft or leave them out")


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or one each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} prompts")
    return list(value)


def _sampling_per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None:
        return [SamplingParams(seed=i) for i in range(count)]  # greedy; only synthetic acceptance draws
    if isinstance(sampling, SamplingParams):
        return [replace(sampling, seed=(sampling.seed + i) % 2**63) for i in range(count)]
    laws = _per_prompt("sampling", sampling, count)
    wrong = next((s for s in laws if not isinstance(s, SamplingParams)), None)
    if wrong is not None:
        raise ValueError(f"sampling={wrong!r}: expected SamplingParams")
    return laws


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """EOS ids as `generate` takes them: from the generation config."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, Iterable) else [ids])


def _output(requests: list[Request], time_s: float) -> GenerationOutput:
    """Outputs in the order of the prompts, and totals."""
    outputs = []
    for r in requests:
        assert r.finish_reason is not None and r.time_s is not None
        first = r.first_token_s if r.first_token_s is not None else r.time_s
        outputs.append(RequestOutput(r.prompt_ids, r.tokens, r.text, r.finish_reason, r.acceptance, first, r.time_s))
    stats = GenerationStats(
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(r.prompt_ids) for r in outputs),
        num_tokens=sum(len(r.tokens) for r in outputs),
        acceptance=AcceptanceStats().merge([r.acceptance for r in outputs]),
        time_s=time_s,
    )
    return GenerationOutput(outputs, stats)
