"""`python -m e2e`: brings up the cluster, installs guidevane, runs the user stories inside it, takes it all down."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from e2e.cluster.errors import ClusterError
from e2e.cluster.host import require_linux_root
from e2e.support import REPO

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]

OUTSIDE = ["e2e/test_cluster.py", "e2e/test_images.py"]
"""They make nodes of their own, so they run beside the cluster; all other stories run inside it."""


def reason_not_to_run(cluster: str) -> str | None:
    """Why the stories can't run here, or None."""
    if cluster != "node":
        return None
    try:
        require_linux_root()
    except ClusterError as error:
        return str(error)
    return None


def all_tests() -> list[str]:
    return sorted(str(path.relative_to(REPO)) for path in REPO.glob("e2e/test_*.py"))


def run(*args: str, env: dict[str, str] | None = None) -> int:
    return subprocess.run(args, cwd=REPO, env={**os.environ, **(env or {})}, check=False).returncode


def cluster(*args: str) -> int:
    return run(sys.executable, "-m", "e2e.cluster", *args)


def skipped(reason: str, tests: Sequence[str]) -> int:
    banner = "!" * 100
    print(f"{banner}\n!! e2e SKIPPED, NOT PASSED: {reason}\n{banner}", flush=True)
    return run(*PYTEST, *tests, env={"GUIDEVANE_E2E_SKIP": reason})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e", description=__doc__)
    parser.add_argument(
        "--keep", action="store_true", default=bool(os.environ.get("KEEP")), help="leave the cluster up"
    )
    parser.add_argument("tests", nargs="*", default=all_tests(), help="files or test ids; default: all of e2e")
    options = parser.parse_args()
    outside = [test for test in options.tests if test.startswith(tuple(OUTSIDE))]
    inside = [test for test in options.tests if test not in outside]
    kind, start = os.environ.get("CLUSTER", "node"), time.monotonic()
    if reason := reason_not_to_run(kind):
        return skipped(reason, options.tests)
    try:
        failed = cluster("up") or cluster("images") or cluster("exec", "--", sys.executable, "-m", "e2e.install")
        if not failed:
            failed = cluster("exec", "--", *PYTEST, *inside) if inside else 0
        if not failed and outside:
            failed = run(*PYTEST, *outside)
    finally:
        if not options.keep:
            cluster("down")
    print(f"e2e: {'failed' if failed else 'passed'} in {time.monotonic() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
