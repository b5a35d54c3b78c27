"""Keeps the children of a service as they are declared: applies what is new, and sets right what others changed."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from guidevane_api.conditions import EventReason
from guidevane_api.llmservice import KIND
from guidevane_operator.children import PDB_KIND, RenderContext, render, wants_pdb
from guidevane_operator.errors import ForeignChildError, KubeError, LeftoverChildError
from guidevane_operator.events import EventRecorder
from guidevane_operator.kube import RESOURCES, KubeClient, Manifest, ServiceKey
from guidevane_operator.ledger import (
    Child,
    ChildKey,
    Sighting,
    content_of,
    count_correction,
    digest_of,
    pause_s,
)
from guidevane_operator.record import ServiceRecord

logger = logging.getLogger(__name__)

PERMANENT = range(400, 500)
"""Statuses with which the API server says that the object itself is at fault."""
TRANSIENT = (404, 408, 409, 429)


@dataclass
class ChildKeeper:
    """Applies the children of services."""

    kube: KubeClient
    recorder: EventRecorder
    clock: Callable[[], float]
    """Monotonic seconds."""
    ask_for_pass: Callable[[ServiceKey], None]
    """Queues a pass."""

    async def keep(self, record: ServiceRecord, context: RenderContext) -> None:
        """Apply what differs from what was applied last, or was changed since; delete a budget that is not wanted."""
        before = record.child_error
        record.contested = ""
        await self._tell_of_scaling(record)
        manifests = render(context)
        wanted = {_key_of(manifest) for manifest in manifests}
        record.children.keep_only(wanted | {ChildKey(PDB_KIND, record.key.name)})
        try:
            for manifest in manifests:
                await self._apply(record, manifest)
            if not wants_pdb(context):
                await self._withdraw(record, ChildKey(PDB_KIND, record.key.name))
        except LeftoverChildError as error:
            record.child_error = before = str(error)  # nobody has to do anything
        except ForeignChildError as error:
            record.child_error = str(error)
        except KubeError as error:
            if error.status not in PERMANENT or error.status in TRANSIENT:
                raise
            record.child_error = str(error)
        else:
            record.child_error = ""
        if record.child_error not in ("", before):
            await self.recorder.post(record.body, EventReason.CHILD_REFUSED, record.child_error)

    async def _tell_of_scaling(self, record: ServiceRecord) -> None:
        """Say who scaled the Deployment, which is about to be undone: only spec.replicas has a say."""
        found, wanted = record.deployment, record.wanted_replicas
        if found is None or not found.scaled_by or found.replicas == wanted:
            return
        note = (
            f"Deployment {record.key.name} was scaled to {found.replicas} by {found.scaled_by} and goes back to"
            f" {wanted}; scale the LLMService instead: its spec.replicas decides, and it has a scale subresource"
        )
        await self.recorder.post(record.body, EventReason.CONFLICTING_AUTOSCALER, note)

    async def _apply(self, record: ServiceRecord, manifest: Manifest) -> None:
        """Apply one child unless it was applied just so and still is so."""
        key, digest = _key_of(manifest), digest_of(manifest)
        child = record.children.expect(key)
        if child.in_doubt:
            known, found = child.seen, await self._existing(record, key)
            if child.seen is known:  # else a watch brought news meanwhile, and asked for another pass
                record.children.check(key, found)
        disturbed, is_new = child.is_disturbed, not child.digest
        if child.digest == digest and (not disturbed or self._is_contested(record, key, child)):
            return
        if disturbed or is_new:
            await self._existing(record, key)
        undone = child.seen if disturbed else None
        answer = await self.kube.apply(manifest)
        # Where the answer is what was seen, somebody wrote fields that are not ours: they stay, and nobody quarrels.
        if undone and undone.content != content_of(answer):
            _log_correction(record, key, undone)
            count_correction(child, self.clock())
        record.children.note(key, digest, answer)
        if child.is_disturbed:  # it may be as it was before our write, which was no news when it was seen
            self.ask_for_pass(record.key)

    def _is_contested(self, record: ServiceRecord, key: ChildKey, child: Child) -> bool:
        """Whether somebody changes this child again and again, so that it has to wait for its next correction."""
        pause = pause_s(child, self.clock())
        if pause:
            by = (child.seen.by if child.seen else "") or "another operator"
            what = "deleted again" if child.is_gone else f"changed again, last by {by}"
            record.contested = (
                f"{key.kind} {key.name} was set right {child.corrections} times in a row and is {what};"
                " end that, or say what you want in the LLMService"
            )
        return pause > 0

    async def _withdraw(self, record: ServiceRecord, key: ChildKey) -> None:
        """Delete a child that is no longer wanted; somebody else's object of that name stays."""
        if record.children.is_withdrawn(key):
            return
        with contextlib.suppress(ForeignChildError):
            if await self._existing(record, key):
                await self.kube.delete(key.kind, record.key)
        record.children.withdraw(key)

    async def _existing(self, record: ServiceRecord, key: ChildKey) -> Manifest | None:
        """The child as it is, None if there is none. Raises ForeignChildError for somebody else's object."""
        found = await self.kube.try_get(RESOURCES[key.kind], ServiceKey(record.key.namespace, key.name))
        owners = (found or {}).get("metadata", {}).get("ownerReferences") or ()
        if found is not None and record.uid not in [owner.get("uid") for owner in owners]:
            if any(owner.get("kind") == KIND and owner.get("name") == record.key.name for owner in owners):
                leftover = f"{key.kind} {key.name} of the deleted LLMService of this name is gone"
                raise LeftoverChildError(f"waiting until {leftover}")
            raise ForeignChildError(
                f"{key.kind} {key.name} exists and is not of this LLMService;"
                " delete it, or give the LLMService another name"
            )
        return found


def _key_of(manifest: Manifest) -> ChildKey:
    """Which child a manifest is."""
    return ChildKey(manifest["kind"], manifest["metadata"]["name"])


def _log_correction(record: ServiceRecord, key: ChildKey, undone: Sighting) -> None:
    """Say what was set right, and whose work it was."""
    extra = {"namespace": record.key.namespace, "service": record.key.name, "kind": key.kind, "child": key.name}
    what = "changed" if undone.content else "deleted"
    logger.info("child was %s and is set right", what, extra=extra | {"by": undone.by})
