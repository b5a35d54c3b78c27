"""A small JSON file that somebody else writes while the runtime runs, such as a mounted ConfigMap or Secret."""

import logging
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from guidevane_runtime.errors import StartError
from guidevane_runtime.settings import sentence_of

logger = logging.getLogger(__name__)

Content = TypeVar("Content", bound=BaseModel)


class WatchedFile(Generic[Content]):
    """Read in full at each look: a folder that the kubelet swaps has no other sign of a change than its content."""

    def __init__(self, path: Path, flag: str, model: type[Content]) -> None:
        """flag: what the file was given with, for messages."""
        self._path, self._flag, self._model = path, flag, model
        self._seen: bytes | None = None
        self._complaint: tuple[bytes | None, str] | None = None

    @property
    def is_good(self) -> bool:
        """Whether it could be obeyed as it was at the last look."""
        return self._complaint is None

    def read(self) -> Content:
        """What it says at the start. Raises StartError for one that can't be read, or says something else."""
        try:
            self._seen = self._path.read_bytes()
            return self._model.model_validate_json(self._seen, strict=True)
        except (OSError, ValidationError) as error:
            raise StartError(f"can't read {self._flag} {self._path}: {sentence_of(error)}") from error

    def changed(self) -> Content | None:
        """What it says now, None if that is nothing new.

        A bad file is nothing new, and is logged once per content: what was read before stays in force.
        """
        seen, self._seen = self._seen, None
        try:
            self._seen = self._path.read_bytes()
            if self._seen == seen:
                return None
            content = self._model.model_validate_json(self._seen, strict=True)
        except (OSError, ValidationError) as error:
            self._complain(sentence_of(error))
            return None
        self._complaint = None
        return content

    def _complain(self, fault: str) -> None:
        if self._complaint != (self._seen, fault):
            logger.warning("file ignored", extra={"flag": self._flag, "path": str(self._path), "reason": fault})
        self._complaint = self._seen, fault
