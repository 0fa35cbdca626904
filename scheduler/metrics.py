"""/metrics of the scheduler: every value is read from the true state when it is scraped, nothing is stored twice."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.cell import Cell
from scheduler.workload import work_s

_COUNTERS = {
    "quire_prompt_tokens": ("prompt_tokens", "Prompt tokens of sequences that started"),
    "quire_generated_tokens": ("generated_tokens", "Tokens sampled for live sequences"),
    "quire_prefix_lookup_tokens": ("lookup_tokens", "Tokens looked up in a prefix cache"),
    "quire_prefix_hit_tokens": ("hit_tokens", "Tokens found in a prefix cache"),
    "quire_recomputed_tokens": ("recomputed_tokens", "Tokens computed again after a preemption, a move or a failure"),
    "quire_placement_false_credit_tokens": ("false_credit_tokens", "Cache hits promised at placement and not found"),
    "quire_preemptions": ("preemptions", "Sequences stopped to free pages"),
    "quire_aborts": ("aborts", "Sequences aborted by a gateway or with it"),
    "quire_failovers": ("failovers", "Replicas dropped with their state"),
    "quire_stale_rows": ("stale_rows", "Rows whose sequence was released before their result came"),
    "quire_steps": ("steps", "Step plans sent"),
    "quire_plan_seconds": ("plan_s", "Time spent making plans"),
    "quire_audit_violations": ("audit_violations", "Faults found in the books of pages and slots"),
    "quire_internal_errors": ("internal_errors", "Messages whose handling failed"),
}


def _gauge(name: str, text: str, samples: list[tuple[list[str], float]], labels: list[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


class CellCollector(Collector):
    """Scraped from another thread: every list() of a dictionary below is one atomic copy."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def collect(self) -> Iterator[Metric]:
        yield from self._queue()
        yield from self._replicas()
        yield from self._counters()

    def _queue(self) -> Iterator[Metric]:
        cell = self._cell
        waiting = list(cell.waiting)
        by_reason = {"new": 0, "preempted": 0, "moved": 0}
        for seq in waiting:
            by_reason["preempted" if seq.preemptions else "moved" if seq.started else "new"] += 1
        yield _gauge(
            "quire_queued_sequences",
            "Sequences that wait, by why",
            [([reason], count) for reason, count in by_reason.items()],
            ["reason"],
        )
        yield _gauge("quire_gateways", "Gateways connected", [([], len(cell.gateways))], [])
        yield _gauge("quire_kept_streams", "Resumable streams that nobody reads now", [([], len(cell.shelf))], [])
        text = "Computing that waits or is under way, in seconds of one fully loaded replica"
        yield _gauge("quire_work_seconds", text, [([], work_s(cell))], [])

    def _replicas(self) -> Iterator[Metric]:
        replicas = list(self._cell.replicas.values())
        label = ["replica"]

        def per_replica(name: str, text: str, values: list[float]) -> GaugeMetricFamily:
            samples = [([replica.name], value) for replica, value in zip(replicas, values, strict=True)]
            return _gauge(name, text, samples, label)

        yield per_replica("quire_running_sequences", "Sequences with a slot", [len(each.running) for each in replicas])
        yield per_replica("quire_plans_in_flight", "Plans without a result", [len(each.in_flight) for each in replicas])
        yield per_replica("quire_slots", "Sequences that can run", [each.num_slots for each in replicas])
        yield per_replica("quire_memory_used_bytes", "Device memory", [each.memory_used_bytes for each in replicas])
        yield per_replica("quire_memory_total_bytes", "Device memory in all", [each.memory_total_bytes for each in replicas])
        yield per_replica("quire_draining", "1 while a replica leaves", [float(each.draining) for each in replicas])
        pages = _gauge("quire_pages", "KV pages by state", [], ["replica", "state"])
        for replica in replicas:
            pool = replica.pool
            free, cached = len(pool.free), len(pool.cached)
            pages.add_metric([replica.name, "free"], free)
            pages.add_metric([replica.name, "cached"], cached)
            pages.add_metric([replica.name, "held"], pool.usable - free - cached)
        yield pages

    def _counters(self) -> Iterator[Metric]:
        counters = self._cell.counters
        for name, (attribute, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(counters, attribute))
        finished = CounterMetricFamily("quire_finished_sequences", "Sequences that ended, by reason", labels=["reason"])
        for reason, count in list(counters.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        rejected = CounterMetricFamily("quire_rejected_sequences", "Submits refused, by code", labels=["code"])
        for code, count in list(counters.rejected.items()):
            rejected.add_metric([code], count)
        yield rejected
