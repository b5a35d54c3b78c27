"""What the documents name is there: pages and headings, files, programs and their flags, metrics, words of the API."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from pydantic import BaseModel

from guidevane_api.admin import LimitsPatch
from guidevane_api.llmservice import LLMServiceSpec, not_in_effect
from guidevane_api.pod_files import TenantsFile
from guidevane_runtime.core.door import Rejection
from guidevane_runtime.core.messages import Hold

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

OTHERS_PROGRAMS = {"pytest"}
SLOW_PROGRAMS = {"guidevane_kernels.bench_cpu", "guidevane_kernels.offline"}
"""They import torch and triton, which takes longer than all others together."""
OTHERS_FLAGS = {"--hypothesis-profile", "--hypothesis-seed", "--kube-api-qps", "--no-deps", "--server-side", "--strict"}
"""Of pytest, kubectl, uv and mypy."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


# ------------------------------------------------------------------------------------------------ pages and files


def linked_files(page: Path) -> dict[str, Path]:
    """Target of each link inside the repository -> the file that it leads to."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    inside = [target for target in targets if not target.startswith("https://")]
    return {
        target: (page.parent / target.partition("#")[0]).resolve() if target[0] != "#" else page for target in inside
    }


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links to them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    for target, file in linked_files(page).items():
        assert file.exists(), target
        anchor = target.partition("#")[2]
        assert not anchor or anchor in anchors(file), target


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    while True:
        found = {file for page in reached if page.suffix == ".md" for file in linked_files(page).values()}
        found |= {page for folder in found if folder.is_dir() for page in folder.glob("*.md")}
        if found <= reached:
            break
        reached |= found
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


@each_page
def test_a_file_that_is_named_with_its_folder_is_there(page: Path) -> None:
    named = re.findall(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|ya?ml|json|csv|toml))\b", page.read_text())
    named = [path for path in named if not path.startswith(".mutants/")]  # written by make mutants
    homes = [page.parent, ROOT, ROOT / "tests", ROOT / "runtime", ROOT / "runtime/guidevane_runtime"]
    assert [path for path in named if not any((home / path).exists() for home in homes)] == []


# ---------------------------------------------------------------------------------------------- programs and flags


def programs() -> list[str]:
    """Modules that a page or the Makefile runs, and the subcommands of guidevane-bench."""
    text = "\n".join(file.read_text() for file in [*PAGES, ROOT / "Makefile"])
    modules = set(re.findall(r"(?:python -m|\$\(RUN\)) ([a-z][\w.]*)", text)) - OTHERS_PROGRAMS - SLOW_PROGRAMS
    commands = set(re.findall(r"guidevane-bench ([a-z]+)", text))
    return sorted(modules) + sorted(f"guidevane_bench {command}" for command in commands)


@cache
def help_of(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *program.split(), "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("program", programs())
def test_a_program_that_is_named_says_how_it_is_used(program: str) -> None:
    done = help_of(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lower().startswith("usage: ")


def test_every_flag_is_one_of_a_program_that_is_named() -> None:
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "".join(help_of(program).stdout for program in programs())))
    for page in PAGES:
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9](?![\w*-]|-\*)", page.read_text()))
        assert flags - known - OTHERS_FLAGS == set(), page


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"(?:`|^)(?:\w+=\S+ )?make ([\w-]+)", page.read_text(), re.M)
    }
    assert "test" in named
    assert named - targets == set()


# ---------------------------------------------------------------------------------------------- metrics and words


def families() -> set[str]:
    return {line.split()[0] for line in (ROOT / "tests/data/server/metric_names.txt").read_text().splitlines()}


def test_every_metric_that_is_named_is_exported() -> None:
    packages = {folder.name for folder in ROOT.glob("*/guidevane_*")}
    for page in PAGES:
        named = set(re.findall(r"\b(?:guidevane_|vllm:)\w*[a-z](?![\w*])", page.read_text()))
        assert named - families() - packages == set(), page


def test_every_metric_that_is_exported_is_explained() -> None:
    explained = (DOCS / "api.md").read_text()
    assert [family for family in sorted(families()) if f"`{family}" not in explained] == []


def test_every_reason_of_a_refusal_is_explained() -> None:
    explained = (DOCS / "admission.md").read_text()
    assert [reason for reason in Rejection if f"| `{reason}` |" not in explained] == []


def test_everything_that_holds_a_request_back_is_explained() -> None:
    explained = (DOCS / "guard.md").read_text()
    assert [hold for hold in Hold if f"`{hold}`" not in explained] == []


# ------------------------------------------------------------------------------------------------------- samples


class Sample(NamedTuple):
    """A fenced block, and who reads such a thing."""

    page: str
    content: object
    reader: type[BaseModel]


def samples() -> list[Sample]:
    """Blocks of YAML and JSON that somebody would copy. Answers are left out: nothing of ours reads them."""
    blocks = [(page.name, *block.groups()) for page in PAGES for block in FENCE.finditer(page.read_text())]
    contents = [(page, yaml.safe_load(text)) for page, language, text in blocks if language in ("yaml", "json")]
    found = [Sample(page, content["spec"], LLMServiceSpec) for page, content in contents if "spec" in content]
    return found + [Sample(page, content, TenantsFile) for page, content in contents if "tenants" in content]


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.page)
def test_a_sample_is_taken_by_its_reader(sample: Sample) -> None:
    sample.reader.model_validate(sample.content)
    if sample.reader is LLMServiceSpec:
        assert not_in_effect(sample.content) == []


def test_the_patch_that_is_shown_is_one_that_a_pod_takes() -> None:
    (body,) = re.findall(r"`PATCH /admin/limits` with `(.*?)`", (DOCS / "api.md").read_text())
    assert LimitsPatch.model_validate_json(body).limits.given() == {"max_num_seqs": 8}
