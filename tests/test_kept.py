"""Inductor's compiled code is cached between processes; damaged, foreign or unwritable caches break nothing."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import specdec
from specdec.core.config import EngineConfig
from specdec.graphs.compile import kept
from specdec.graphs.compile.trace import trace
from specdec.reach.targets.compiling import checked
from specdec.reach.targets.compiling.checked import Subject
from specdec.tools.commands.main import app
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
SETTINGS = {"compile": True, "max_batch": 2, "max_seq_len": 64}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]
PROCESS = "import json; from tests.test_kept import attached, suspected; print(json.dumps([attached(), {}]))"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for a CPU")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def model(x):
    return torch.ops.aten.sin((x * 2 + 1).relu()) * x


def traced(x, where):
    with kept.keeping(where):
        return trace(model, (x.clone(),), (torch.ops.aten.sin.default,), "inductor")


def check(result):
    for num in (2, 5, 40):
        x = torch.randn(num, 8)
        torch.testing.assert_close(result(x)[0], model(x))


def attached():
    """Return texts of a new engine, pieces compiled, the number found cached, and the report's text."""
    engine = specdec.attach(tiny_model("llama"), **SETTINGS)
    (traced,) = set(engine._core.target.compiled.values())
    tokens = [engine.generate([p], max_new_tokens=6).tokens[0] for p in PROMPTS]
    told = engine.report().compiled
    engine.detach()
    return tokens, traced.num_compiled, traced.num_found, told


def suspected():
    """Like `attached`, but with cached code that runs and gives wrong results."""
    compare, calls = checked.compare, []

    def suspicious(*args):
        calls.append(args)
        if len(calls) == 1:  # with the cached code
            raise specdec.GraphError("compiled, they differ")
        compare(*args)

    with mock.patch.object(checked, "compare", suspicious):
        return [*attached(), len(calls)]


@pytest.mark.slow
def test_a_second_process_compiles_nothing_but_what_fails_although_kept():
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(then):
        done = subprocess.run([sys.executable, "-c", PROCESS.format(then)], env=env, capture_output=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    (expected, num, before, _), _ = run(0)
    again, suspect = run("suspected()" if torch.cuda.is_available() else 0)  # it compiles twice, a minute on a CPU
    assert before == 0 and again[:3] == [expected, num, num] and num > 0
    assert f"{num} of them kept from before)" in again[3]
    if suspect:
        assert suspect[:3] == [expected, num, 0] and suspect[4] == 4


def test_what_is_kept_serves_every_size_and_is_found_by_its_graph():
    where, x = kept.folder(CPU), torch.randn(16, 8)
    assert traced(x, where).num_found == 0
    again = traced(x, where)
    assert (again.num_found, again.num_compiled) == (2, 2)
    check(again)
    assert traced(torch.randn(16, 4), where).num_found == 0  # other sizes need other code


DAMAGED = ["*.so", "aotautograd/*/*", "*.py", "fxgraph/*/*/*"]


@pytest.mark.parametrize("files", DAMAGED if torch.cuda.is_available() else DAMAGED[:2])
def test_what_is_damaged_is_compiled_again(files):
    """By Inductor itself, or with an empty folder."""
    where, x = kept.folder(CPU), torch.randn(16, 8)
    subject = Subject(lambda x: (model(x),), model, (x,), nullcontext, 1, 1, 64)

    def traced_checked():
        return checked.trace_checked(subject, EngineConfig(), CPU)

    traced_checked()
    damaged = [file for file in where.rglob(files) if file.is_file()]
    assert damaged
    for file in damaged:
        file.unlink()  # a library may be mapped by this process: not written over
        file.write_bytes(b"not this")
    check(traced_checked())
    again = traced_checked()
    assert again.num_found
    check(again)
    assert [k.name for k in kept.kept()] == [where.name] and len(list(where.parent.iterdir())) == 1


def test_other_versions_have_folders_of_their_own(monkeypatch):
    where = kept.folder(CPU)
    traced(torch.randn(16, 8), where)
    monkeypatch.setattr(torch, "__version__", "9.9")
    other = kept.folder(CPU)
    assert other != where and "torch-9.9" in other.name
    assert traced(torch.randn(16, 8), other).num_found == 0


def keeps_elsewhere(why):
    """Return whether Inductor uses another folder, and a warning says `why`, while pieces are cached."""
    where = kept.folder(CPU)
    with (
        pytest.warns(UserWarning, match=f"not cached for later processes: .*{why}.* Set SPECDEC_CACHE"),
        kept.keeping(where),
    ):
        path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return path != where and path.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_to_is_named(cache):
    cache.write_text("a file")
    assert keeps_elsewhere("cannot be written to")


def test_folders_are_private(cache):
    where = kept.folder(CPU)
    with kept.keeping(where):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(where)
    assert {path.stat().st_mode & 0o777 for path in (cache, where.parent, where)} == {0o700}


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_folder_that_others_may_write_to_is_not_used(which):
    where = kept.folder(CPU)
    where.mkdir(parents=True)
    path = [where, where.parent, where.parent.parent][which]
    path.chmod(0o777)
    assert keeps_elsewhere("can be written to by other users") and not list(where.iterdir())


def test_a_folder_of_another_user_is_not_used(monkeypatch):
    kept.folder(CPU).mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert keeps_elsewhere("belongs to another user")


def test_nothing_is_read_as_a_trace(cache, monkeypatch, tmp_path):
    """Traces used to be cached as text, through which a planted file could run a command."""
    node = ["evil", "call_function", "posix:system", ["tuple", [f"touch {tmp_path / 'ran'}"]], ["dict", []]]
    planted = kept.folder(CPU) / "traces" / "of-a-model.json"
    planted.parent.mkdir(parents=True)
    planted.write_text(json.dumps({"args": [], "groups": [], "pieces": [[node]], "children": {}, "graph": [node]}))
    opened, live = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **kw: opened.append(path) or live(path, *args, **kw))
    monkeypatch.setattr("specdec.graphs.compile.pieces._compile", lambda piece, *rest: piece.forward)
    specdec.attach(tiny_model("llama"), **SETTINGS).detach()
    assert planted not in opened and not (tmp_path / "ran").exists()


def test_no_home_is_a_sentence(monkeypatch):
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert keeps_elsewhere("there is no home folder")
    assert CliRunner().invoke(app, ["cache"]).exit_code == 0


def test_threads_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/before")
    first_is_in, seen = threading.Event(), []

    def keep(name):
        with kept.keeping(kept.folder(CPU) / name):
            first_is_in.set()
            time.sleep(0.05)
            seen.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name == name)

    threads = [threading.Thread(target=keep, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
        first_is_in.wait()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3 and os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/before"


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
    shown = CliRunner().invoke(app, ["cache", "--json"])
    facts = json.loads(shown.stdout.splitlines()[-1])
    assert facts["folder"] == str(cache) and facts["pieces"] == 2 and facts["environments"] == [where.name]
    assert facts["bytes"] == sum(f.stat().st_size for f in where.rglob("*") if f.is_file()) > 0
    cleared = CliRunner().invoke(app, ["cache", "--clear", "--json"])
    assert "MiB deleted" in cleared.stdout and json.loads(cleared.stdout.splitlines()[-1])["pieces"] == 0
    assert not where.exists()
    assert json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)["bytes"] == 0
