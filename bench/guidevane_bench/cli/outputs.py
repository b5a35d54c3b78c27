"""Files that a run writes: looked at before it begins, so that no hour of simulation ends in a typing error."""

import os
from importlib.util import find_spec
from pathlib import Path

from guidevane_bench.errors import InputError, SpecError


def ensure_file(option: str, path: Path | None) -> None:
    """Raises InputError for a file that can't be written."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; give the path of a file")
    _ensure_writable(option, path, path if path.exists() else path.parent)


def ensure_folder(option: str, path: Path) -> None:
    """Raises InputError for a folder that is none, or that can't be made."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise InputError(f"{option} {path}: {there} is a file; give the path of a folder")
    _ensure_writable(option, path, there)


def ensure_matplotlib(option: str) -> None:
    if find_spec("matplotlib") is None:
        raise SpecError(f"{option} needs matplotlib; install guidevane[bench], or leave it out")


def write(option: str, path: Path, content: bytes) -> None:
    """What was fine before the run may be full or gone after it."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"{option} {path} can't be written: {error.strerror}; give another path") from error


def _ensure_writable(option: str, path: Path, there: Path) -> None:
    if not there.exists():
        raise InputError(f"{option} {path}: there is no folder {there}; make it, or give another path")
    if not os.access(there, os.W_OK):
        raise InputError(f"{option} {path} can't be written: no permission for {there}; give another path")
