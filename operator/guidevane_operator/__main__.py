"""Start the operator: python -m guidevane_operator."""

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime

import kopf
from pydantic import ValidationError
from pydantic_settings import SettingsError as PydanticSettingsError

from guidevane_operator.app import GuidevaneOperator
from guidevane_operator.errors import SettingsError
from guidevane_operator.handlers import build_registry
from guidevane_operator.kube import load_configuration
from guidevane_operator.settings import Settings, read_settings

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TailFormatter(logging.Formatter):
    """Lines for people: the message, then what else is known as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one."""
        tail = "".join(f" {name}={value}" for name, value in extras(record).items())
        head, newline, trace = super().format(record).partition("\n")
        return head + tail + newline + trace


class JsonFormatter(logging.Formatter):
    """Lines for the cluster: one JSON object each."""

    def format(self, record: logging.LogRecord) -> str:
        """One object."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def extras(record: logging.LogRecord) -> dict[str, object]:
    """What was passed as `extra`; kopf's own bookkeeping is left out."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in STANDARD_FIELDS and not name.startswith(("k8s_", "settings"))
    }


def configure_logging(settings: Settings) -> None:
    """One handler on the root; debug lines of libraries stay out."""
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TailFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("guidevane_operator").setLevel(logging.DEBUG if settings.verbose else logging.INFO)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)  # a probe every few seconds is no news


async def serve(settings: Settings) -> None:
    """Run until the process is asked to end."""

    async def start() -> GuidevaneOperator:
        return GuidevaneOperator(settings, await load_configuration())

    namespaces = settings.watched_namespaces()
    await kopf.operator(
        registry=build_registry(start),
        namespaces=namespaces,
        clusterwide=not namespaces,
        standalone=True,
        liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz",
    )


def main() -> int:
    """Exit status 2 for settings that cannot be obeyed, as for any command line."""
    try:
        settings = read_settings(sys.argv[1:])
    except (SettingsError, ValidationError, PydanticSettingsError) as error:
        print(f"guidevane-operator: {error}", file=sys.stderr)
        return 2
    configure_logging(settings)
    asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
