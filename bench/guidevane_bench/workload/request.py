"""One request of a load: when it comes, how long it is, whose it is, and how it stands in line."""

from dataclasses import dataclass

from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.tenants import RequestClass

PREFIX_BLOCK_TOKENS = 512
"""Tokens that one prefix id of a Mooncake trace stands for."""

UNIQUE_MARK = 1 << 31
"""Above every prefix id, and room for as many requests in 32 bits: a token id that no other request has."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Sizes and times only: no trace holds text."""

    number: int
    """Position in the load, from 0; its name in the simulator."""
    arrival_s: float
    """Seconds after the load begins."""
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    prefix_ids: tuple[int, ...] = ()
    """Equal ids at the start of two requests mean equal prompt blocks of PREFIX_BLOCK_TOKENS."""
    request_class: RequestClass = RequestClass.INTERACTIVE
    priority: int = 0
    """Lower runs earlier, inside its tenant and class."""
    within_s: float | None = None
    """From its arrival to the end of its answer, at most; later it ends unanswered. None: whenever."""

    def standing(self, start_s: float = 0.0) -> Standing:
        """On a clock that stood at start_s when the load began."""
        arrival_s = start_s + self.arrival_s
        deadline_s = None if self.within_s is None else arrival_s + self.within_s
        return Standing(arrival_s, self.tenant, self.request_class, self.priority, deadline_s)

    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids that say which prompts share a beginning, and nothing else: no model reads them."""
        length = self.num_prompt_tokens
        if not self.prefix_ids:
            return (UNIQUE_MARK + self.number,) + (0,) * (length - 1)
        filler = (0,) * (PREFIX_BLOCK_TOKENS - 1)
        ids = [token_id for prefix_id in self.prefix_ids for token_id in (prefix_id + 1, *filler)][:length]
        return (*ids, *((UNIQUE_MARK + self.number,) * (length - len(ids))))
