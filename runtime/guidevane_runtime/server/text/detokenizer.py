"""Token ids to text, a piece at a time. It knows bytes and UTF-8; it never sees a request."""

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """Joins the bytes of tokens and gives out whole characters only.

    An incomplete UTF-8 sequence waits for its rest, so a delta never holds half a character. Bytes that can't become
    one are U+FFFD, as in a full decode: the concatenated deltas and the flush equal it for every split.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut."""
        return self._decoder.decode(b"", final=True)
