"""What a person who runs guidevane-bench gets to read.

BenchError          exit status 2
├── SpecError       an option that is misspelt or out of range
├── InputError      a file that can't be read as what it should be, or can't be written
└── FitError        steps that say too little to fit a cost model
"""

from pydantic import ValidationError


class BenchError(Exception):
    """Root of the tree. The message has the value, the limit and the way out."""


class SpecError(BenchError):
    """An option that is misspelt or out of range."""


class InputError(BenchError):
    """A file that can't be read as what it should be, or can't be written."""


class FitError(BenchError):
    """Steps that say too little to fit a cost model."""


def sentence_of(error: Exception) -> str:
    """In one line, whatever raised it."""
    if isinstance(error, ValidationError):
        found = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False)]
        return "; ".join(f"{field}: {message}" if field else message for field, message in found)
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return " ".join(str(error).split())
