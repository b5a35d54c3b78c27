"""One level-triggered pass over one service: it does not care why it runs, and running it twice changes nothing.

The order is: look, accept the spec, settle limits (persisted before sent), children, push, status. The operator
never writes spec.
"""

import base64
import logging
import secrets
from dataclasses import dataclass

from pydantic import ValidationError

from guidevane_api.admin import LimitsSource
from guidevane_api.conditions import EventReason
from guidevane_api.limits import SchedulerLimits
from guidevane_api.llmservice import NAME_LABEL, RESTART_ANNOTATION
from guidevane_api.spec_traffic import TenancySpec
from guidevane_operator import acceptance
from guidevane_operator.admin_client import Unreachable
from guidevane_operator.children import RenderContext, revision_of
from guidevane_operator.children.context import TOKEN_KEY
from guidevane_operator.errors import KubeError, RetryLaterError
from guidevane_operator.events import EventRecorder
from guidevane_operator.facts import read_deployment, read_pod
from guidevane_operator.kube import DEPLOYMENTS, LLM_SERVICES, PODS, RESOURCES, KubeClient, Manifest, ServiceKey
from guidevane_operator.ledger import ChildKey
from guidevane_operator.limits_plan import DesiredLimits, next_desired
from guidevane_operator.push import LimitsPusher
from guidevane_operator.record import Directory, ServiceRecord
from guidevane_operator.status_writer import StatusWriter
from guidevane_operator.tenants import SecretData, TenantsPlan, plan_tenants, secret_names
from guidevane_operator.upkeep import ChildKeeper

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
MAX_DECISIONS = 3
"""Tries to read, or to persist limits, while others write the same objects."""
SILENT = 2
"""Unanswered calls in a row after which an admin port is said not to answer."""


@dataclass
class Reconciler:
    """Brings the cluster to what an LLMService says."""

    directory: Directory
    kube: KubeClient
    pusher: LimitsPusher
    recorder: EventRecorder
    writer: StatusWriter
    keeper: ChildKeeper
    runtime_image: str

    async def ensure(self, key: ServiceKey) -> None:
        """Make it so. Raises RetryLaterError or KubeError when it has to be tried again."""
        record = self.directory.get(key)
        if record is None:
            return
        async with record.lock:
            if record.is_gone or (record.needs_refresh and not await self._refresh(record)):
                return
            record.dealt_with = record.asked
            if record.deleting:
                record.observed_generation = record.generation
                await self.writer.write(record)
                return
            await self._accept(record)
            fault = None
            if not record.paused:
                await self._settle_limits(record)
                try:
                    await self._keep_children(record)
                except KubeError as error:
                    fault = error  # pods get their limits and status is written all the same
                if not record.deleting:
                    await self._push(record)
            await self.writer.write(record)
            if fault is not None:
                raise fault
            if not record.paused:
                self._ask_for_another_pass(record)

    async def renew(self, key: ServiceKey) -> None:
        """Renew the leases of all pods; a pod that lost its limits gets them again.

        Also while the API server is away: what stands is renewed until somebody says otherwise.
        """
        record = self.directory.get(key)
        if record is None or record.desired is None:
            return
        async with record.lock:
            if record.paused or record.deleting:
                return
            await self._push(record, renew=True)
            await self.writer.write(record)

    def recheck_secrets(self, key: ServiceKey) -> None:
        """The next pass reads the service's own Secrets and its tenants' keys again: no watch tells of them."""
        record = self.directory.get(key)
        if record is not None:
            record.secrets_are_due = True

    def resync(self, key: ServiceKey) -> None:
        """The next pass reads and applies everything, whatever the watches said."""
        record = self.directory.get(key)
        if record is not None:
            record.needs_refresh = True

    async def _refresh(self, record: ServiceRecord) -> bool:
        """Read the object, its pods and its Deployment; False if the object is gone."""
        if not await self._reread(record):
            return False
        await self._look(record)
        record.children.doubt()
        record.desired = _newest(record.desired, persisted_limits(record))
        record.revision = record.revision or ((record.status.rollout and record.status.rollout.revision) or "")
        record.secrets_are_due = True
        record.needs_refresh = False
        return True

    async def _reread(self, record: ServiceRecord) -> bool:
        """Read the object; False if it is gone, or another by its name is there."""
        held = record.body
        body = await self.kube.try_get(LLM_SERVICES, record.key)
        if body is None or body["metadata"].get("uid") != record.uid:
            self.directory.drop(record.key, record.uid)
            if body is not None:
                self.directory.put(body)  # deleted and made again: the new one starts afresh
                self.writer.ask_for_pass(record.key)
            return False
        if record.body is held:
            record.body = body  # whatever its version says: a restored etcd counts from an earlier one
        else:
            record.take_body(body)
        return True

    async def _look(self, record: ServiceRecord) -> None:
        """Read the pods and the Deployment; once more if watches brought news meanwhile, which may be newer."""
        for _ in range(MAX_DECISIONS):
            seen = record.num_sightings
            pods = await self.kube.list_labelled(PODS, record.key.namespace, NAME_LABEL, record.key.name)
            deployment = await self.kube.try_get(DEPLOYMENTS, record.key)
            if record.num_sightings == seen:
                break
        record.pods = {pod.name: pod for pod in map(read_pod, pods)}
        record.deployment = read_deployment(deployment) if deployment else None

    async def _accept(self, record: ServiceRecord) -> None:
        """Take over the spec if every field of it is in effect; else say so and keep what runs."""
        record.observed_generation = record.generation
        verdict = acceptance.accept(dict(record.body.get("spec") or {}))
        if isinstance(verdict, acceptance.Accepted):
            record.secrets_are_due |= record.spec is None or record.spec.tenancy != verdict.spec.tenancy
            record.spec, record.refused, record.refused_reason = verdict.spec, "", ""
            return
        if verdict.message != record.refused:
            await self.recorder.post(record.body, EventReason.SPEC_REFUSED, verdict.message)
        record.refused, record.refused_reason = verdict.message, verdict.reason.value

    async def _settle_limits(self, record: ServiceRecord) -> None:
        """Decide on limits and epoch, and persist them if they are new."""
        for _ in range(MAX_DECISIONS):
            if record.spec is None or record.refused:
                return
            desired = next_desired(record.spec.limits, record.spec.envelope, record.desired)
            if desired == record.desired:
                return
            previous = record.desired
            if await self.writer.persist_limits(record, desired):
                _log_change(record.key, previous, desired)
                record.announce_limits = previous is not None
                return
            if not await self._refresh(record):
                raise RetryLaterError(f"{record.key.name} was deleted meanwhile")
            record.dealt_with = record.asked
            await self._accept(record)
        raise RetryLaterError(f"status of {record.key.name} is written by somebody else all the time")

    async def _keep_children(self, record: ServiceRecord) -> None:
        """Apply what differs from what was applied last, and what others changed or deleted since.

        Under a refused spec the accepted one before it goes on to hold.
        """
        if record.spec is None:
            await self._read_token(record)  # what stands is pushed on
            return
        context = await self._context(record)
        record.revision = revision_of(context)
        # The children of a service that was deleted just now are gone for good, even if the watch has yet to say so.
        if record.children.gone() and not (await self._reread(record) and not record.deleting):
            return
        await self.keeper.keep(record, context)

    async def _context(self, record: ServiceRecord) -> RenderContext:
        """What children are rendered from."""
        assert record.spec is not None, "children are rendered from an accepted spec only"
        await self._look_at_secrets(record, record.spec.tenancy)
        record.token = record.token or secrets.token_urlsafe(TOKEN_BYTES)
        assert record.tenants is not None, "keys of tenants were read"
        annotations = record.body["metadata"].get("annotations") or {}
        return RenderContext(
            key=record.key,
            uid=record.body["metadata"].get("uid", ""),
            spec=record.spec,
            runtime_image=self.runtime_image,
            token=record.token,
            tenants=record.tenants.file,
            restart_requested_at=annotations.get(RESTART_ANNOTATION, ""),
        )

    async def _look_at_secrets(self, record: ServiceRecord, tenancy: TenancySpec | None) -> None:
        """Read what is kept in Secrets, if that is due: by name, so that no watch or list of Secrets is needed."""
        if record.token and not record.secrets_are_due:
            return
        await self._read_token(record)
        await self._own_secret(record, "tenants")
        await self._load_tenants(record, tenancy)
        record.secrets_are_due = False

    async def _read_token(self, record: ServiceRecord) -> None:
        """Read the admin token. Without its Secret it stays as it was: pods know no other."""
        record.token = token_in(await self._own_secret(record, "admin") or {}) or record.token

    async def _own_secret(self, record: ServiceRecord, suffix: str) -> Manifest | None:
        """Read one of the service's own Secrets."""
        key = ChildKey("Secret", f"{record.key.name}-{suffix}")
        found = await self.kube.try_get(RESOURCES["Secret"], ServiceKey(record.key.namespace, key.name))
        record.children.check(key, found)
        return found

    async def _load_tenants(self, record: ServiceRecord, tenancy: TenancySpec | None) -> None:
        """Read the tenants' keys, and tell who is locked out now. Only digests are kept."""
        found: dict[str, SecretData] = {}
        for name in secret_names(tenancy):
            secret = await self.kube.try_get(RESOURCES["Secret"], ServiceKey(record.key.namespace, name))
            if secret is not None:
                found[name] = secret.get("data") or {}
        before = record.tenants or TenantsPlan()
        record.tenants = plan_tenants(tenancy, found)
        if record.tenants.locked.keys() - before.locked.keys():
            await self.recorder.post(record.body, EventReason.TENANT_LOCKED_OUT, record.tenants.sentence)

    async def _push(self, record: ServiceRecord, renew: bool = False) -> None:
        """Bring the limits to the pods; outrun a pod that has seen a later epoch, if nobody else wrote it."""
        outcome = await self.pusher.push(record, renew)
        if outcome.fenced_at is not None and await self._outrun(record, outcome.fenced_at):
            outcome = await self.pusher.push(record)
        for name in outcome.corrected:
            note = f"the engine of pod {name} started anew and has its limits again"
            await self.recorder.post(record.body, EventReason.LIMITS_DRIFT_CORRECTED, note, name)
        await self._announce(record)

    async def _outrun(self, record: ServiceRecord, epoch: int) -> bool:
        """A pod holds a later epoch: adopt it if it is in status, else status was lost, and we go above it."""
        asked = record.desired.epoch if record.desired else 0
        if not await self._refresh(record):
            return False
        desired = record.desired
        if desired is None:
            return False
        # Another operator's own epoch is adopted as it is: it would outrun ours in turn.
        if desired.epoch > epoch or asked < desired.epoch == epoch:
            return True
        logger.warning("pod is ahead of status", extra={"service": record.key.name, "epoch": epoch})
        return await self.writer.persist_limits(record, desired.above(epoch))

    async def _announce(self, record: ServiceRecord) -> None:
        """Say once that new limits are everywhere, or which admin port does not answer."""
        ready = record.ready_pods()
        desired = record.desired
        if record.announce_limits and ready and desired and len(record.pods_in_sync()) == len(ready):
            record.announce_limits = False
            if desired.source is LimitsSource.SPEC:
                note = f"new spec.limits are effective on {len(ready)} pods, epoch {desired.epoch}"
                await self.recorder.post(record.body, EventReason.LIMITS_CHANGED, note)
        acks = {pod.name: record.acks[pod.name] for pod in ready if pod.name in record.acks}
        # Limits are obeyed between two steps, and a long step outlasts one timeout: twice is silence.
        silent = {name: ack for name, ack in acks.items() if ack.silences >= SILENT}
        told, record.told_silent = record.told_silent, frozenset(silent)
        for name in sorted(silent.keys() - told):
            result = silent[name].result
            note = f"pod {name}: {result.message if isinstance(result, Unreachable) else 'no answer'}"
            await self.recorder.post(record.body, EventReason.ADMIN_UNREACHABLE, note, name)

    def _ask_for_another_pass(self, record: ServiceRecord) -> None:
        """What could not be done now is tried again after a growing pause."""
        if record.child_error:
            raise RetryLaterError(f"a child was refused: {record.child_error}")
        if record.contested:
            raise RetryLaterError(record.contested)


def token_in(secret: Manifest) -> str:
    """The admin token in its Secret; empty if there is none, or one that no HTTP header can carry."""
    encoded = (secret.get("data") or {}).get(TOKEN_KEY, "")
    token = base64.b64decode(encoded).decode("ascii", "replace").strip()
    return token if token.isascii() and token.isprintable() else ""


def persisted_limits(record: ServiceRecord) -> DesiredLimits | None:
    """The limits that status says were asked for last; None if there are none that can be read."""
    limits = record.status.limits
    if limits is None or limits.desired is None or not limits.epoch:
        return None
    try:
        desired = SchedulerLimits(**limits.desired.given())
    except ValidationError:
        return None
    source = LimitsSource(limits.source.value) if limits.source and limits.source != "Lease" else LimitsSource.SPEC
    return DesiredLimits(desired, limits.epoch, source, limits.spec_hash or "")


def _newest(ours: DesiredLimits | None, theirs: DesiredLimits | None) -> DesiredLimits | None:
    """The one with the higher epoch: epochs only grow, and a later one in status is another operator's."""
    if ours is None or theirs is None:
        return ours or theirs
    return theirs if theirs.epoch > ours.epoch else ours


def _log_change(key: ServiceKey, before: DesiredLimits | None, now: DesiredLimits) -> None:
    """Old and new value of every limit that changed."""
    old, new = (before or now).limits.model_dump(), now.limits.model_dump()
    changed = {name: f"{old[name]} -> {value}" for name, value in new.items() if old[name] != value}
    logger.info(
        "limits changed",
        extra={
            "namespace": key.namespace,
            "service": key.name,
            "epoch": now.epoch,
            "source": now.source.value,
            "changed": changed,
        },
    )
