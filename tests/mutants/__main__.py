"""Mutation check of the scheduler core: `make mutants`. docs/mutants.md says what it found.

mutmut changes one thing in one function at a time and runs the tests that reach it; a change that no test notices is a
survivor. It expects packages side by side at the root, so what it works on is copied to .mutants first.
"""

import argparse
import ast
import difflib
import json
import os
import resource
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
STAGE = REPO / ".mutants"
SURVIVORS = STAGE / "survivors.md"
REASONS = REPO / "docs/mutants.md"
CORE = Path("guidevane_runtime/core")
METAS = STAGE / "mutants" / CORE
HEADLINE = {
    *("block_pool.py", "prefix_cache.py"),
    *("scheduler.py", "budget.py", "running.py", "preemption.py", "outputs.py"),
    *("entrance.py", "admission.py", "rules.py", "constraints.py", "door.py", "leases.py"),
}
"""Pool, scheduler and admission: the files that `LEAST_KILLED` is about."""
LEAST_KILLED = 0.9
VERDICTS = {0: "survived", 1: "killed", 3: "killed", 33: "survived", 36: "timeout", -24: "timeout"}
"""By mutmut's exit code. 33: no test reaches it. Any other code is a fault of the run, and stops the report."""
COLUMNS = ("killed", "timeout", "survived")
DESCRIPTORS = {"property", "cached_property"}


def main(patterns: list[str]) -> int:
    stage()
    if sys.platform == "linux":  # a mutant that never ends may take memory all the while
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, hard_limit))
    subprocess.run(
        [sys.executable, "-m", "mutmut", "run", "--max-children", os.environ.get("MUTANTS_WORKERS", "2"), *patterns],
        cwd=STAGE,
        # The packages that are not mutated come from where they are.
        env={**os.environ, "HYPOTHESIS_EXAMPLES": "20", "PYTHONPATH": str(REPO / "crds")},
        check=True,
    )
    return report(is_whole=not patterns)


# ---------------------------------------------------------------------------------------------------------- before


def stage() -> None:
    """Lay out what mutmut works on, afresh: it keeps a verdict when only tests have changed."""
    shutil.rmtree(STAGE, ignore_errors=True)
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["mutmut"]
    for path in ("pyproject.toml", "tests/conftest.py", *settings["pytest_add_cli_args_test_selection"]):
        copy(REPO / path, STAGE / path)
    copy(REPO / "runtime/guidevane_runtime/__init__.py", STAGE / "guidevane_runtime/__init__.py")
    for source in sorted((REPO / "runtime" / CORE).glob("*.py")):
        target = STAGE / CORE / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(with_plain_methods(source.read_text()))


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def with_plain_methods(source: str) -> str:
    """Say `name = property(name)` after a method for `@property` before it: mutmut leaves decorated functions alone."""
    lines = source.splitlines()
    decorated = [
        (node, decorator)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in DESCRIPTORS
    ]
    for node, decorator in sorted(decorated, key=lambda pair: -pair[1].lineno):
        indent = " " * node.col_offset
        lines.insert(node.end_lineno or node.lineno, f"{indent}{node.name} = {ast.unparse(decorator)}({node.name})")
        del lines[decorator.lineno - 1]
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------------- after


def report(*, is_whole: bool) -> int:
    """Print the figures, and how docs/mutants.md differs. 0: enough are killed, and each survivor has its reason."""
    verdicts = {meta.name.removesuffix(".meta"): read_verdicts(meta) for meta in METAS.glob("*.meta")}
    share = print_table({file: Counter(verdict.values()) for file, verdict in verdicts.items() if verdict})
    survivors = sorted({found for file, verdict in verdicts.items() for found in survivors_of(file, verdict)})
    SURVIVORS.write_text("".join(f"- `{line}`\n" for line in survivors))
    listed = {line.split("`")[1] for line in REASONS.read_text().splitlines() if line.startswith("- `")}
    unexplained = [line for line in survivors if line not in listed]
    print_lines(f"\n{len(survivors)} survivors, all in {SURVIVORS}. Without a reason in docs/mutants.md:", unexplained)
    if is_whole:
        print_lines("In docs/mutants.md, but not among the survivors:", sorted(listed - set(survivors)))
    return int(bool(unexplained) or share < LEAST_KILLED)


def read_verdicts(meta: Path) -> dict[str, str]:
    """killed, survived or timeout by the name of the mutant; those that were not asked for are missing."""
    exit_codes = json.loads(meta.read_text())["exit_code_by_key"]
    return {name: VERDICTS[code] for name, code in exit_codes.items() if code is not None}


def survivors_of(file: str, verdicts: dict[str, str]) -> Iterator[str]:
    """Each named by what it changes: mutmut's numbers shift with every edit of the function."""
    survived = [name.rpartition(".")[2] for name, verdict in verdicts.items() if verdict == "survived"]
    if not survived:
        return
    source = (METAS / file).read_text()
    lines = source.splitlines()
    texts = {
        node.name: [line.replace(node.name, "") for line in lines[node.lineno - 1 : node.end_lineno]]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    for name in survived:
        function, _, _ = name.partition("__mutmut_")
        words = function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        yield f"{file} {words}: {change(texts[f'{function}__mutmut_orig'], texts[name])}"


def change(before: list[str], after: list[str]) -> str:
    """The lines that differ, as they were and as they are."""
    diff = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
    gone, come = (" ".join(line[2:].strip() for line in diff if line[0] == sign) for sign in "-+")
    return f"{gone} -> {come}"


def print_table(counts: dict[str, Counter[str]]) -> float:
    """Returns the share of the headline's mutants that did not survive, 0..1."""
    headline = sum((count for file, count in counts.items() if file in HEADLINE), Counter[str]())
    everything = sum(counts.values(), Counter[str]())
    print(f"| file | mutants | {' | '.join(COLUMNS)} | not survived |\n|---|---|---|---|---|---|")
    for name, count in (*sorted(counts.items()), ("pool, scheduler, admission", headline), ("all", everything)):
        cells = [name, count.total(), *(count[verdict] for verdict in COLUMNS), f"{share_killed(count):.1%}"]
        print(f"| {' | '.join(map(str, cells))} |")
    return share_killed(headline)


def print_lines(heading: str, lines: list[str]) -> None:
    print(heading, *(lines or ["none"]), sep="\n")


def share_killed(count: Counter[str]) -> float:
    return 1 - count["survived"] / max(1, count.total())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of mutants, as in '*.core.line.*'; default: all")
    sys.exit(main(parser.parse_args().patterns))
