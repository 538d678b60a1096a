"""What Inductor compiled is kept between processes; what is damaged, foreign or cannot be written breaks nothing."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import specdec
from specdec.commands.main import app
from specdec.graphs import kept
from specdec.graphs.trace import trace
from specdec.targets import checked
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
SETTINGS = {"compile": True, "max_batch": 2, "max_seq_len": 64}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]
PROCESS = f"""
import json, specdec
from tests.tiny_models import tiny_model
engine = specdec.attach(tiny_model("llama"), **{SETTINGS})
(traced,) = set(engine._core.target.compiled.values())
tokens = [engine.generate([p], max_new_tokens=6).tokens[0] for p in {PROMPTS}]
print(json.dumps([tokens, traced.num_compiled, traced.num_found, engine.report().compiled]))
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for a CPU")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def model(x):
    return torch.ops.aten.sin((x * 2 + 1).relu()) * x


def traced(x, where):
    with kept.keeping(where):
        return trace(model, (x.clone(),), torch.ops.aten.sin.default, "inductor", keep=where)


def check(result):
    for num in (2, 5, 40):
        x = torch.randn(num, 8)
        torch.testing.assert_close(result(x)[0], model(x))


@pytest.mark.slow
def test_a_second_process_compiles_nothing():
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = partial(subprocess.run, env=env, capture_output=True, text=True, check=True)
    (expected, num, before, _), (tokens, again, found, told) = (
        json.loads(run([sys.executable, "-c", PROCESS]).stdout.splitlines()[-1]) for _ in range(2)
    )
    assert (before, found) == (0, num) and num == again > 0 and tokens == expected
    assert f"{found} of them kept from before" in told


def test_what_is_kept_serves_every_size_and_is_found_by_its_graph():
    where, x = kept.folder(CPU), torch.randn(16, 8)
    assert traced(x, where).num_found == 0
    again = traced(x, where)
    assert (again.num_found, again.num_compiled) == (2, 2)
    check(again)
    assert traced(torch.randn(16, 4), where).num_found == 0  # other sizes, other code


@pytest.mark.parametrize("files", ["*.so", "*.py", "fxgraph/*/*/*", "aotautograd/*/*"])
def test_what_is_damaged_is_compiled_again(files):
    where, x = kept.folder(CPU), torch.randn(16, 8)
    traced(x, where)
    damaged = [file for file in where.rglob(files) if file.is_file()]
    assert damaged
    for file in damaged:
        file.unlink()  # a library may be mapped by this process: not written over
        file.write_bytes(b"not this")
    check(traced(x, where))
    again = traced(x, where)
    assert again.num_found
    check(again)
    assert [k.name for k in kept.kept()] == [where.name] and len(list(where.parent.iterdir())) == 1


def test_pieces_that_fail_although_kept_are_compiled_again(monkeypatch):
    """Their code runs but is wrong: nothing but the comparison with the live model notices."""
    specdec.attach(tiny_model("llama"), **SETTINGS).detach()
    compare, calls = checked._compare, []

    def suspicious(*args):
        calls.append(args)
        if len(calls) == 1:
            raise specdec.GraphError("compiled, they differ")
        compare(*args)

    monkeypatch.setattr(checked, "_compare", suspicious)
    engine = specdec.attach(tiny_model("llama"), **SETTINGS)
    (second,) = set(engine._core.target.compiled.values())
    assert second.num_found == 0 and len(calls) == 4


def test_other_versions_have_folders_of_their_own(monkeypatch):
    where = kept.folder(CPU)
    traced(torch.randn(16, 8), where)
    monkeypatch.setattr(torch, "__version__", "9.9")
    other = kept.folder(CPU)
    assert other != where and "torch-9.9" in other.name
    assert traced(torch.randn(16, 8), other).num_found == 0


def test_a_folder_that_cannot_be_written_to_is_named(cache):
    cache.write_text("a file")
    with pytest.warns(UserWarning, match="not kept for the next process: .* Set SPECDEC_CACHE to a folder that can"):
        result = traced(torch.randn(16, 8), kept.folder(CPU))
    check(result)


def test_eager_pieces_leave_no_folder(cache):
    specdec.attach(tiny_model("llama"), compiler="eager", **SETTINGS)
    assert not cache.exists()


def test_the_folder_is_where_caches_belong(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.root() == tmp_path / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept.root() == Path.home() / ".cache" / "specdec"


def test_the_command_shows_and_clears(cache):
    where = kept.folder(CPU)
    traced(torch.randn(16, 8), where)
    shown = CliRunner().invoke(app, ["cache"])
    facts = json.loads(shown.stdout.splitlines()[-1])
    assert facts["folder"] == str(cache) and facts["pieces"] == 2 and facts["environments"] == [where.name]
    assert facts["bytes"] == sum(f.stat().st_size for f in where.rglob("*") if f.is_file()) > 0
    cleared = CliRunner().invoke(app, ["cache", "--clear"])
    assert "MiB deleted" in cleared.stdout and json.loads(cleared.stdout.splitlines()[-1])["pieces"] == 0
    assert not where.exists()
    assert json.loads(CliRunner().invoke(app, ["cache"]).stdout)["bytes"] == 0
