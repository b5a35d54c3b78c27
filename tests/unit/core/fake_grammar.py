"""The state of an output's grammar, as tests drive it."""

from dataclasses import dataclass, field


@dataclass
class FakeGrammar:
    """Ready when the test says so; remembers what it was told."""

    is_ready: bool = False
    error: str = ""
    accepted: list[int] = field(default_factory=list)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)
