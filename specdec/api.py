"""The public API: `attach()` a draft to a live causal LM, and the `Engine` that generates the same text faster."""

import asyncio
import sys
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack, aclosing, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.backends.comm import Communicator
from specdec.backends.registry import takes_latents
from specdec.core.batch import on_device, refuse_autocast
from specdec.core.config import EngineConfig
from specdec.core.engine.admission import compile_grammar, make_requests
from specdec.core.engine.core import DETACHED, Core
from specdec.core.engine.driver import Driver
from specdec.core.engine.finished import output_of
from specdec.core.engine.ranks import Ranks
from specdec.core.engine.request import Request
from specdec.core.engine.scoring import Score, score
from specdec.core.errors import DetachedError
from specdec.core.outputs import GenerationOutput, Report, RequestOutput
from specdec.reach.assembly.arguments import (
    advised,
    check_adapters,
    check_settings,
    check_tokenizer,
    engine_config,
    live_model,
    processor_of,
)
from specdec.reach.assembly.assemble import Source, assemble, resolve_draft
from specdec.reach.assembly.report import report_of
from specdec.reach.parallel.sharded import find_group
from specdec.reach.targets.compiling.target import preloading
from specdec.reach.targets.exclusive import ATTACHING
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.lora import Lora
from specdec.reach.targets.marks import owner_of
from specdec.tools.doors.generate import EngineGenerate, install


def attach(
    target: nn.Module,
    draft: str | Path | nn.Module | None = None,
    algo: str | None = "auto",
    *,
    tokenizer: Any = None,
    adapters: Any = (),
    **settings: Any,
) -> "Engine":
    """Attach to a live `transformers` causal LM and return an engine that generates its text.

    target: the model, in eval mode, on one device; docs/engine.md lists the supported quantisations. It stays usable;
        `Engine.detach()`, or dropping the engine, restores it. A `PeftModel` runs with its active adapters. A model
        that transformers has sharded over ranks (tensor parallelism) must be attached on every rank, and every rank
        must make the same calls.
    draft: a checkpoint folder, a .gguf file, a Hub id, a loaded head, a live causal LM of the same vocabulary
        ("standalone"), an assistant of Gemma 4, or None for plain decoding. For "nextn": the target's own checkpoint,
        if it holds MTP layers, or a folder that holds only MTP layers.
    algo: "auto" (read from the checkpoint; None without a draft), None (plain decoding) or a name of
        `reach.assembly.algorithms.algorithms`. "lookup" (prompt lookup) takes no draft: it proposes the tokens that
        followed an earlier occurrence of the last tokens.
    tokenizer: needed for text prompts, output text and stop strings, not for token ids. A processor is accepted too: it
        has a tokenizer and loads the images of chats.
    adapters: LoRA adapters that requests select (`generate(adapter=NAME)`): names of adapters that PEFT has loaded in
        the model, or a dict from names to folders or Hub ids of adapters that PEFT has saved. Requests without
        `adapter` run the model without adapters, whichever is active. LoRA ranks up to 128, in the model's dtype.
    settings: fields of `EngineConfig` (num_steps, topk, num_draft_tokens, max_batch, max_seq_len, cuda_graph, ...). On
        CUDA, speculation.json in a draft's folder may set the first three; arguments given here override it.

    On CUDA all graphs are captured here, which takes seconds; nothing is captured later.

    Raises AttachError (a ValueError) with every reason why the model cannot be attached (under check_kernels also each
    kernel that gives wrong results at the model's sizes on this GPU), CheckpointError with every problem of the draft,
    CapacityError if the engine does not fit in device memory, ValueError for settings out of range, RankError if
    another rank fails and, under strict, GraphError for a graph that cannot be captured. The model is unchanged then.
    """
    model = live_model(target)
    refuse_autocast(model.device)
    check_settings(settings)
    check_tokenizer(tokenizer)
    check_adapters(adapters)
    with ATTACHING:
        name, source = resolve_draft(draft, algo)
        config = engine_config(model, name, advised(model, draft, source, settings))
        group = find_group(model)
        if group is not None and config.auto_steps is not None:
            raise ValueError("num_steps='auto': ranks of a sharded model measure different times; pass a number")
        if group is not None and adapters:
            raise ValueError(f"adapters={adapters!r}: not supported with a sharded model; leave them out")
        ranks = None if group is None else Ranks.of(group)
        attaching = nullcontext() if ranks is None else ranks.attaching((name, config))
        with attaching, preloading(config, model, source, adapters):
            # Adapters of requests may change the layers that would expand latents.
            keeps_latents = config.latents and takes_latents(config.backend) and not adapters
            hf = HFTarget(model, None if ranks is None else partial(_join, ranks), keeps_latents)
            if ranks is not None:
                hf.any_rank = ranks.any_in_attach
            try:
                if adapters:
                    hf.use_lora(Lora(model, hf.spec.stack, adapters))
                with on_device(hf.device):
                    return Engine(hf, config, source, name, tokenizer, ranks)
            except BaseException:
                hf.detach()
                raise


def engine_of(model: nn.Module) -> "Engine | None":
    """Return the engine that is attached to a live model, as its target or as its draft; None if there is none.

    Also finds an engine that no variable holds any more: `install` and `custom_generate=FOLDER` keep it with the model.
    """
    target = owner_of(model)
    return None if target is None else target.used_by()


def _join(ranks: Ranks, comm: Communicator) -> None:
    """Connect ranks and collectives: a collective ends if a rank is gone."""
    comm.wait, ranks.on_lost = partial(ranks.wait, what="a collective"), comm.give_up


class Engine:
    """Generates the target's own text by speculative decoding. Made by `attach`; one target, one draft, one KV pool.

    Any number of threads may call `generate` and `stream`, and any number of asyncio tasks `agenerate` and `astream`:
    their requests are batched together, and each call returns as soon as its own results are there. Other threads may
    call the attached model; such a call waits for the current step to end. Ctrl-C takes effect between two steps.
    """

    def __init__(
        self,
        target: HFTarget,
        config: EngineConfig,
        draft: Source | None,
        algo: str | None,
        tokenizer: Any,
        ranks: Ranks | None = None,
    ):
        if config.synthetic_acceptance is not None:
            warnings.warn("synthetic_acceptance is on: texts are meaningless, only the speed is real", stacklevel=3)
        self.config = config
        self.processor, self.tokenizer = processor_of(tokenizer)
        core, self._backend_reason, self._bits = assemble(target, config, draft, algo, self.tokenizer, ranks)
        self._core: Core | None = core
        self._driver: Driver | None = Driver(core)
        self._installed = ExitStack()
        self._on_detach = ExitStack()
        for model in (self.target_module, self.draft_module):
            owner = None if model is None else owner_of(model)
            if owner is not None:
                owner.used_by = weakref.ref(self)

    def generate(self, prompts: Any = None, **options: Any) -> GenerationOutput:
        """Generate for one prompt or a ragged batch: text, chats or token ids, see `core.text.inputs.prompts_to_ids`.

        `generate(**tokenizer(...))` works as in `model.generate`: input_ids= in place of prompts, and attention_mask=.
        If the model takes images, a prompt can also be its processor's output (`generate(processor(...))`, or
        input_ids with pixel_values= and the like) or a chat with image parts (`attach(tokenizer=processor)`); a list
        can mix all kinds.

        Without options it does what `model.generate` would: the model's own `generation_config` sets sampling,
        penalties, lengths and EOS. If that sets no length, at most 256 tokens are emitted, fewer where max_seq_len
        leaves less room. Options:
        max_new_tokens: one number, or one per prompt. attention_mask: 0 or 1 in the shape of input_ids; ids at 0
        are dropped.
        do_sample, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size, min_new_tokens,
        min_length, max_length, suppress_tokens, begin_suppress_tokens, bad_words_ids, sequence_bias (single tokens),
        eos_token_id, stop_strings, generation_config: as in `model.generate`; None turns one off.
        logit_bias: id -> value added to its logit. frequency_penalty, presence_penalty: as in OpenAI's API. seed: of
        the first request; the others use hashes of it (`request_seed`), so that calls with different seeds share no
        samples; None draws fresh seeds.
        sampling: SamplingParams, one for all or one per prompt, in place of all these but EOS and lengths.
        stop: strings that end a request; its text ends before the string. Only new text is searched, as in OpenAI's
        API, while `stop_strings` may begin in the prompt. stop_token_ids: ids that end a request.
        ignore_eos: go on past EOS. priority: -1000 to 1000; waiting requests of higher priority are admitted first.
        grammar: a `Grammar` that the text follows, or a dict of its fields (such as {"json": schema}); one for all, or
        one or None per prompt. Needs `attach(grammar=)`.
        skip_special_tokens: False keeps special tokens, EOS included, in texts.
        adapter: name of a LoRA adapter that was given to `attach`; one for all, or one or None per prompt.
        deadline: seconds, waiting included, after which a request ends with the tokens it has (finish_reason
        "deadline").

        Every argument is checked before any work starts. ValueError names the argument that is wrong or not supported,
        CapacityError the prompt that can never fit. DetachedError after `detach`, GraphError after a change of the
        model that the engine cannot follow.
        """
        requests, start = self._requests(prompts, **options), time.perf_counter()
        with closing(self._run(requests, wants_tokens=False)) as run:
            for finished in run:
                for request in finished:  # the device runs a round of the others: it does not wait for text
                    request.decode()
        return output_of(requests, time.perf_counter() - start)

    def stream(self, prompt: Any = None, **options: Any) -> Generator[str, None, RequestOutput]:
        """Yield the text of ONE prompt as it becomes certain; the options are those of `generate`.

        The generator's return value is the RequestOutput. Closing it early frees the request's slots. Several streams
        may be read in turn, or each in its own thread; in asyncio there is `astream`.
        """
        return self._stream(self._one_request("stream", prompt, options))

    async def agenerate(self, prompts: Any = None, **options: Any) -> GenerationOutput:
        """Do what `generate` does without blocking the event loop; cancelling the task frees its KV pages."""
        requests, start = await asyncio.to_thread(self._requests, prompts, **options), time.perf_counter()
        async with aclosing(self._driven().run(self._attached().call(requests, wants_tokens=False))) as run:
            async for finished in run:
                for request in finished:
                    request.decode()
        return output_of(requests, time.perf_counter() - start)

    def astream(self, prompt: Any = None, **options: Any) -> AsyncGenerator[str, None]:
        """Yield the text of ONE prompt as it becomes certain: `async for piece in engine.astream(prompt)`.

        The options are those of `generate`. Closing the generator (`contextlib.aclosing`), or cancelling the task that
        reads it, frees the request's slots.
        """
        return self._astream(self._one_request("astream", prompt, options))

    def score(self, prompts: Any, continuations: Any, adapter: str | None = None) -> list[Score]:
        """Return, for every prompt, log p(continuation | prompt) in nats and whether greedy decoding would write it.

        prompts: as in `generate`; continuations: one string or list of ids for each. A continuation is tokenised by
        itself, so its first word keeps its space: score("The capital of France is", " Paris"). Log-probabilities are
        the target's own, before temperature and penalties. Prompts are packed into prefills of the target, which read
        a common prefix once; other requests go on meanwhile. A result is the pair (logprob, is_greedy). adapter: see
        `generate`; one for all.

        ValueError names an empty prompt or continuation, CapacityError a pair longer than max_seq_len.
        """
        return score(self._attached(), self.tokenizer, self.processor, prompts, continuations, adapter)

    def submit(self, prompts: Any = None, **options: Any) -> list[Request]:
        """Queue a request for every prompt, for callers that step the engine themselves: servers, benches.

        Prompts, options and errors are those of `generate`. A request has `tokens`, `finish_reason` (None until it is
        finished) and `read()`, which returns the text since the last call. Requests hold KV slots: the caller calls
        `step` until they are finished, or `abandon`s them.
        """
        requests = self._requests(prompts, **options)
        self._attached().submit(requests)
        return requests

    def compile_grammar(self, grammar: Any) -> Any:
        """Compile a `Grammar`, or a dict of its fields, before `generate(grammar=)` needs it.

        For callers such as servers, where compiling would delay other requests; compiled grammars are cached by their
        text. Pass the result as `grammar=` to this engine. ValueError names what is invalid or not supported.
        """
        return compile_grammar(self._attached(), grammar)

    def step(self) -> bool:
        """Run one prefill or one round of the queued requests and process arrived results; return whether work is left.

        If a launch fails, its error is raised here and ends all running requests, as their `failure`.
        """
        core = self._attached()
        core.step()
        return core.has_work

    def abandon(self, requests: Sequence[Request]) -> None:
        """Drop `requests`, whatever their state, and free their KV slots."""
        self._attached().abandon([r for r in requests if r.finish_reason is None])

    def install(self, on_unsupported: str = "raise") -> ExitStack:
        """Make the attached model's own `generate` decode with this engine: for pipelines, streamers, evaluation code.

        transformers prepares every call as before: arguments and results are those of `model.generate`, and greedy text
        is equal to its own. A call that the engine cannot decode (beams, logits processors in Python) raises
        ValueError, or with on_unsupported="fallback" is decoded by transformers, with a warning. `uninstall`, `detach`
        or the end of `with engine.install():` undoes it.
        """
        self._installed.callback(install(self, on_unsupported))
        leave = ExitStack()
        leave.callback(self.uninstall)
        return leave

    def uninstall(self) -> None:
        """Give the model its own `generate` back; does nothing if `install` was not called."""
        self._installed.close()

    def as_generate(self, on_unsupported: str = "raise") -> EngineGenerate:
        """Return a decoding loop for `model.generate(..., custom_generate=engine.as_generate())`; see `install`."""
        self._attached()
        return EngineGenerate(self, on_unsupported)

    def report(self) -> Report:
        """Return the engine's setup, how often each path ran, and the acceptance so far."""
        core = self._attached()
        with core.turns:
            return report_of(core, self._backend_reason, self._bits)

    @property
    def target_module(self) -> PreTrainedModel:
        """The attached target model."""
        return self._attached().target.model

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may select: `attach(adapters=)`."""
        return tuple(self._attached().target.adapters)

    @property
    def draft_module(self) -> nn.Module | None:
        """The head or the standalone model that drafts; None without one."""
        return self._attached().round.worker.module

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache, and read the adapters of `attach(adapters=)` again. Needed only after a change of
        weights that the engine cannot detect: one through `.data` or `numpy()`, such as PEFT's `merge_and_unload` and
        `hotswap_adapter`. With tensor parallelism a call on one rank is enough."""
        self._attached().clear_prefixes()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every KV slot is free, or held by running requests or the prefix cache."""
        core = self._attached()
        with core.turns:
            core.slot_tables.check_integrity()

    def detach(self) -> None:
        """Restore the model and free the pools. The engine cannot generate afterwards; a second call does nothing.

        If it raises (out of memory while compiled layers give weights back), the model is usable and the engine still
        attached: free some memory and call `detach` again. `with attach(...) as engine:` detaches at its end.
        """
        if self._core is None:
            return
        self._core.close()
        self.uninstall()
        self._on_detach.close()
        self._core = self._driver = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # `sys` may be gone by then
        """Leave the model of an engine that is dropped without detach() free, as in a notebook cell run again.

        No `weakref.finalize`: it would keep the core alive, which keeps a failed request, whose traceback keeps the
        engine.
        """
        core = getattr(self, "_core", None)
        if core is not None and not is_finalizing():
            core.close()

    def __repr__(self) -> str:
        """Name model, draft, shape, capacity, device and state; nothing waits for a step."""
        core, config = self._core, self.config
        if core is None:
            return "<specdec.Engine, detached>"
        worker, queues = core.round.worker, core.scheduler
        draft = f"{algo} draft" if (algo := worker.facts["algo"]) else "no draft"
        if worker.module is not None:
            draft += f" {type(worker.module).__name__}"
        shape = f"num_steps={config.num_steps}, topk={config.topk}, num_draft_tokens={config.num_draft_tokens}"
        size = f"max_batch={config.max_batch}, max_seq_len={config.max_seq_len}"
        state = f"{len(queues.running)} running, {len(queues.waiting)} waiting"
        model = type(core.target.model).__name__
        return f"<specdec.Engine of {model}, {draft}, {shape}, {size}, {core.device}, {state}>"

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _attached(self) -> Core:
        if self._core is None:
            raise DetachedError(DETACHED)
        return self._core

    def _stream(self, requests: list[Request]) -> Generator[str, None, RequestOutput]:
        start, request = time.perf_counter(), requests[0]
        with closing(self._run(requests)) as run:  # from Python 3.12 on, closing this would not close `run`
            for _ in run:
                if text := request.read():
                    yield text
        return output_of(requests, time.perf_counter() - start).requests[0]

    async def _astream(self, requests: list[Request]) -> AsyncGenerator[str, None]:
        async with aclosing(self._driven().run(self._attached().call(requests))) as run:
            async for _ in run:
                if text := requests[0].read():
                    yield text

    def _driven(self) -> Driver:
        if self._driver is None:
            raise DetachedError(DETACHED)
        return self._driver

    def _run(self, requests: list[Request], wants_tokens: bool = True) -> Generator[list[Request], None, None]:
        """Yield those of `requests` that have finished, with `wants_tokens` after each round; in any case, none of them
        keeps rows or slots at the end.

        Calls may interleave, as streams do, or come from several threads: one of them steps for all.
        """
        core = self._attached()
        call = core.call(requests, wants_tokens)
        try:
            core.submit(requests, steps_next=True)
            while not call.is_over:
                core.collect(call)
                yield call.take()
        finally:
            if call.left:
                with core.turns:
                    core.abandon(list(call.left))

    def _one_request(self, caller: str, prompt: Any, options: dict[str, Any]) -> list[Request]:
        """Return the request of a stream, in a list."""
        if self.tokenizer is None:
            raise ValueError(f"{caller}() yields text and the engine has no tokenizer; attach(..., tokenizer=...)")
        requests = self._requests(prompt, **options)
        if len(requests) != 1:
            batch = caller.replace("stream", "generate")
            raise ValueError(f"{caller}() takes one prompt, got {len(requests)}; use {batch}() for a batch")
        return requests

    def _requests(self, prompts: Any, **options: Any) -> list[Request]:
        """Return checked requests that are not queued yet; the options are those of `generate`."""
        return make_requests(self._attached(), self.tokenizer, self.processor, prompts, **options)
