"""Where the model lies: `--model` to a path that tokenizer and engine both read."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from guidevane_runtime.errors import ModelNotFound, UnsupportedModel


def local_model_path(model: str) -> Path:
    """A HuggingFace directory or a GGUF file. A folder that holds exactly one *.gguf means that file."""
    path = _path_of(model)
    if not path.exists():
        raise ModelNotFound(f"model path {path} does not exist; check --model (spec.model.uri)")
    if path.is_dir() and not (path / "config.json").is_file():
        return _only_gguf(path)
    return path


def _path_of(model: str) -> Path:
    if "://" not in model:
        return Path(model).expanduser()
    uri = urlsplit(model)
    if uri.scheme != "file":
        raise UnsupportedModel(f"--model {model} has the scheme {uri.scheme}://; this runtime reads paths and file://")
    return Path(unquote(uri.path))


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ModelNotFound(
            f"{folder} holds no config.json and {len(found)} *.gguf files; "
            "give a HuggingFace directory or one GGUF file"
        )
    return found[0]
