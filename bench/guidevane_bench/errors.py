"""What a person who runs guidevane-bench gets to read.

BenchError          exit status 2
├── SpecError       an option that is misspelt or out of range
├── InputError      a file that can't be read as what it should be
└── FitError        steps that say too little to fit a cost model
"""


class BenchError(Exception):
    """Root of the tree. The message has the value, the limit and the way out."""


class SpecError(BenchError):
    """An option that is misspelt or out of range."""


class InputError(BenchError):
    """A file that can't be read as what it should be."""


class FitError(BenchError):
    """Steps that say too little to fit a cost model."""
