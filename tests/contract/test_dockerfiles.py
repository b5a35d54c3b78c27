"""The Dockerfiles: linted, read, and built by buildah, where it is at hand, as far as that needs no network.

No network means: on a stand-in for the base image, and without the RUN lines, which install from package indexes.
What stays is every COPY, the stages, the user and the entry point.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCKERFILES = {"operator": "guidevane_operator", "runtime": "guidevane_runtime"}
BASE = "python:3.11-slim"


def run(*command: str, cwd: Path = REPO, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_dockerfile_is_clean_to_hadolint(folder: str) -> None:
    assert run(str(Path(sys.executable).parent / "hadolint"), f"{folder}/Dockerfile") == ""


def instructions(folder: str) -> list[tuple[str, str]]:
    """Words and their arguments, one instruction each, without comments."""
    text = re.sub(r"^#.*\n", "", (REPO / folder / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word]


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_an_image_holds_the_packages_of_ours_that_its_own_import_and_no_other(folder: str) -> None:
    found = instructions(folder)
    copied = [path for word, rest in found if word == "COPY" and "--from" not in rest for path in rest.split()[:-1]]
    in_context = (REPO / ".dockerignore").read_text().splitlines()
    assert copied and all(f"!{path}" in in_context and (REPO / path).exists() for path in copied)
    packages = [Path(path) for path in copied if (REPO / path).is_dir()]
    text = "\n".join(file.read_text() for package in packages for file in (REPO / package).rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (guidevane_\w+)", text, re.MULTILINE))
    assert {package.name for package in packages} == imported
    # Each lies where PYTHONPATH has it, under its own name.
    placed = {rest.split()[0]: rest.split()[-1] for word, rest in found if word == "COPY" and "--from" not in rest}
    assert all(placed[str(package)] == f"/opt/guidevane/app/{package.name}" for package in packages)
    assert any(word == "ENV" and "PYTHONPATH=/opt/guidevane/app:" in rest for word, rest in found)
    assert dict(found)["USER"] == "10001:10001"
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["python3", "-m", DOCKERFILES[folder]]
    assert (REPO / folder / DOCKERFILES[folder] / "__main__.py").exists()


def without_run(dockerfile: str) -> str:
    """The Dockerfile without its RUN lines, continuation lines included."""
    return re.sub(r"^RUN (?:.*\\\n)*.*\n", "", dockerfile, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def buildah_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """buildah's storage in a folder of its own, with a stand-in for the base image in it."""
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("buildah is not installed, or this is not root")
    folder = tmp_path_factory.mktemp("buildah")
    storage = folder / "storage.conf"
    storage.write_text(f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n')
    env = {**os.environ, "CONTAINERS_STORAGE_CONF": str(storage), "BUILDAH_ISOLATION": "chroot"}
    (folder / "opt/guidevane/deps").mkdir(parents=True)
    stand_in = run("buildah", "from", "scratch", env=env).strip()
    run("buildah", "copy", stand_in, str(folder / "opt"), "/opt", env=env)
    run("buildah", "commit", "--rm", stand_in, f"docker.io/library/{BASE}", env=env)
    return env


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_dockerfile_builds_as_far_as_no_network_is_needed(
    folder: str, buildah_env: dict[str, str], tmp_path: Path
) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(without_run((REPO / folder / "Dockerfile").read_text()))

    run("buildah", "build", "--pull-never", "-f", str(dockerfile), "-t", folder, ".", env=buildah_env)

    config = json.loads(run("buildah", "inspect", "--type", "image", folder, env=buildah_env))["OCIv1"]["config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["python3", "-m", DOCKERFILES[folder]]
    container = run("buildah", "from", "--pull-never", folder, env=buildah_env).strip()
    root = Path(run("buildah", "mount", container, env=buildah_env).strip())
    packages = {path.name for path in (root / "opt/guidevane/app").iterdir()}
    run("buildah", "rm", container, env=buildah_env)
    assert DOCKERFILES[folder] in packages
    assert "guidevane_api" in packages
    assert ("guidevane_kernels" in packages) == (folder == "runtime")
