"""docs/faults.md: every fault line that concerns the core has a test, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FAULTS = (TESTS.parent / "docs/faults.md").read_text()
ROW = re.compile(
    r"^\| (?P<id>[A-Z]\d+) \| (?P<seen_in>[^|]+) \| (?P<holds>[^|]+) \| (?P<shown_by>[^|]+) \|$", re.MULTILINE
)
NUMBERS = {
    "A": [1, 2, 3, 4, 7, 8, 9, 11, 12, 14, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 27],
    "B": [1, 2, 3, 4, 5, 7, 8, 10, 11, 13, 14, 15, 16, 17, 18, 19],
    "C": [1, 2, 3, 7, 8, 9, 10, 11, 12, 14, 15, 16],
    "D": [1, 2, 3, 4, 5, 6, 8, 9, 10, 11],
    "K": [2, 3, 5, 6, 7, 8, 9],
}
IDS = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers]
SHOWN_BY = {row["id"]: row["shown_by"].strip() for row in ROW.finditer(FAULTS)}


@cache
def names_of(path: str) -> set[str]:
    """Functions and assigned names of a test file, unread where it does not exist."""
    file = TESTS / path
    if not file.is_file():
        return set()
    nodes = ast.parse(file.read_text()).body
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return functions | {target.id for target in targets if isinstance(target, ast.Name)}


def test_every_fault_line_is_listed_once_and_in_order() -> None:
    assert [row["id"] for row in ROW.finditer(FAULTS)] == IDS


@pytest.mark.parametrize("fault", IDS)
def test_a_fault_line_names_tests_that_exist_or_says_why_it_has_none(fault: str) -> None:
    shown_by = SHOWN_BY[fault]
    tests = [test.split("::") for test in re.findall(r"`([^`]+)`", shown_by)]
    assert tests or re.fullmatch(r"not ours: .{10,}", shown_by)
    missing = [f"{path}::{name}" for path, name in tests if name not in names_of(path)]
    assert not missing
