"""Structured output as the scheduler sees it: a grammar that is compiled elsewhere, and follows the accepted tokens."""

from typing import Protocol


class GrammarState(Protocol):
    """Of one request; owned by whoever compiles it and masks logits with it."""

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled. Until then its request has no KV block, no slot, no tokens, and no place in line."""

    @property
    def error(self) -> str:
        """Why it will never be ready, a compile that took too long included; empty otherwise. It ends the request."""

    def accept(self, token_id: int) -> None:
        """Move on by one token of the output: each once, in order, never a draft that was rejected.

        A preemption rolls nothing back: what is computed again was accepted before.
        """
