"""Compilation for GPUs that are not here. Under the interpreter there is nothing to compile."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("this suite compiles; unset TRITON_INTERPRET")
