"""Ray on one machine: a dataset through two replicas, one of which dies half-way; an application of Ray Serve."""

from __future__ import annotations

import copy
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specdec import shipped

SETTINGS = {"max_batch": 4, "num_steps": 2, "max_seq_len": 128}
OPTIONS = {"max_new_tokens": 8, "do_sample": False}
PROMPTS = [f"Here is a story about {i} cats and {i + 1} dogs. Once upon a time, there were" for i in range(12)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    pytest.importorskip("ray.serve")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def target(cluster, smollm2, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 saved to a folder, which replicas read faster than the .gguf file."""
    folder, (model, tokenizer) = tmp_path_factory.mktemp("target"), smollm2
    config = copy.deepcopy(model.config)
    del config.quantization_config  # the .gguf file's: the weights are fp32 by now
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    twin.generation_config = model.generation_config
    for part in (twin, tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(smollm2) -> list[list[int]]:
    model, tokenizer = smollm2
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        out = model.generate(**inputs, **OPTIONS, pad_token_id=tokenizer.eos_token_id)
        rows.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    assert all(len(row) == OPTIONS["max_new_tokens"] for row in rows)
    return rows


def arguments() -> dict[str, Any]:
    return {"draft": str(shipped.path()), "dtype": "float32", "settings": SETTINGS, "options": OPTIONS}


def test_a_replica_that_dies_loses_no_row_and_repeats_none(cluster, target, expected, tmp_path):
    import specdec.ray

    mark = tmp_path / "died"

    class Mortal(specdec.ray.BatchReplica):
        """Dies once, after it has generated the batch of row 7 and before it returns it."""

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            out = super().__call__(batch)
            if 7 in batch["id"] and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return {**out, "pid": np.full(len(out["id"]), os.getpid())}

    rows = cluster.data.from_items([{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)])
    done = specdec.ray.generate(rows, target, replicas=2, batch_size=2, replica=Mortal, **arguments()).take_all()
    assert Counter(row["id"] for row in done) == Counter(range(len(PROMPTS))), "each once"
    assert {row["id"]: list(row["tokens"]) for row in done} == dict(enumerate(expected))
    assert all(row["prompt"] == PROMPTS[row["id"]] and isinstance(row["text"], str) for row in done)
    pids = {row["pid"] for row in done}
    assert mark.exists() and int(mark.read_text()) not in {row["pid"] for row in done if row["id"] == 7}
    assert len(pids) >= 2, "both replicas worked"


def test_ids_and_chats_are_prompts_too(cluster, target, smollm2):
    import specdec.ray

    replica = specdec.ray.BatchReplica(target, column="asked", **arguments())
    chat = [{"role": "user", "content": "Hello"}]
    ids = np.array(smollm2[1](PROMPTS[0])["input_ids"])
    column = np.empty(2, dtype=object)
    column[:] = [ids, np.array(chat)]
    out = replica({"asked": column})
    engine = replica.engine
    assert list(out["tokens"]) == engine.generate([ids.tolist(), chat], **OPTIONS).tokens
    assert list(out) == ["asked", "text", "tokens"]
    with pytest.raises(ValueError, match=r"column='asked': the rows have \['prompt'\]"):
        replica({"prompt": column})
    engine.detach()


def test_an_application_of_ray_serve(cluster, target, expected):
    import httpx
    from ray import serve

    import specdec.ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    handle = serve.run(specdec.ray.serve_app(target, num_cpus=1, **arguments()))
    try:
        waiting = [handle.remote(prompt) for prompt in PROMPTS[:6]]
        assert [answer.result(timeout_s=60)["tokens"] for answer in waiting] == expected[:6]
        url = f"http://127.0.0.1:{port}/"
        body = {"prompt": PROMPTS[0], "max_new_tokens": 3}
        answer = httpx.post(url, json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200 and answer.json()["tokens"] == expected[0][:3]
        assert answer.json()["finish_reason"] == "length"
        wrong = httpx.post(url, json={**body, "num_beams": 2}, timeout=60, trust_env=False)
        assert wrong.status_code == 400 and "num_beams=2" in wrong.json()["error"]
        nothing = httpx.post(url, json={"text": "?"}, timeout=60, trust_env=False)
        assert nothing.status_code == 400 and 'with "prompt"' in nothing.json()["error"]
    finally:
        serve.shutdown()


def test_mistakes_are_named(cluster):
    import specdec.ray

    with pytest.raises(ValueError, match="replicas=0: expected an integer of at least 1"):
        specdec.ray.generate(None, replicas=0)
    with pytest.raises(ValueError, match=r"settings=\['max_batch'\]: expected a dict"):
        specdec.ray.generate(None, settings=["max_batch"])
    with pytest.raises(ValueError, match="max_bach=4: attach"):
        specdec.ray.serve_app(settings={"max_bach": 4})
    with pytest.raises(ValueError, match="max_ongoing_requests='many'"):
        specdec.ray.serve_app(max_ongoing_requests="many")
