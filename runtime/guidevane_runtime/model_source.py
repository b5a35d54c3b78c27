"""Where the model lies: `--model` to a path that tokenizer and engine both read. Knows no tensor."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from guidevane_runtime.errors import BrokenModel, ModelNotFound, UnsupportedModel


def local_model_path(model: str) -> Path:
    """A HuggingFace directory or a GGUF file. A folder that holds exactly one *.gguf means that file."""
    path = _path_of(model)
    if not path.exists():
        raise ModelNotFound(f"model path {path} does not exist; check --model (spec.model.uri)")
    if path.is_dir() and not (path / "config.json").is_file():
        return _only_gguf(path)
    return path


def read_json_object(file: Path) -> dict[str, Any]:
    """One of the JSON files of a HuggingFace directory."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BrokenModel(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise BrokenModel(f"{file} holds a {type(found).__name__}, a JSON object is needed")
    return found


def _path_of(model: str) -> Path:
    if "://" not in model:
        return Path(model).expanduser()
    uri = urlsplit(model)
    if uri.scheme != "file":
        raise UnsupportedModel(f"--model {model} has the scheme {uri.scheme}://; this runtime reads paths and file://")
    return Path(unquote(uri.path))


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ModelNotFound(f"{folder} holds no model: neither config.json nor a *.gguf file is in it")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UnsupportedModel(f"{folder} holds {len(found)} GGUF files ({names}); name one of them as the model path")
    return found[0]
