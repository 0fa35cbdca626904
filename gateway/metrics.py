"""Counters of this gateway, cheap enough for every token; gauges are read from the true state when they are scraped."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts per bucket of fixed upper bounds, and of each bucket the request that was counted there last (an exemplar)."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def exemplify(self, value: float, labels: dict[str, str]) -> None:
        """Say whose a counted value was; labels may be empty, then nobody's."""
        if labels:
            self.exemplars[bisect_left(self.bounds, value)] = Exemplar(labels, value, time.time())

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        running = 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for bucket, (bound, count) in enumerate(zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True)):
            running += count
            exemplar = self.exemplars.get(bucket)
            buckets.append((bound, running, exemplar) if exemplar else (bound, running))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Metrics:
    """One per process. Prometheus names begin with quire_gateway_."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (route, status)
        self.finished: Counter[str] = Counter()  # choices by finish reason
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()  # (tenant, prompt or generated)
        self.aborted = 0  # requests whose client left before the end
        self.slow_readers = 0  # streams dropped because their client did not read
        self.first_token = Histogram()
        self.token_gap = Histogram()
        self.end_to_end = Histogram()
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.gauges[name] = (text, read)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type, in the form that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        prefix = "quire_gateway_"
        requests = CounterMetricFamily(prefix + "requests", "HTTP requests by route and status", labels=("route", "status"))
        for (route, status), count in self.requests.items():
            requests.add_metric((route, status), count)
        finished = CounterMetricFamily(prefix + "finished", "Choices by finish reason", labels=("reason",))
        for reason, count in self.finished.items():
            finished.add_metric((reason,), count)
        tenants = CounterMetricFamily(prefix + "tenant_tokens", "Tokens of answered requests", labels=("tenant", "kind"))
        for (tenant, kind), count in self.tenant_tokens.items():
            tenants.add_metric((tenant, kind), count)
        yield requests
        yield finished
        yield tenants
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of answered requests", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the prefix cache", self.cached_tokens),
            ("generated_tokens", "Tokens generated", self.generated_tokens),
            ("aborted", "Requests whose client left before the end", self.aborted),
            ("slow_readers", "Streams dropped because their client did not read", self.slow_readers),
        ):
            yield CounterMetricFamily(prefix + name, text, value=value)
        yield self.first_token.family(prefix + "first_token_seconds", "From arrival to the first token of a request")
        yield self.token_gap.family(prefix + "token_gap_seconds", "Between two tokens of one choice")
        yield self.end_to_end.family(prefix + "request_seconds", "From arrival to the last token of a request")
        for name, (text, read) in self.gauges.items():
            yield GaugeMetricFamily(prefix + name, text, value=read())
