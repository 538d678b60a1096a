"""What Prometheus reads of an engine that is stepped for a server."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from specdec.api import Engine
from specdec.tools.serve.stepper import Stepper


class EngineCollector(Collector):
    """Reads engine and stepper whenever it is asked; it may wait for a step to end."""

    def __init__(self, engine: Engine, stepper: Stepper):
        self.engine, self.stepper = engine, stepper

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; tokens are of requests that have ended."""
        report, stepper = self.engine.report(), self.stepper
        jobs = list(stepper.jobs)
        running = sum(job.request is not None and job.request.is_running for job in jobs)
        yield GaugeMetricFamily("specdec_requests_running", "Requests that hold KV slots", running)
        yield GaugeMetricFamily("specdec_requests_waiting", "Requests that wait for them", len(jobs) - running)
        yield GaugeMetricFamily("specdec_kv_pages_free", "Free pages of the KV pool", report.num_free_pages)
        yield GaugeMetricFamily("specdec_kv_pages", "Pages of the KV pool", report.num_pages)
        yield GaugeMetricFamily("specdec_tau", "Tokens emitted over verify rounds", report.acceptance.tau)
        yield CounterMetricFamily("specdec_tokens", "Tokens emitted", stepper.num_tokens)
        for key, what in (("asked", "Prompt tokens"), ("found", "Prompt tokens that the prefix cache had")):
            if report.prefix_cache:
                yield CounterMetricFamily(f"specdec_prefix_tokens_{key}", what, report.prefix_cache[key])
        for path, what in (("replays", "Graph replays"), ("eager", "Runs without a graph")):
            family = CounterMetricFamily(f"specdec_{path}", f"{what}, by runner", labels=["runner"])
            for runner, counts in report.runners.items():
                family.add_metric([runner], counts[path])
            yield family
