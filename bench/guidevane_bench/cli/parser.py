"""Command lines: types that check a value, and a parser whose every complaint is one sentence with a way out."""

import argparse
from collections.abc import Callable
from math import inf
from typing import Any, NoReturn, TypeVar

from guidevane_bench.errors import SpecError

Number = TypeVar("Number", int, float)

MAX_BLOCKS = 1 << 24
"""Of a pod: 268 million tokens. A block takes about 60 bytes here."""
MAX_PODS = 100_000
"""A pod takes about 10 kB and its blocks."""


class Parser(argparse.ArgumentParser):
    """Raises SpecError where argparse would print its usage and exit. An option is written out in full."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise SpecError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _checked(kind: Callable[[str], Number], what: str, holds: Callable[[Number], bool]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


count = _checked(int, "a whole number, 1 or more", lambda number: number >= 1)
num_blocks = _checked(int, f"a whole number from 1 to {MAX_BLOCKS}", lambda number: 1 <= number <= MAX_BLOCKS)
num_pods = _checked(int, f"a whole number from 1 to {MAX_PODS}", lambda number: 1 <= number <= MAX_PODS)
positive = _checked(float, "a finite number above 0", lambda number: 0 < number < inf)
share = _checked(float, "a share from 0 to 1", lambda number: 0 <= number <= 1)
# Below it virtual time would hardly move.
interval_s = _checked(float, "a number of seconds, 0.01 or more", lambda number: 0.01 <= number < inf)
