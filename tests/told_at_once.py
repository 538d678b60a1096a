"""A pytest plugin, `-p tests.told_at_once`: prints failures as they happen, since a run cut off prints no summary."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure; in a run of several processes, only the controller prints."""
    if report.failed:
        print(f"\n=== {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)
