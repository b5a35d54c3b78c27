"""Readers of recorded traces: CSV with a header, and Mooncake's JSON lines.

Columns of a CSV: arrival_s (none: every request comes at 0), prompt_tokens, output_tokens, and tenant or client_id.
The names that Azure and Mooncake publish under (ContextTokens, input_length, ...) are understood too.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from guidevane_bench.errors import InputError
from guidevane_bench.workload.request import LoadRequest

PROMPT_NAMES = ("prompt_tokens", "ContextTokens", "input_length")
OUTPUT_NAMES = ("output_tokens", "GeneratedTokens", "output_length")
TENANT_NAMES = ("tenant", "client_id")


@dataclass(frozen=True, slots=True)
class TraceCut:
    """Which part of a trace is taken, and how it is scaled to the model at hand."""

    max_requests: int | None = None
    time_scale: float = 1.0
    """2 makes the gaps twice as long."""
    length_scale: float = 1.0
    """Applies to prompts and outputs; the result is at least 1 token."""
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None


def read_trace(path: Path, cut: TraceCut = TraceCut()) -> list[LoadRequest]:
    """All requests of a trace in order of arrival, the first at 0 s."""
    rows = _read(path)
    rows.sort(key=lambda row: row.arrival_s)
    if not rows:
        raise InputError(f"{path} holds no request; a trace has at least one")
    rows = rows[: cut.max_requests]
    start_s = rows[0].arrival_s
    return [_cut(replace(row, number=number), start_s, cut) for number, row in enumerate(rows)]


def _cut(row: LoadRequest, start_s: float, cut: TraceCut) -> LoadRequest:
    return replace(
        row,
        arrival_s=(row.arrival_s - start_s) * cut.time_scale,
        num_prompt_tokens=_scaled(row.num_prompt_tokens, cut.length_scale, cut.max_prompt_tokens),
        num_output_tokens=_scaled(row.num_output_tokens, cut.length_scale, cut.max_output_tokens),
        # Prefix blocks have a fixed size: scaled prompts no longer fit them.
        prefix_ids=row.prefix_ids if cut.length_scale == 1.0 else (),
    )


def _scaled(num_tokens: int, scale: float, most: int | None) -> int:
    scaled = max(1, round(num_tokens * scale))
    return scaled if most is None else min(scaled, most)


def _read(path: Path) -> list[LoadRequest]:
    """Rows as they lie in the file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            records = _json_lines(file) if path.suffix == ".jsonl" else csv.DictReader(file)
            return [_request(path, line, record) for line, record in enumerate(records, start=1)]
    except OSError as error:
        raise InputError(f"trace {path} can't be read: {error.strerror}; give the path of a CSV or .jsonl") from error
    except ValueError as error:
        raise InputError(f"trace {path} is neither CSV nor JSON lines: {error}") from error


def _json_lines(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    return (json.loads(line) for line in lines if line.strip())


def _request(path: Path, line: int, record: Mapping[str, Any]) -> LoadRequest:
    try:
        prompt, output = int(_first(record, PROMPT_NAMES)), int(_first(record, OUTPUT_NAMES))
        arrival_s = _arrival_s(record)
        prefix_ids = tuple(int(prefix_id) for prefix_id in record.get("hash_ids", ()))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}, request {line}: {error}; see docs/simulator.md for the columns") from error
    if prompt < 1 or output < 1 or arrival_s < 0:
        raise InputError(
            f"{path}, request {line}: {prompt} prompt and {output} output tokens at {arrival_s} s; "
            "both counts are 1 or more and the time 0 or more, drop the line"
        )
    tenant = next((str(record[name]) for name in TENANT_NAMES if name in record), "")
    return LoadRequest(0, arrival_s, prompt, output, tenant, prefix_ids)


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in record:
            return record[name]
    raise KeyError(f"it has none of the columns {', '.join(names)}")


def _arrival_s(record: Mapping[str, Any]) -> float:
    """Seconds; Mooncake's own `timestamp` is in milliseconds, Azure's TIMESTAMP is a date."""
    if "arrival_s" in record:
        return float(record["arrival_s"])
    if "timestamp" in record:
        return float(record["timestamp"]) / 1000
    if "TIMESTAMP" in record:
        # Azure writes seven digits of a second, Python reads six.
        return datetime.fromisoformat(record["TIMESTAMP"][:26] + "+00:00").timestamp()
    return 0.0
