"""Readers of recorded traces: CSV with a header, and Mooncake's JSON lines.

Columns of a CSV: arrival_s (none: every request comes at 0), prompt_tokens, output_tokens, tenant or client_id, and
class (interactive or offline), priority and deadline_ms, each of which may be missing or empty.
The names that Azure and Mooncake publish under (ContextTokens, input_length, ...) are understood too.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf, nan
from pathlib import Path
from typing import Any

from guidevane_bench.errors import InputError
from guidevane_bench.workload.request import UNIQUE_MARK, LoadRequest
from guidevane_runtime.core.tenants import RequestClass

PROMPT_NAMES = ("prompt_tokens", "ContextTokens", "input_length")
OUTPUT_NAMES = ("output_tokens", "GeneratedTokens", "output_length")
TENANT_NAMES = ("tenant", "client_id")
MAX_SPAN_S = 366 * 86400
"""From the first arrival of a load to the last, at most: a time in the wrong unit would never come."""


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
    if (rows[-1].arrival_s - start_s) * cut.time_scale > MAX_SPAN_S:
        raise InputError(f"trace {path} lasts more than {MAX_SPAN_S} s, a year; lower --time-scale or mend its times")
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
        # -sig: a spreadsheet's byte order mark would become part of the first column's name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            is_json = path.suffix == ".jsonl"
            records = _json_lines(path, file) if is_json else csv.DictReader(file, skipinitialspace=True)
            return [_request(path, number, record) for number, record in enumerate(records, start=1)]
    except OSError as error:
        raise InputError(f"trace {path} can't be read: {error.strerror}; give the path of a CSV or .jsonl") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"trace {path} is neither CSV nor JSON lines: {error}; see docs/simulator.md") from error


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(f"trace {path}, line {number} is no JSON: {error}; mend it or drop it") from error


def _request(path: Path, number: int, record: Any) -> LoadRequest:
    """Raises InputError for a record that says no request, by its number."""
    try:
        if not isinstance(record, Mapping) or None in record:
            raise ValueError("it has more cells than there are columns" if isinstance(record, Mapping) else "no object")
        tenant = _value(record, TENANT_NAMES)
        deadline_ms = _number(record, ("deadline_ms",), least=1)
        return LoadRequest(
            0,
            _arrival_s(record),
            _count(record, PROMPT_NAMES),
            _count(record, OUTPUT_NAMES),
            "" if tenant is None else str(tenant),
            _prefix_ids(record),
            _class(record),
            int(_number(record, ("priority",)) or 0),
            None if deadline_ms is None else deadline_ms / 1000,
        )
    except ValueError as error:
        raise InputError(
            f"trace {path}, request {number}: {error}; mend it or drop it, see docs/simulator.md"
        ) from error


def _value(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Of the first column that is there. None: none is, or it is empty."""
    value = next((record[name] for name in names if name in record), None)
    return None if value == "" else value


def _number(record: Mapping[str, Any], names: Sequence[str], least: float = -inf) -> float | None:
    value = _value(record, names)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not least <= number < inf:
        what = "a finite number" if least == -inf else f"a number, {least:g} or more"
        raise ValueError(f"{' or '.join(name for name in names if name in record)} is {value!r}, which is not {what}")
    return number


def _count(record: Mapping[str, Any], names: Sequence[str]) -> int:
    number = _number(record, names, least=1)
    if number is None:
        raise ValueError(f"it has none of {', '.join(names)}")
    return int(number)


def _class(record: Mapping[str, Any]) -> RequestClass:
    given = _value(record, ("class",)) or RequestClass.INTERACTIVE
    if given not in list(RequestClass):
        raise ValueError(f"class is {given!r}, which is none of {', '.join(RequestClass)}")
    return RequestClass(given)


def _prefix_ids(record: Mapping[str, Any]) -> tuple[int, ...]:
    given = record.get("hash_ids") or ()
    if not all(isinstance(prefix_id, int) and 0 <= prefix_id < UNIQUE_MARK - 1 for prefix_id in given):
        raise ValueError(f"hash_ids is {given!r}, which is no list of numbers from 0 to {UNIQUE_MARK - 2}")
    return tuple(given)


def _arrival_s(record: Mapping[str, Any]) -> float:
    """Seconds; Mooncake's own `timestamp` is in milliseconds, Azure's TIMESTAMP is a date."""
    if "arrival_s" not in record and "TIMESTAMP" in record:
        # Azure writes seven digits of a second, Python reads six.
        return datetime.fromisoformat(f"{record['TIMESTAMP']}"[:26] + "+00:00").timestamp()
    name, per_s = ("arrival_s", 1) if "arrival_s" in record else ("timestamp", 1000)
    number = _number(record, (name,), least=0)
    if number is None and name in record:
        raise ValueError(f"{name} is empty")
    return (number or 0.0) / per_s
