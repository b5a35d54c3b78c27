"""The GGUF container: metadata and where each tensor lies. Reads a header of 100,000 strings in a tenth of a second.

It knows bytes, not models: what keys mean and how blocks are dequantised is for its callers.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from guidevane_runtime.errors import BrokenModel, ModelNotFound, UnsupportedModel

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

Value = int | float | bool | str | list["Value"]
"""A metadata value as Python knows it."""

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type id of the file -> struct format."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch and numpy have it (the file has it the other way round)."""
    ggml_type: int
    """Type id of ggml: 0 is F32, 1 is F16, 2 is Q4_0, ..."""
    start: int
    """Byte in the file."""


class GgufFile:
    """An opened file: `metadata`, `tensors` by name, and raw bytes on demand. Opening it copies no tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _mapped(path)
        cursor = _Cursor(self._bytes)
        try:
            num_tensors, num_keys = _read_preamble(cursor, path)
            self.metadata: dict[str, Value] = dict(cursor.key_value() for _ in range(num_keys))
            infos = [cursor.tensor_info() for _ in range(num_tensors)]
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as error:
            raise _damaged(path, f"its header ends or breaks at byte {cursor.position}") from error
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int), "a number in every file that llama.cpp can read"
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(name, shape, ggml_type, data_start + offset) for name, shape, ggml_type, offset in infos
        }

    def raw(self, tensor: TensorInfo, num_bytes: int) -> memoryview:
        """The tensor's bytes, without a copy; valid as long as this object lives."""
        end = tensor.start + num_bytes
        if end > len(self._bytes):
            raise _damaged(self.path, f"tensor {tensor.name} ends at byte {end}, the file at {len(self._bytes)}")
        return memoryview(self._bytes)[tensor.start : end]


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, layout: str) -> int | float | bool:
        found: int | float | bool = struct.unpack_from(f"<{layout}", self._data, self.position)[0]
        self.position += struct.calcsize(f"<{layout}")
        return found

    def integer(self, layout: str) -> int:
        return int(self.scalar(layout))

    def string(self) -> str:
        size = self.integer("Q")
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise IndexError(self.position)
        return self._data[start : self.position].decode("utf-8")

    def value(self, type_id: int) -> Value:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self._array()
        return self.scalar(SCALARS[type_id])

    def key_value(self) -> tuple[str, Value]:
        key = self.string()
        return key, self.value(self.integer("I"))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset into the data part."""
        name = self.string()
        fastest_first = [self.integer("Q") for _ in range(self.integer("I"))]
        return name, tuple(reversed(fastest_first)), self.integer("I"), self.integer("Q")

    def _array(self) -> list[Value]:
        type_id, size = self.integer("I"), self.integer("Q")
        if size > len(self._data):
            raise IndexError(size)
        if type_id in SCALARS:
            layout = f"<{size}{SCALARS[type_id]}"
            start, self.position = self.position, self.position + struct.calcsize(layout)
            return list(struct.unpack_from(layout, self._data, start))
        read: Callable[[], Value] = self.string if type_id == STRING else lambda: self.value(type_id)
        return [read() for _ in range(size)]


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise UnsupportedModel(
                    f"{path} is not a GGUF file (it starts with {magic!r}); give a GGUF file or a HuggingFace directory"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelNotFound(f"{path} can't be read: {error}") from error


def _read_preamble(cursor: _Cursor, path: Path) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    cursor.position = len(MAGIC)
    version = cursor.integer("I")
    if version not in SUPPORTED_VERSIONS:
        raise UnsupportedModel(
            f"{path} has GGUF version {version}; versions {SUPPORTED_VERSIONS[0]} and {SUPPORTED_VERSIONS[1]}, "
            "little-endian, are read: convert the model again with a current llama.cpp"
        )
    return cursor.integer("Q"), cursor.integer("Q")


def _damaged(path: Path, what: str) -> BrokenModel:
    return BrokenModel(f"{path} is cut short or damaged: {what}; download or copy it again")
