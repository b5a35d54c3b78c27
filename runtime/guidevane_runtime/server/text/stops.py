"""Stop strings over streamed text."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    text: str
    """What may be shown now."""
    stop: str | None
    """The stop string that ended the text, if one did."""


class StopMatcher:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    It holds back only what may still become a stop string: the longest end of the text that is a proper prefix of
    one. Of two that are complete at the same character, the one that began first wins, so that neither is shown.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> StopMatch:
        """Add text; nothing may be pushed after a match."""
        if not self._stops:
            return StopMatch(piece, None)
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(text[: end if self._include_stop else start], stop)
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], None)

    def flush(self) -> str:
        """The text held back, when the request ended by something else."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) and len(stop) > size for stop in self._stops):
                return size
        return 0
