"""What the operator applied of a service's children, and what was seen of them since.

Level-triggered: whether a child has to be set right follows from the newest sighting alone, so it does not matter in
which order our own writes, their echoes and the edits of others arrive. The ledger knows no API.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from guidevane_operator.kube import FIELD_MANAGER, Manifest

WITHDRAWN = "withdrawn"
"""In place of a digest: the child is not wanted and not there."""
FREE_CORRECTIONS = 3
"""So many times in a row a child is set right at once."""
MAX_PAUSE_S = 300.0
"""Longest pause between two corrections of one child, seconds: that of the resync by default."""
CALM_S = 600.0
"""After so long without a correction the next one is at once again, seconds."""
BOOKKEEPING = ("apiVersion", "kind", "metadata", "status")


class ChildKey(NamedTuple):
    """Which child of a service."""

    kind: str
    name: str


@dataclass(frozen=True)
class Sighting:
    """A child as it was seen last."""

    version: int
    content: str
    """Hash of what `content_of` looks at; empty if the child is gone."""
    by: str = ""
    """Field manager, other than ours, that wrote last."""


@dataclass
class Child:
    """One child: as it was applied last, and as it was seen since."""

    digest: str = ""
    """Hash of the manifest that was applied; empty while the first call is under way."""
    version: int = 0
    content: str = ""
    seen: Sighting | None = None
    in_doubt: bool = False
    """It has to be read before it counts as it was: at a resync, whatever the watches said."""
    corrections: int = 0
    """In a row, without a calm time in between."""
    corrected_at_s: float = 0.0

    @property
    def is_gone(self) -> bool:
        """It was applied, and somebody deleted it since."""
        return self._is_ours and self.seen is not None and not self.seen.content and self.seen.version >= self.version

    @property
    def is_disturbed(self) -> bool:
        """It was applied, and is not now what the API server answered then."""
        if not self._is_ours or self.seen is None or self.seen.version < self.version:
            return False
        return self.seen.content != self.content

    @property
    def _is_ours(self) -> bool:
        return self.digest not in ("", WITHDRAWN)


@dataclass
class ChildLedger:
    """The children of one service."""

    children: dict[ChildKey, Child] = field(default_factory=dict)

    def see(self, key: ChildKey, body: Manifest, gone: bool = False) -> bool:
        """Take in how a child looks now; True if a pass should look at it."""
        child = self.children.get(key)
        if child is None or child.digest == WITHDRAWN:
            return False
        version = version_of(body)
        if child.seen is not None and version < child.seen.version:
            return False
        child.seen = Sighting(version, "" if gone else content_of(body), _by(body))
        return child.is_disturbed or not child.digest

    def check(self, key: ChildKey, found: Manifest | None) -> None:
        """Take in what a read found, None for nothing: it counts, whatever its version and what watches said."""
        child = self.children.get(key)
        if child is None:
            return
        child.in_doubt = False
        version = version_of(found) if found else child.version
        child.seen = Sighting(version, content_of(found) if found else "", _by(found or {}))
        child.version = min(child.version, version)

    def expect(self, key: ChildKey) -> Child:
        """The entry of a child that is about to be applied: from here on its sightings count."""
        child = self.children.get(key)
        if child is None or child.digest == WITHDRAWN:
            child = self.children[key] = Child()
        return child

    def note(self, key: ChildKey, digest: str, answer: Manifest) -> None:
        """A child was applied, and the API server answered how it is now."""
        child = self.expect(key)
        child.digest, child.version, child.content = digest, version_of(answer), content_of(answer)
        if child.seen is not None and child.seen.version <= child.version:
            child.seen = None  # the answer is as new

    def keep_only(self, wanted: Container[ChildKey]) -> None:
        """Other children are not declared any more: whatever becomes of them is no news."""
        self.children = {key: child for key, child in self.children.items() if key in wanted}

    def withdraw(self, key: ChildKey) -> None:
        """A child is not wanted, and is not there any more."""
        self.children[key] = Child(WITHDRAWN)

    def doubt(self) -> None:
        """Read every child in the next pass, and look again for one that is not wanted."""
        for child in self.children.values():
            child.in_doubt = True

    def is_withdrawn(self, key: ChildKey) -> bool:
        """It was seen to, and not put in doubt since, that this child is not there."""
        child = self.children.get(key)
        return child is not None and child.digest == WITHDRAWN and not child.in_doubt

    def gone(self) -> list[ChildKey]:
        """Children that somebody deleted."""
        return [key for key, child in self.children.items() if child.is_gone]


def pause_s(child: Child, now_s: float) -> float:
    """How long this child is still left as somebody else made it.

    Two controllers that each set their own value would else write as fast as the API server answers.
    """
    if child.corrections < FREE_CORRECTIONS or now_s - child.corrected_at_s > CALM_S:
        return 0.0
    pause = min(MAX_PAUSE_S, 2.0 ** (child.corrections - FREE_CORRECTIONS))
    return max(0.0, child.corrected_at_s + pause - now_s)


def count_correction(child: Child, now_s: float) -> None:
    """A child is set right."""
    calm = now_s - child.corrected_at_s > CALM_S
    child.corrections, child.corrected_at_s = 1 if calm else child.corrections + 1, now_s


def digest_of(manifest: Manifest) -> str:
    """A name for what is asked for."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def content_of(body: Mapping[str, Any]) -> str:
    """Hash of a child as the API server holds it: all but status and what changes with every write.

    Annotations are left out: none is ours, and controllers keep their notes there.
    """
    meta = body.get("metadata") or {}
    content = {name: value for name, value in body.items() if name not in BOOKKEEPING}
    return digest_of({"content": content, "labels": meta.get("labels"), "owners": meta.get("ownerReferences")})


def version_of(body: Mapping[str, Any]) -> int:
    """The resource version as a number: of one kind they are ordered, 0 where the server's are opaque."""
    version = str((body.get("metadata") or {}).get("resourceVersion", ""))
    return int(version) if version.isdigit() else 0


def _by(body: Mapping[str, Any]) -> str:
    """Who wrote last, other than we ourselves."""
    entries: Iterable[Mapping[str, Any]] = (body.get("metadata") or {}).get("managedFields") or ()
    others = [entry for entry in entries if entry.get("manager") != FIELD_MANAGER and not entry.get("subresource")]
    return str(max(others, key=lambda entry: str(entry.get("time", ""))).get("manager", "")) if others else ""
