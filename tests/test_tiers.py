"""The tables of tiers name existing tests, and functions run the cases that fit into their budgets."""

import ast
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

from tests import tiers
from tests.tiers import ALL_S, FIRST, SECONDS, TEST_S


def test_every_name_is_a_test() -> None:
    """A name that is no test's would be ignored silently."""
    folder = Path(__file__).parent
    names = {
        f"{path.name}::{node.name}"
        for path in folder.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    stale = {*FIRST, *json.loads(SECONDS.read_text())} - names
    assert not stale, f"take out of tests/tiers.py and seconds.json: {sorted(stale)}"


class Item(SimpleNamespace):
    """The part of a test that `mark` uses."""

    def __init__(self, function: str, case: int):
        super().__init__(nodeid=f"tests/test_x.py::{function}[{case}]", keywords={"gpu": True} if case < 0 else {})
        self.markers: list[str] = []
        self.add_marker = self.markers.append


def test_functions_play_what_fits_into_their_budgets(monkeypatch, tmp_path) -> None:
    means = {"test_a": TEST_S / 2, "test_b": 0.8 * ALL_S, "test_c": 2 * TEST_S, "test_d": 2 * ALL_S, "test_e": 99.0}
    (tmp_path / "seconds.json").write_text(json.dumps({f"test_x.py::{name}": mean for name, mean in means.items()}))
    monkeypatch.setattr(tiers, "SECONDS", tmp_path / "seconds.json")
    monkeypatch.setattr(tiers, "FIRST", {"test_x.py::test_c": "^7$"})
    items = [Item(function, case) for function in (*means, "test_short") for case in range(-2, 20)]
    tiers.mark(items)
    played: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # by make test, test-all and test-exhaustive
    for item in (i for i in items if not i.keywords):
        played[item.nodeid.split(":")[2].split("[")[0]][len(item.markers)] += 1
    assert played == {
        "test_a": [2, 2, 16],
        "test_b": [0, 1, 19],
        "test_c": [1, 0, 19],
        "test_d": [0, 1, 19],
        "test_e": [0, 0, 20],
        "test_short": [20, 0, 0],
    }
    assert not next(i for i in items if i.nodeid.endswith("test_c[7]")).markers


def test_means_are_read_from_durations() -> None:
    log = ["3.00s call     tests/test_a.py::test_a[x]\n", "1.00s setup    tests/test_a.py::test_a[x]\n"]
    log += ["2.00s call     tests/test_a.py::test_a[y]\n", "0.01s call     tests/test_a.py::test_b\n", "2 passed\n"]
    assert tiers.means(log) == {"test_a.py::test_a": 3.0}
