"""Ray: an engine in every replica, for datasets (`generate`) and for HTTP (`serve_app`). Needs Ray, imported only here.

    import ray, specdec.ray
    rows = ray.data.read_json("prompts.jsonl")                    # with a column "prompt"
    done = specdec.ray.generate(rows, "TARGET", "HEAD", replicas=8, options={"max_new_tokens": 256})
    done.write_parquet("answers")                                 # with columns "text" and "tokens" beside the others

A replica is a process with one GPU, if the cluster has any. One that dies is started again by Ray Data, as often as
need be, and what it had not handed over is generated again, as a whole: no row is lost, and none comes twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec import shipped
from specdec.api import Engine, attach
from specdec.core.outputs import GenerationOutput
from specdec.core.ranges import whole
from specdec.reach.assembly.arguments import check_mapping, check_settings
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.train.target import load

try:
    import ray
    from ray.data import ActorPoolStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("specdec.ray needs Ray: pip install 'specdec-toolkit[ray]'", name=error.name) from error


class Replica:
    """Loads a target and attaches an engine, in the process where it runs; its arguments can be serialised.

    target: folder, .gguf file or Hub id that every node can read. draft: what `attach` takes as a name, or the name of
    a shipped draft; None decodes plainly. settings: fields of `EngineConfig`. options: those of `Engine.generate`, for
    every prompt.
    """

    def __init__(
        self,
        target: str = BUNDLED,
        draft: str | None = None,
        algo: str | None = "auto",
        *,
        dtype: str = "auto",
        device: str = "auto",
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        _check({"settings": settings, "options": options})
        model, tokenizer = load(target, dtype, device)
        source = None if draft is None else shipped.find(draft)
        self.engine: Engine = attach(model, source, algo, tokenizer=tokenizer, **(settings or {}))
        self.options = dict(options or {})

    def generate(self, prompts: Sequence[Any], **options: Any) -> GenerationOutput:
        """Generate for `prompts`: text, chats or token ids; `options` override the replica's own."""
        return self.engine.generate(list(prompts), **{**self.options, **options})


class BatchReplica(Replica):
    """A replica for `Dataset.map_batches(BatchReplica, fn_constructor_kwargs=...)`.

    column: the column of the prompts. A batch keeps its columns and gets "text" (str) and "tokens" (lists of ids).
    """

    def __init__(self, *args: Any, column: str = "prompt", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.column = column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """batch: column -> array of rows, as Ray Data passes them."""
        if self.column not in batch:
            raise ValueError(f"column={self.column!r}: the rows have {sorted(batch)}; name the one with the prompts")
        # lists of ids or messages arrive as arrays
        out = self.generate([v.tolist() if isinstance(v, np.ndarray) else v for v in batch[self.column]])
        return {**batch, "text": _column(out.texts), "tokens": _column(out.tokens)}


def generate(
    dataset: Any,
    target: str = BUNDLED,
    draft: str | None = None,
    *,
    replicas: int = 1,
    batch_size: int = 256,
    num_cpus: float | None = None,
    replica: type[BatchReplica] = BatchReplica,
    **kwargs: Any,
) -> Any:
    """Return `dataset` (a ray.data.Dataset) with "text" and "tokens" for every "prompt"; lazy, as all of Ray Data.

    batch_size: rows that a replica takes at a time, of which it decodes settings["max_batch"] together. num_cpus: of
    each replica. replica: its class; a subclass can process prompts and texts in the same process. kwargs: those of
    `BatchReplica`. With a seed in options, row i of a batch uses `request_seed(seed, i)`. ValueError: replicas or
    batch_size below 1.
    """
    _check(kwargs, replicas=replicas, batch_size=batch_size)
    return dataset.map_batches(
        replica,
        fn_constructor_kwargs={"target": target, "draft": draft, **kwargs},
        batch_size=batch_size,
        compute=ActorPoolStrategy(size=replicas),
        **_resources(num_cpus),
    )


def serve_app(
    target: str = BUNDLED,
    draft: str | None = None,
    *,
    replicas: int = 1,
    max_ongoing_requests: int = 64,
    num_cpus: float | None = None,
    **kwargs: Any,
) -> Any:
    """Return a Ray Serve application: `ray.serve.run(specdec.ray.serve_app("TARGET", "HEAD", replicas=8))`.

    POST {"prompt": ..., and options of `Engine.generate`} returns {"text", "tokens", "finish_reason"}, or status 400
    with {"error"} if the engine refuses. A handle takes the same: `handle.remote(prompt, max_new_tokens=64)`. A replica
    decodes its requests together, at most max_ongoing_requests; further ones wait. kwargs: those of `Replica`.
    """
    _check(kwargs, replicas=replicas, max_ongoing_requests=max_ongoing_requests)
    from ray import serve

    deploy = serve.deployment(
        name="specdec",
        num_replicas=replicas,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options=_resources(num_cpus),
    )
    return deploy(ServeReplica).bind(target, draft, **kwargs)


class ServeReplica(Replica):
    """A replica behind Ray Serve. A client that disconnects cancels its call, which frees its rows and pages."""

    async def __call__(self, request: Any, **options: Any) -> Any:
        """request: an HTTP request, or from a handle a prompt."""
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        if not isinstance(request, Request):
            return await self._answer(request, options)
        try:
            body = await request.json()
            if not isinstance(body, dict) or "prompt" not in body:
                raise ValueError('expected a JSON object with "prompt"')
            return await self._answer(body.pop("prompt"), body)
        except (ValueError, TypeError) as error:  # not JSON, or refused by the engine
            return JSONResponse({"error": str(error)}, status_code=400)

    async def _answer(self, prompt: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        answer = (await self.engine.agenerate([prompt], **{**self.options, **options})).requests[0]
        return {"text": answer.text, "tokens": answer.tokens, "finish_reason": answer.finish_reason}


def _resources(num_cpus: float | None) -> dict[str, Any]:
    """Return the resources that a replica requests: a GPU if the cluster has any."""
    if not ray.is_initialized():
        ray.init()
    resources: dict[str, Any] = {"num_gpus": 1} if ray.cluster_resources().get("GPU", 0) else {}
    return resources if num_cpus is None else {**resources, "num_cpus": num_cpus}


def _check(kwargs: Mapping[str, Any], **sizes: int) -> None:
    """Raise ValueError here rather than in a replica that Ray would restart again and again."""
    for name, value in sizes.items():
        whole(1).check(name, value)
    for name in ("settings", "options"):
        check_mapping(name, kwargs.get(name))
    check_settings(dict(kwargs.get("settings") or {}))


def _column(values: Sequence[Any]) -> np.ndarray:
    """Return one object per row; numpy would make a matrix of lists of equal lengths."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
