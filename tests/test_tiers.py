"""The table of tiers names tests that exist."""

from pathlib import Path

from tests.tiers import IN_TEST, MODULES


def test_every_name_is_a_test() -> None:
    """A name that is no test's would leave nothing out, in silence."""
    folder = Path(__file__).parent
    stale = [name for name in MODULES if not (folder / name).is_file()]
    for name in IN_TEST:
        file, _, function = name.partition("::")
        if not (folder / file).is_file() or f"def {function}(" not in (folder / file).read_text():
            stale.append(name)
    assert not stale, f"take out of tests/tiers.py: {stale}"
