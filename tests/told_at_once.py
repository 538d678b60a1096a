"""A pytest plugin, `-p tests.told_at_once`: prints failures as they happen, since a run cut off sums up nothing."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of a run by several processes, the one that prints."""
    if report.failed:
        print(f"\n=== {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)
