import pytest

from guidevane_runtime.server.text.tokenizer import SpecialTokens, Tokenizer
from tests.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token per byte, ids in the order of GPT-2's alphabet, and the special token </s>."""
    return Tokenizer(byte_tokenizer("</s>"), SpecialTokens(eos="</s>"), None)
