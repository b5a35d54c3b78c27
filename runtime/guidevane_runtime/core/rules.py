"""Who may come in from the queue in one step, as rules that the scheduler obeys and explain() reads.

A rule knows one limit, for one step. Three kinds differ in who waits when it holds: a door rule holds everybody, an own
rule the request that it is asked about, a line rule the first in line and with it all behind it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from guidevane_runtime.core.messages import Hold
from guidevane_runtime.core.request import Request


class Held(NamedTuple):
    """By which limit, and at which value of which bound."""

    hold: Hold
    sentence: str
    """For people, with {value} and {bound} in their places: most are never read, so it is put together late."""
    value: int | None = None
    bound: int | None = None

    @property
    def why(self) -> str:
        return self.sentence.format(value=self.value, bound=self.bound)


class DoorRule(Protocol):
    def held(self) -> Held | None:
        """What keeps everybody outside right now."""


class AdmissionRule(Protocol):
    def held(self, request: Request) -> Held | None:
        """What keeps a waiting request outside right now; asking changes nothing that outlives the step."""

    def enter(self, request: Request) -> None:
        """Count a request that came in: it runs, has its blocks, and is part of the step."""


class Door:
    """What holds everybody: looked at before the rules of the queue are even made."""

    def __init__(self, *rules: DoorRule) -> None:
        self._rules = rules

    def held(self) -> Held | None:
        for rule in self._rules:
            if held := rule.held():
                return held
        return None


class AdmissionRules:
    """The rules that a waiting request meets once the door is open."""

    def __init__(self, *, own: Sequence[AdmissionRule], line: Sequence[AdmissionRule]) -> None:
        """own: whom they hold lets others pass. line: whom they hold stays first, and nobody passes.

        In this order; a rule may count on what those before it have let through.
        """
        self._own = own
        self._line = line

    def own_hold(self, request: Request) -> Held | None:
        return first_hold(self._own, request)

    def line_hold(self, head: Request) -> Held | None:
        return first_hold(self._line, head)

    def enter(self, request: Request) -> None:
        for rule in (*self._own, *self._line):
            rule.enter(request)


def first_hold(rules: Sequence[AdmissionRule], request: Request) -> Held | None:
    for rule in rules:
        if held := rule.held(request):
            return held
    return None
