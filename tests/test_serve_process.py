"""The API server and its engine: two processes, and what happens to one if the other is gone."""

import asyncio
import signal
import socket
import time
from types import SimpleNamespace

import pytest

import specdec
from specdec.core.errors import AttachError, CapacityError, DetachedError
from specdec.tools.serve.channel import Channel, packed, received
from tests.test_text import TOKENIZER

pytest.importorskip("openai")  # before test_serve, whose import would fail without it
from tests.test_serve import long, tiny_model

httpx = pytest.importorskip("httpx")
api_server = pytest.importorskip("specdec.tools.serve.api_server")
host = pytest.importorskip("specdec.tools.serve.host")
client = pytest.importorskip("specdec.tools.serve.client")


@pytest.fixture(scope="module")
def engine():
    with specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_batch=4, max_seq_len=500) as engine:
        yield engine


def assert_free(engine):
    end = time.monotonic() + 10
    while (report := engine.report()).num_free_pages < report.num_pages and time.monotonic() < end:
        time.sleep(0.02)
    engine.check_integrity()
    assert report.num_free_pages == report.num_pages


def test_messages_of_any_size_arrive_whole():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in ({"a": [1, 2]}, None):
            ours.sendall(packed(message))
            assert received(theirs) == message
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            received(theirs)

    async def both():
        channels = [await Channel.over(sock) for sock in socket.socketpair()]
        large = "x" * 2**21
        channels[0].send(large)
        channels[0].send(2)
        got = []
        async for message in channels[1]:
            got.append(message)
            if message == 2:
                await channels[0].close()
        await channels[1].close()
        return got == [large, 2]

    assert asyncio.run(both())


@pytest.mark.parametrize("error", [CapacityError("too long"), AttachError("m", ["a", "b"]), KeyError("k")])
def test_errors_arrive_as_what_they_are_or_by_their_words(error):
    sent = host.portable(error)
    assert (type(sent) is type(error) and str(sent) == str(error)) or repr(error) in str(sent)


def test_a_server_that_is_busy_gets_what_has_come_meanwhile_together(engine, monkeypatch):
    """Until it is ready it gets nothing but answers; then all tokens so far at once."""
    queued, submit = [], engine._core.submit
    monkeypatch.setattr(
        engine._core, "submit", lambda requests, **how: (queued.extend(requests), submit(requests, **how))
    )

    async def until_all_have_ended():
        while len(queued) < 2 or any(request.finish_reason is None for request in queued):
            await asyncio.sleep(0.01)

    expected = engine.generate([[5, 6], [7, 8, 9]], max_new_tokens=12, ignore_eos=True).tokens
    queued.clear()

    async def ask():
        ours, theirs = socket.socketpair()
        with host.hosted(engine, theirs):
            channel = await Channel.over(ours)
            options = {"max_new_tokens": 12, "ignore_eos": True}
            channel.send((3, "start", ([[5, 6], [7, 8, 9]], options, True)))
            messages = aiter(channel)
            number, made, error = await anext(messages)
            assert (number, error) == (3, None) and len(made) == 2
            await asyncio.wait_for(until_all_have_ended(), 30)
            for wrong in (("start", ([[5] * 600], {}, True)), ("start", ([[5]], {"top_p": 7}, True))):
                channel.send((4, *wrong))
                number, _, error = await anext(messages)
                assert number == 4 and isinstance(error, ValueError)
            channel.send((0, "ready", ()))
            updates = [host.Update(*one) for one in await anext(messages)]
            await channel.close()
        return updates

    updates = asyncio.run(ask())
    assert [(n.number, n.choice, n.finish_reason) for n in updates] == [(3, 0, "length"), (3, 1, "length")]
    assert [n.tokens for n in updates] == expected


def test_texts_of_an_engine_that_is_gone_end_with_an_error(engine):
    async def ask():
        ours, theirs = socket.socketpair()
        asked = client.EngineClient(client.Facts.of(engine), rests=False)
        lost = asyncio.Event()
        await asked.connect(ours, lost.set)
        call = client.TextCall(9)
        asked._calls[9] = call
        question = asyncio.create_task(asked.start([[5]], [[5]], {}, True))
        await asyncio.sleep(0)
        theirs.close()
        for late in (question, asked.start([[5]], [[5]], {}, True), call.wait()):
            with pytest.raises(DetachedError, match="engine is gone"):
                await late
        await asyncio.wait_for(lost.wait(), 5)
        await asked.close()

    asyncio.run(ask())


def test_an_address_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match=r"--host 127.0.0.1 --port \d+: Address already in use"):
            api_server.ApiServer("127.0.0.1", other.getsockname()[1])
    with pytest.raises(ValueError, match=r"--port 99999: .*0-65535"):
        api_server.ApiServer("127.0.0.1", 99999)


def test_a_last_token_is_sent_with_its_reason(engine):
    """A step in another thread adds the token first: what ends a text is not part of the answer."""
    (request,) = engine._requests([[5, 6]], stop_token_ids=[9])
    call = host.HostedCall(SimpleNamespace(core=engine._core), 1, [request], True)
    request.tokens += [7, 9]
    assert [update.tokens for update in call.updates()] == [[7]]
    request.finish_reason = "stop_id"
    assert [(update.tokens, update.finish_reason) for update in call.updates()] == [([9], "stop_id")]


def test_a_process_that_cannot_serve_says_why(engine, tmp_path, capfd):
    with api_server.ApiServer("127.0.0.1", 0) as server, pytest.raises(ValueError, match=r"did not start.* status 1"):
        server.start(engine, "tiny", max_waiting=2, grace=0.0, log=tmp_path / "none" / "log")
    assert "specdec serve: " in (said := capfd.readouterr().err) and "No such file" in said and "Traceback" not in said
    assert_free(engine)


def test_a_process_that_is_killed_leaves_the_engine_free(engine):
    with api_server.ApiServer("127.0.0.1", 0) as server:
        server.start(engine, "tiny", max_waiting=2, grace=0.0, log_level="critical")
        answer = httpx.post(f"{server.url}/v1/completions", json=long(max_tokens=5), timeout=60)
        expected = engine.generate([[5, 6, 7]], max_new_tokens=5, ignore_eos=True).texts
        assert [choice["text"] for choice in answer.json()["choices"]] == expected
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long(stream=True), timeout=60) as response:
            next(response.iter_lines())
            server.send_signal(signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL
    assert_free(engine)
    assert engine.generate([[5, 6, 7]], max_new_tokens=5, ignore_eos=True).texts == expected


def test_a_process_whose_engine_is_gone_ends(engine):
    with api_server.ApiServer("127.0.0.1", 0) as server:
        server._channel.close()  # as if attach had failed
        assert server.wait() == 0
