"""What can go wrong in the operator.

OperatorError
├── KubeError           the API server refused or did not answer; carries its status and reason
│   ├── NotFoundError   404
│   └── ConflictError   409: somebody else wrote first
├── ForeignChildError   an object with a child's name exists and is not ours
│   └── LeftoverChildError  it belonged to a deleted service of the same name and is on its way out
├── RetryLaterError     a pass has to be made again; nothing is broken
└── SettingsError       the operator's own settings cannot be obeyed
"""


class OperatorError(Exception):
    """Root of everything the operator raises on purpose."""


class SettingsError(OperatorError):
    """The operator's own settings cannot be obeyed; the message names the setting and the way out."""


class KubeError(OperatorError):
    """The API server refused or did not answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        """HTTP status, 0 when there was no answer."""
        self.reason = reason
        self.message = message


class NotFoundError(KubeError):
    """The object is not there."""


class ConflictError(KubeError):
    """Somebody else wrote first, or owns a field."""


class ForeignChildError(OperatorError):
    """An object with a child's name exists, and this service does not own it: it is left alone."""


class LeftoverChildError(ForeignChildError):
    """The object belonged to a deleted LLMService of the same name: the garbage collector takes it away."""


class RetryLaterError(OperatorError):
    """A pass did what it could and has to be made again soon."""
