"""The public names: `specdec.__all__` is sorted, complete, importable and documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType

import specdec
from specdec import backends, graphs
from tests.api_page import PAGE, page

# what @dataclass and NamedTuple write when the author wrote nothing: "Name(field: int, ...)"
_GENERATED_DOC = re.compile(r"\A\w+\(.*\)\Z", re.DOTALL)


def test_all_is_sorted_and_without_duplicates() -> None:
    assert list(specdec.__all__) == sorted(set(specdec.__all__))


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(specdec).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public <= set(specdec.__all__), f"public but not in __all__: {sorted(public - set(specdec.__all__))}"


def test_every_name_is_found_where_it_is_said_to_be() -> None:
    for package in (specdec, backends, graphs):
        assert all(hasattr(package, name) for name in package.__all__)
        assert not hasattr(package, "attached")
    assert set(specdec.__all__) <= set(dir(specdec))
    assert callable(graphs.build)  # no module has the name of a function


ALONE = """
import sys
import torch
from specdec.backends import AttentionCall, LayerSpec, TorchBackend
from specdec.core.batch import ForwardMode
from specdec.graphs import BufferSpec, Counters, GraphRunner, RecordedCapture, Setup, build
from specdec.core.cache.pool import KVPool

cpu = torch.device("cpu")
setup = Setup(RecordedCapture(), Counters(), cpu, buckets=(2, 4))
inputs = [BufferSpec("x", lambda n: (n,), torch.float32, pad=0.0)]
runner = GraphRunner("double", lambda variant, x: 2 * x, inputs, setup)
build([runner], setup.capture, lower="buckets", strict=True)
assert runner("", {"x": torch.ones(3)}).tolist() == [2, 2, 2] and setup.counters.runners["double"].replays == 1

layer, backend = LayerSpec(2, 1, 8, 8, scaling=1.0), TorchBackend()
table = torch.arange(8, dtype=torch.int32).view(1, 8)
backend.plan(backend.metadata.prefill(table, torch.zeros(1, dtype=torch.int64), [0], [3]))
q, k, out = torch.ones(3, 2, 8), torch.ones(3, 1, 8), torch.empty(3, 2, 8)
backend.run(AttentionCall(q, k, 5 * k, out, KVPool([layer.shape], 8, torch.float32, cpu), 0, layer))
assert out.eq(5).all()
assert "transformers" not in sys.modules
"""


def test_graphs_and_backends_work_alone() -> None:
    """Without a model, and without importing transformers, which takes seconds."""
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def has_docstring(value: object) -> bool:
    if inspect.isclass(value):
        doc = value.__dict__.get("__doc__")  # its own, not its base's
    elif inspect.isroutine(value) or inspect.ismodule(value):
        doc = value.__doc__
    else:
        return True  # plain data, such as __version__, carries none
    return bool(doc and doc.strip()) and not _GENERATED_DOC.match(doc.strip())


def test_every_name_is_importable_and_documented() -> None:
    assert [name for name in specdec.__all__ if not has_docstring(getattr(specdec, name))] == []


def test_a_generated_docstring_does_not_count() -> None:
    @dataclass
    class Undocumented:
        x: int

    @dataclass
    class Documented:
        """One x."""

    assert not has_docstring(Undocumented)
    assert has_docstring(Documented)


def test_version_is_a_literal_that_reads_as_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", specdec.__version__)


def test_the_page_of_public_names_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.api_page"
