"""Options of the form kind:key=value,key=value, checked against a table of what there is."""

from collections.abc import Mapping
from dataclasses import dataclass

from guidevane_bench.errors import SpecError


@dataclass(frozen=True, slots=True)
class Spec:
    """A kind and its numbers; defaults are filled in."""

    kind: str
    values: Mapping[str, float]

    def __getitem__(self, key: str) -> float:
        return self.values[key]


MAX_NUMBER, MAX_CV = 1e9, 100.0
Known = Mapping[str, Mapping[str, float | None]]
"""kind -> key -> default; None: has to be given."""


def parse_spec(option: str, text: str, known: Known) -> Spec:
    """Read one option. Unknown kinds and keys, and what is not a number above 0, are refused by name."""
    kind, _, rest = text.partition(":")
    if kind not in known:
        raise SpecError(f"{option} {text!r} is of no known kind; take one of {', '.join(known)}")
    values = dict(known[kind])
    for part in filter(None, rest.split(",")):
        key, _, number = part.partition("=")
        if key not in values:
            raise SpecError(f"{option} {text!r} has no setting {key!r}; {kind} takes {', '.join(known[kind])}")
        values[key] = _positive(option, part, number)
    given = {key: value for key, value in values.items() if value is not None}
    if missing := sorted(set(values) - set(given)):
        raise SpecError(f"{option} {text!r} lacks {', '.join(missing)}; write {kind}:{missing[0]}=NUMBER")
    return Spec(kind, given)


def _positive(option: str, part: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise SpecError(f"{option} has {part!r}, which is not key=NUMBER") from None
    # Beyond them numbers stop being numbers: squares overflow, gaps of arrivals round to 0.
    most = MAX_CV if part.startswith("cv=") else MAX_NUMBER
    if not 1 / most <= value <= most:
        raise SpecError(f"{option} has {part!r}; the number must be above 0, from {1 / most:g} to {most:g}")
    return value
