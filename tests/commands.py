"""Runs the `specdec` command in this process."""

import sys

import pytest

from specdec.tools.commands.main import main


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, list[str], str]:
    """Return exit status, lines of stdout, and stderr of `specdec ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["specdec", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out.splitlines(), printed.err
