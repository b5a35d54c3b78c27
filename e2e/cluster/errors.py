"""What can go wrong around the test cluster.

ClusterError            one sentence for people: the value, the limit, the way out
└── CommandError       a tool that we ran ended with a non-zero status
"""


class ClusterError(Exception):
    """Ends the command with status 1; its text is all that a user needs, so no traceback is printed."""


class CommandError(ClusterError):
    """Carries the tail of the tool's output, which is mostly the whole story."""

    def __init__(self, command: list[str], status: int, output: str) -> None:
        super().__init__(f"{' '.join(command)} ended with status {status}:\n{tail(output)}")
        self.status = status


def tail(text: str, num_lines: int = 20) -> str:
    return "\n".join(text.rstrip().splitlines()[-num_lines:])
