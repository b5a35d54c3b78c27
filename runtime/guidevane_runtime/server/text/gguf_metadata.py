"""Reads the key-value part of a GGUF file (v2 and v3). It never touches the tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package builds one numpy array per token
string: seconds for a large vocabulary, where a probe waits for the tokenizer.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from guidevane_runtime.errors import StartError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 64 << 20
"""Bytes. Longer than any template or token: a larger length means a damaged file."""


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file, by key."""
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except (OSError, struct.error, UnicodeDecodeError, MemoryError) as error:
        raise StartError(f"can't read GGUF metadata of {path}: {error}; is the file complete?") from error


def _read(file: BinaryIO, path: Path) -> dict[str, Any]:
    magic, version = file.read(4), _scalar(file, 4)
    if magic != b"GGUF" or version not in (2, 3):
        raise StartError(f"{path} is not a GGUF v2 or v3 file; give a HuggingFace directory or a GGUF file")
    _num_tensors, num_pairs = _scalar(file, 10), _scalar(file, 10)
    return {_string(file): _value(file, _scalar(file, 4)) for _ in range(num_pairs)}


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        return _array(file)
    return _scalar(file, kind)


def _array(file: BinaryIO) -> list[Any]:
    kind, count = _scalar(file, 4), _scalar(file, 10)
    if kind in (_STRING, _ARRAY):
        return [_value(file, kind) for _ in range(count)]
    layout = f"<{count}{_layout(kind)[1]}"
    return list(struct.unpack(layout, file.read(struct.calcsize(layout))))


def _string(file: BinaryIO) -> str:
    size = _scalar(file, 10)
    if size > _MAX_STRING:
        raise struct.error(f"a string of {size} bytes")
    return file.read(size).decode("utf-8", "replace")


def _scalar(file: BinaryIO, kind: int) -> Any:
    layout = _layout(kind)
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise struct.error(f"unknown value type {kind}")
    return _SCALARS[kind]
