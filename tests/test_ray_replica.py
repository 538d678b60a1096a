"""A replica of Ray Serve without Ray: what a client that disconnects frees."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

import specdec
from tests.test_text import TOKENIZER
from tests.tiny_models import tiny_model


@pytest.fixture
def replica(monkeypatch):
    """A replica around an engine on a tiny model, with requests that run for long."""
    pytest.importorskip("starlette")
    if "ray" not in sys.modules:
        for name in ("ray", "ray.data"):
            module = ModuleType(name)
            vars(module).update(ActorPoolStrategy=SimpleNamespace)
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "specdec.ray", raising=False)
    import specdec.ray as replicas

    replica = object.__new__(replicas.ServeReplica)
    replica.engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_seq_len=400, max_batch=4)
    replica.options = {"max_new_tokens": 300, "ignore_eos": True}
    yield replica
    replica.engine.detach()
    sys.modules.pop("specdec.ray")


def test_clients_that_leave_free_their_rows(replica):
    engine = replica.engine

    async def leave() -> None:
        """Six clients, four of them running, disconnect after the first rounds; another one gets its answer."""
        calls = [asyncio.create_task(replica([3 + i, 4])) for i in range(6)]
        while not any(request.tokens for request in engine._core.scheduler.running) and not calls[0].done():
            await asyncio.sleep(0.001)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        answer = await replica([5, 6], max_new_tokens=3)
        assert len(answer["tokens"]) == 3 and answer["finish_reason"] == "length"

    asyncio.run(leave())
    report = engine.report()
    assert not engine._core.scheduler.running and not engine._core.scheduler.waiting
    assert report.num_free_pages == report.num_pages
