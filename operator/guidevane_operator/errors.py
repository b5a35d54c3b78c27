"""What can go wrong in the operator.

OperatorError
├── KubeError            the API server refused or did not answer; carries its status and reason
│   ├── KubeNotFound     404
│   └── KubeConflict     409: somebody else wrote first
└── SettingsError        the operator's own settings cannot be obeyed
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


class KubeNotFound(KubeError):
    """The object is not there."""


class KubeConflict(KubeError):
    """Somebody else wrote first, or owns a field."""
