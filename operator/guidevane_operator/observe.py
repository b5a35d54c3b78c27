"""The observe loop: reads the signals of one service and shows how well the operator sees."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from guidevane_api.conditions import EventReason
from guidevane_api.spec_control import GuardAction
from guidevane_api.status import MetricsState
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import ServiceKey
from guidevane_operator.pod_metrics import PodScraper
from guidevane_operator.prometheus import PrometheusClient, Target
from guidevane_operator.record import Directory, ServiceRecord
from guidevane_operator.signals import Signals, guard_words, known_value
from guidevane_operator.status.control import slo_ratios
from guidevane_operator.status_writer import StatusWriter

logger = logging.getLogger(__name__)

SEEING = (MetricsState.KNOWN, MetricsState.PARTIAL)


@dataclass
class Observer:
    """Takes one look at the signals of a service."""

    directory: Directory
    prometheus: PrometheusClient
    scraper: PodScraper
    clock: Callable[[], float]
    """Monotonic seconds."""
    recorder: EventRecorder
    writer: StatusWriter

    def period_s(self, key: ServiceKey) -> float:
        """Once per scrape."""
        record = self.directory.get(key)
        return float(record.spec.monitoring.scrape_interval_seconds) if record and record.spec else 5.0

    async def look(self, key: ServiceKey) -> None:
        """Observe, tell about lost and recovered metrics, write status if it is worth it."""
        record = self.directory.get(key)
        if record is None or record.spec is None or record.deleting:
            return
        signals = await self._read(record)
        async with record.lock:
            if record.is_gone:
                return
            before, after = record.history.observe(signals)
            self._judge(record, signals)
            await self._announce(record, before, after)
            await self._announce_guard(record, signals)
            await self.writer.write(record)

    async def _read(self, record: ServiceRecord) -> Signals:
        """The signals now, from the service's Prometheus, or from its pods where it has none."""
        assert record.spec is not None, "only accepted services are observed"
        url = self.writer.prometheus_url(record)
        addresses = {pod.name: pod.ip for pod in record.ready_pods()}
        target = Target(
            namespace=record.key.namespace,
            pods=tuple(addresses),
            window_s=record.spec.retune.window_seconds,
            scrape_interval_s=record.spec.monitoring.scrape_interval_seconds,
        )
        if url or not addresses:
            return await self.prometheus.observe(url, target)
        return await self.scraper.observe(record.rings, addresses, record.spec.engine.port, target, self.clock())

    def _judge(self, record: ServiceRecord, signals: Signals) -> None:
        """One more verdict on the SLO."""
        ratios = slo_ratios(self.writer.facts(record), signals)
        record.slo.look(all(ratio <= 1 for ratio in ratios.values()) if ratios else None, self.clock())

    async def _announce(self, record: ServiceRecord, before: MetricsState, after: MetricsState) -> None:
        """One event when sight is lost, one when it is back."""
        signals = record.history.latest
        if before in SEEING and after not in SEEING and signals.expected_pods:
            record.metrics_lost = True
            note = f"{signals.why or 'signals are gone'}; nothing is moved until they are back"
            await self.recorder.post(record.body, EventReason.METRICS_LOST, note)
        elif record.metrics_lost and after is MetricsState.KNOWN:
            record.metrics_lost = False
            note = f"{signals.fresh_pods} of {signals.expected_pods} ready pods give fresh samples again"
            await self.recorder.post(record.body, EventReason.METRICS_RECOVERED, note)

    async def _announce_guard(self, record: ServiceRecord, signals: Signals) -> None:
        """One event when a guard gives way, one when all are back."""
        reason = record.guard.look(known_value(signals.guard_level), self.clock())
        if reason is None:
            return
        acts = record.spec is not None and record.spec.slo.guard is GuardAction.ON
        meaning = "the tuner waits until it is back at 0" if acts else "a dry run, so nothing is changed"
        gave_way = reason is EventReason.GUARD_GAVE_WAY
        note = f"{guard_words(signals)}; {meaning}" if gave_way else "the guards of all pods are back at level 0"
        await self.recorder.post(record.body, reason, note)
