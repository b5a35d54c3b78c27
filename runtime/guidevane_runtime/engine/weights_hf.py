"""HuggingFace directories: config.json, generation_config.json, and safetensors in one file or in shards."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from guidevane_runtime.engine.model_config import ModelConfig
from guidevane_runtime.errors import BrokenModel, ModelNotFound, UnsupportedModel
from guidevane_runtime.model_source import read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HuggingFaceSource:
    """A directory as `save_pretrained` writes it. Tensors are memory-mapped until read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        generation = path / "generation_config.json"
        self.config = ModelConfig.from_hf(
            read_json_object(path / "config.json"),
            read_json_object(generation) if generation.exists() else {},
            str(path / "config.json"),
        )
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(path):
            self._open(file)
        self._check_index()

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype."""
        try:
            return self._file_of[name].get_tensor(name)
        except SafetensorError as error:
            raise BrokenModel(f"{self.path}: tensor {name} can't be read: {error}") from error

    def _open(self, file: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            names = list(opened.keys())
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{file} is not a whole safetensors file ({error}); download or copy it again") from error
        self._file_of.update(dict.fromkeys(names, opened))
        self.shapes.update(shapes)

    def _check_index(self) -> None:
        index = self.path / INDEX
        if not index.exists():
            return
        for name, shard in read_json_object(index)["weight_map"].items():
            if name not in self.shapes:
                raise BrokenModel(f"{index}: tensor {name} should be in {shard}, it is not there")


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BrokenModel(f"{index}: weight_map is missing")
        files = [path / name for name in sorted(set(weight_map.values()))]
    elif (path / SINGLE).exists():
        files = [path / SINGLE]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise _no_weights(path)
    for file in files:
        if not file.exists():
            raise BrokenModel(f"{file} is missing; {index.name} lists it")
    return files


def _no_weights(path: Path) -> ModelNotFound | UnsupportedModel:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in path.glob(pattern))
    if pickles:
        return UnsupportedModel(
            f"{path} holds {pickles[0]} but no *.safetensors; pickled weights are not read: "
            "convert them with transformers' save_pretrained"
        )
    return ModelNotFound(f"{path} holds config.json but no *.safetensors file")
