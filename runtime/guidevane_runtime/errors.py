"""Every error of the runtime that a person gets to read.

GuidevaneError
├── ClientError                 4xx: the request is at fault
│   ├── InvalidRequest          400
│   ├── Unauthorized            401
│   ├── NotFound                404
│   ├── Conflict                409
│   ├── BodyTooLarge            413
│   ├── UnsupportedBody         415
│   └── TooManyRequests         429
└── ServerError                 5xx: we are at fault, or busy
    ├── Overloaded              503
    ├── EngineUnavailable       503
    ├── WaitedTooLong           504
    │   └── DeadlineExceeded    504
    └── StartError              500, fatal: a restart does not help
        ├── ModelLoadError
        │   ├── ModelNotFound   the path is missing, or holds no model
        │   ├── UnsupportedModel  a model, but not one that this runtime computes
        │   └── BrokenModel     truncated files, missing tensors, wrong shapes
        └── DeviceError         device, dtype or memory that is not there

A message carries the value, the limit and the way out.
"""

# ruff: noqa: N818 (a name says what happened; the tree says that it is an error)


class GuidevaneError(Exception):
    """Root of the tree. `status` is the HTTP status of the reply, `str(error)` its message."""

    status = 500
    retry_after_s: int | None = None
    """When another try is worth it, where that is known."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the request field at fault, as the client wrote it."""
        self.code = code
        """Machine-readable reason, stable across releases."""


class ClientError(GuidevaneError):
    """The request is at fault: sent again as it is, it fails again (429 apart)."""

    status = 400


class InvalidRequest(ClientError):
    """A field is missing, malformed or out of range."""


class Unauthorized(ClientError):
    """No credentials, or the wrong ones."""

    status = 401


class NotFound(ClientError):
    """No such route or model."""

    status = 404


class Conflict(ClientError):
    """The change was computed against a state that has moved on."""

    status = 409


class BodyTooLarge(ClientError):
    """More bytes than a body may have."""

    status = 413


class UnsupportedBody(ClientError):
    """A body in a form that is not read here."""

    status = 415


class TooManyRequests(ClientError):
    """The client is at its own cap; others are served."""

    status = 429


class ServerError(GuidevaneError):
    """The request may be fine; it could not be served."""


class Overloaded(ServerError):
    """The waiting room is full."""

    status = 503


class EngineUnavailable(ServerError):
    """The engine is starting, draining, restarting or gone."""

    status = 503


class WaitedTooLong(ServerError):
    """waitingTimeoutMilliseconds passed before the first step."""

    status = 504


class DeadlineExceeded(WaitedTooLong):
    """The request's own deadline passed, before its first step or later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="deadline_exceeded")


class StartError(ServerError):
    """The engine can't start, and a restart does not help: settings, model or machine must change."""


class ModelLoadError(StartError):
    """The model can't be loaded."""


class ModelNotFound(ModelLoadError):
    """The model path is missing or holds nothing that looks like a model."""


class UnsupportedModel(ModelLoadError):
    """A readable model with an architecture, a feature or a weight format that this runtime does not compute."""


class BrokenModel(ModelLoadError):
    """Files are truncated, tensors are missing or have the wrong shape, metadata contradicts itself."""


class DeviceError(StartError):
    """The wanted device, dtype or memory is not there."""
