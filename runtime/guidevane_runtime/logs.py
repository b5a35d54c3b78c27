"""Log lines: text with a key=value tail, or one JSON object.

Never a prompt, a token or a secret: nobody may hand one in.
"""

import logging
import sys
from datetime import UTC, datetime

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(layout: str) -> None:
    """Send everything from INFO on to stderr; `layout` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if layout == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.000Z INFO guidevane_runtime.server.process: draining in_flight=3"""

    def format(self, record: logging.LogRecord) -> str:
        tail = "".join(f" {key}={_shown(value)}" for key, value in _extras(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line; extras are its own keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {"time": _time(record), "level": record.levelname, "logger": record.name}
        entry |= {"message": record.getMessage(), **{key: _shown(value) for key, value in _extras(record).items()}}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _shown(value: object) -> object:
    return value if isinstance(value, int | float | bool | None) else str(value)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
