"""One tokenizer, from either source: a HuggingFace directory or the metadata of a GGUF file."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from guidevane_runtime.errors import BrokenModel, StartError
from guidevane_runtime.gguf_file import GgufFile
from guidevane_runtime.model_source import read_json_object
from guidevane_runtime.server.text.gguf_vocab import backend_from_gguf, special_tokens_of_gguf


@dataclass(frozen=True)
class SpecialTokens:
    """Names that a chat template may use."""

    bos: str | None = None
    eos: str | None = None


class Tokenizer:
    """Text to ids and back. Ids equal those of the model's own tokenizer."""

    def __init__(self, backend: Backend, special: SpecialTokens, chat_template: str | None) -> None:
        self._backend = backend
        self.special = special
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content.encode() for i, token in added.items()}
        self.num_tokens = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        """No token stands for more characters of a text."""
        self._byte_level = "ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"])
        # The vocabulary is fixed, and a stream asks for the same few thousand tokens again and again.
        self.token_bytes = functools.lru_cache(maxsize=65536)(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. May be called in a thread."""
        # Not encode(): that one holds the GIL (0.3 s for 1.3 MB on two cores) and keeps offsets that nobody reads.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids as the model's own decoder writes it."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def visible_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in an answer: special tokens are empty."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that has none."""
        return self._backend.id_to_token(token_id) or ""

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        name = self.token_name(token_id)
        if self._byte_level:
            return _bytes_of_byte_level(name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model: `path` is a HuggingFace directory or a GGUF file."""
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    metadata: dict[str, Any] = GgufFile(path).metadata
    try:
        backend, (bos, eos) = backend_from_gguf(metadata), special_tokens_of_gguf(metadata)
    except StartError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for every fault of the vocabulary
        raise BrokenModel(f"the tokenizer in {path} is incomplete: {error!r}; convert the model again") from error
    return Tokenizer(backend, SpecialTokens(bos, eos), metadata.get("tokenizer.chat_template"))


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise StartError(f"{path} has no tokenizer.json; save the model's fast tokenizer there")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise StartError(f"can't read {file}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config_file = path / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.is_file() else {}
    special = SpecialTokens(_content(config.get("bos_token")), _content(config.get("eos_token")))
    return Tokenizer(backend, special, _template_of_directory(path, config))


def _template_of_directory(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _content(token: dict[str, Any] | str | None) -> str | None:
    """A token in tokenizer_config.json is a string or an object with `content`."""
    return str(token["content"]) if isinstance(token, dict) else token


def _bytes_of_byte_level(name: str) -> bytes:
    table = _byte_level_table()
    if all(char in table for char in name):
        return bytes(table[char] for char in name)
    return name.encode()


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
