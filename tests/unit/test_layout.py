"""The house rules that a file system can break: shadowed standard library, tests below sources, heavy imports."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ["bench", "crds", "e2e", "kernels", "manifests", "operator", "runtime", "tests"]


@pytest.mark.parametrize("folder", TOP_FOLDERS)
def test_top_level_folder_is_no_package(folder: str) -> None:
    assert not (REPO / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", ["bench", "crds", "kernels", "operator", "runtime"])
def test_no_test_lives_below_a_source_folder(folder: str) -> None:
    assert list((REPO / folder).rglob("test_*.py")) == []


def imported_modules(statement: str) -> set[str]:
    """Modules in sys.modules after `statement`, in a Python of its own that starts at the root."""
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_standard_operator_module_is_not_shadowed() -> None:
    assert "_operator" in imported_modules("import operator; operator.add(1, 2)")


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("guidevane_api", {"torch", "kopf", "aiohttp"}),
        ("guidevane_operator.handlers", {"torch", "triton", "guidevane_runtime", "guidevane_kernels"}),
        ("guidevane_runtime.core.scheduler", {"torch", "asyncio", "aiohttp"}),
        ("guidevane_runtime.__main__", {"torch", "triton"}),
        ("guidevane_kernels", {"triton", "pydantic"}),
    ],
)
def test_import_leaves_out_what_the_package_must_not_need(module: str, never: set[str]) -> None:
    assert imported_modules(f"import {module}") & never == set()
