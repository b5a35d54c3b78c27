"""The operator put together: clients, index, queue and loops, without kopf and without a global."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Self

import aiohttp
from kubernetes.aio import client as kubernetes_client

from guidevane_operator.admin_client import AdminClient
from guidevane_operator.errors import KubeError
from guidevane_operator.events import EventRecorder
from guidevane_operator.facts import DeploymentFacts, read_deployment, read_pod
from guidevane_operator.kube import LLM_SERVICES, KubeClient, Manifest, ServiceKey
from guidevane_operator.ledger import ChildKey
from guidevane_operator.loops import Loop, WorkQueue
from guidevane_operator.observe import Observer
from guidevane_operator.pod_metrics import PodScraper
from guidevane_operator.prometheus import PrometheusClient
from guidevane_operator.push import LimitsPusher
from guidevane_operator.reconcile import Reconciler
from guidevane_operator.record import DEFAULT_LEASE_S, Directory, ServiceRecord
from guidevane_operator.retune.executor import Tuner
from guidevane_operator.settings import Settings
from guidevane_operator.status_writer import StatusWriter
from guidevane_operator.upkeep import ChildKeeper

logger = logging.getLogger(__name__)

MAX_TICK_AGE_S = 60.0
"""A loop that has not ticked for so long is dead; it ticks twice a second when alive."""
KIND_POLL_S = 2.0
"""Time between two looks for the CRD, seconds."""


def open_session() -> aiohttp.ClientSession:
    """Connections without a limit: pods that hang must not take those of other pods, nor those of Prometheus."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class GuidevaneOperator:
    """Everything that runs in the operator's process, between start and close."""

    def __init__(
        self,
        settings: Settings,
        configuration: kubernetes_client.Configuration,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = Directory()
        self._session = open_session()
        self._kube = KubeClient(configuration, settings.api_timeout_seconds)
        recorder = EventRecorder(self._kube, clock)
        self.queue = WorkQueue(self._ensure, clock)
        writer = StatusWriter(
            kube=self._kube,
            recorder=recorder,
            clock=clock,
            min_interval_s=settings.status_seconds,
            failure_of=lambda key: self.queue.failures.get(key),
            ask_for_pass=self.queue.add,
            default_prometheus_url=settings.prometheus_url,
        )
        admin = AdminClient(self._session, settings.admin_timeout_seconds)
        prometheus = PrometheusClient(self._session, settings.prometheus_timeout_seconds)
        self._settings = settings
        pusher = LimitsPusher(admin, clock, self.queue.add)
        keeper = ChildKeeper(self._kube, recorder, clock, self.queue.add)
        self._reconciler = Reconciler(
            self.directory, self._kube, pusher, recorder, writer, keeper, settings.runtime_image
        )
        scraper = PodScraper(self._session, settings.prometheus_timeout_seconds)
        observer = Observer(self.directory, prometheus, scraper, clock, recorder, writer)
        tuner = Tuner(self.directory, pusher, recorder, writer, clock)
        keys = self.directory.__iter__
        self.loops = (
            Loop("resync", keys, lambda _: settings.resync_seconds, self._resync, clock),
            Loop("secrets", keys, lambda _: settings.key_seconds, self._recheck_secrets, clock),
            Loop("drift", keys, self._renew_period_s, self._reconciler.renew, clock),
            Loop("observe", keys, observer.period_s, observer.look, clock),
            Loop("retune", keys, tuner.period_s, tuner.look, clock),
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> Self:
        """Start queue and loops."""
        self._tasks = [asyncio.create_task(loop.run(), name=loop.name) for loop in (self.queue, *self.loops)]
        return self

    async def wait_for_kind(self) -> None:
        """Wait until the API server knows LLMServices: kopf looks for the kind only once, at its start."""
        while True:
            try:
                if await self._kube.serves(LLM_SERVICES):
                    return
                logger.warning("the API server knows no LLMService; install the CRD: kubectl apply -k crds")
            except KubeError as error:
                logger.warning("the API server is not there yet", extra={"error": str(error)})
            await asyncio.sleep(KIND_POLL_S)

    async def close(self) -> None:
        """Stop everything; what runs in pods goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        records = [record for key in self.directory if (record := self.directory.get(key))]
        calls = [flight.task for record in records for flight in record.flights.values()]
        for record in records:
            self.directory.drop(record.key)
        await asyncio.gather(*calls, return_exceptions=True)
        await self._kube.close()
        await self._session.close()

    def faults(self) -> dict[str, str]:
        """Loops that do not run as they should: name -> why. Empty when all is well."""
        found = {loop.name: loop.pulse.fault(MAX_TICK_AGE_S) for loop in (self.queue, *self.loops)}
        ended = {task.get_name(): "has ended" for task in self._tasks if task.done()}
        return {name: why for name, why in found.items() if why} | ended

    def see_service(self, body: Manifest, gone: bool) -> None:
        """A watch saw a service."""
        meta = body["metadata"]
        key = ServiceKey(meta["namespace"], meta["name"])
        if gone:
            if self.directory.drop(key, str(meta.get("uid", ""))):
                self.queue.forget(key)
            return
        before, record = self.directory.get(key), self.directory.put(body)
        if record is not before:
            self.queue.forget(key)  # what failed was another service
        # Our own status writes come back through the watch; only what others ask for calls for a pass. It is compared
        # with what the last pass dealt with: the answer to a status write may have brought the new spec in already.
        if record.asked != record.dealt_with:
            self.queue.add(key)

    def see_pod(self, body: Manifest, service: str, gone: bool) -> None:
        """A watch saw a pod of a service; one whose label was changed is no pod of another any more."""
        key = ServiceKey(body["metadata"]["namespace"], service)
        record = self.directory.get(key)
        pod = read_pod(body)
        for other in self.directory.of_namespace(key.namespace):
            if other is not record and pod.name in other.pods:
                del other.pods[pod.name]
                self.queue.add(other.key)
        if record is None:
            return
        record.num_sightings += 1
        if gone:
            if record.pods.get(pod.name, pod).uid == pod.uid:
                record.pods.pop(pod.name, None)
        elif record.pods.get(pod.name) == pod:
            return
        else:
            record.pods[pod.name] = pod
        self.queue.add(key)

    def see_child(self, kind: str, body: Manifest, service: str, gone: bool) -> None:
        """A watch saw a child of a service; one that is gone, or was edited, is set right."""
        key = ServiceKey(body["metadata"]["namespace"], service)
        record = self.directory.get(key)
        if record is None:
            return
        child = ChildKey(kind, body["metadata"]["name"])
        is_news = record.children.see(child, body, gone)
        # Whoever takes children away by label takes Secrets too, and no watch tells.
        record.secrets_are_due |= is_news and gone
        known = record.deployment
        is_late = gone and known is not None and known.uid != body["metadata"].get("uid", "")
        if child == ChildKey("Deployment", service) and not is_late:
            is_news |= self._see_deployment(record, None if gone else read_deployment(body))
        # What stood in the way of a child may be gone.
        if is_news or (gone and record.child_error):
            self.queue.add(key)

    def _see_deployment(self, record: ServiceRecord, seen: DeploymentFacts | None) -> bool:
        """Take in how far the Deployment is; True if that is news."""
        record.num_sightings += 1
        if seen == record.deployment:
            return False
        record.deployment = seen
        return True

    def _renew_period_s(self, key: ServiceKey) -> float:
        """Three times within a lease at least, however short it is."""
        record = self.directory.get(key)
        lease_s = record.lease_seconds if record else DEFAULT_LEASE_S
        return min(self._settings.drift_seconds, lease_s / 3)

    async def _ensure(self, key: ServiceKey) -> None:
        await self._reconciler.ensure(key)

    async def _recheck_secrets(self, key: ServiceKey) -> None:
        self._reconciler.recheck_secrets(key)
        self.queue.add(key)

    async def _resync(self, key: ServiceKey) -> None:
        self._reconciler.resync(key)
        self.queue.add(key)
