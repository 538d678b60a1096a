"""Python blocks of README and docs/ run as they are, README's on the real model, except for loading and port."""

import doctest
import re
import socket
import threading
import time
from pathlib import Path

import pytest

import specdec
from specdec import shipped
from specdec.custom_generate import engine_of

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def port(smollm2):
    """The port of a server like that of `specdec serve bundled`, on any free port."""
    uvicorn = pytest.importorskip("uvicorn")
    from specdec.tools.serve.server import build_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    engine = specdec.attach(smollm2[0], shipped.path(), tokenizer=smollm2[1], num_steps=2, max_batch=4)
    server = uvicorn.Server(uvicorn.Config(build_app(engine, "bundled"), port=number, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield number
    server.should_exit = True
    thread.join()
    engine.detach()


def blocks(path=README):
    return re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)


def run(text, names):
    """Run examples; report a failure as doctest does."""
    lines: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, names, "README.md", str(README), 0)
    assert test.examples
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(test, out=lines.append, clear_globs=False)
    names.update(test.globs)
    assert not failed, "".join(lines)


def test_every_block_says_what_happens(smollm2, request, monkeypatch):
    """README names Llama and a head of the Hub: here the bundled model and its head replace them."""
    pytest.importorskip("openai")
    model, tokenizer = smollm2
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name, dtype: model)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tokenizer)
    names: dict = {}
    attach, install, serve = blocks()
    for text in (attach, install):
        run(text.replace("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", str(shipped.path())).replace('.to("cuda")', ""), names)
    port = request.getfixturevalue("port")
    run(serve.replace("8000", str(port)).replace("TARGET", "bundled"), names)


def test_the_engine_page_says_what_happens(smollm2, monkeypatch):
    monkeypatch.setattr("specdec.reach.targets.pretrained.load_pretrained", lambda: smollm2)
    (text,) = blocks(README.with_name("docs") / "engine.md")
    run(text, {})
    used = engine_of(smollm2[0])
    assert used is not None and used.report().acceptance.num_rounds > 0, "the folder's engine decoded"
    used.detach()


@pytest.mark.parametrize("page", ["graphs", "backends"])
def test_packages_are_used_alone_as_their_pages_say(page):
    (text,) = blocks(README.with_name("docs") / f"{page}.md")
    run(text, {})
