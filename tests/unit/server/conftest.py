import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from guidevane_runtime.server.text.tokenizer import SpecialTokens, Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token per byte, ids in the order of GPT-2's alphabet, and the special token </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, SpecialTokens(eos="</s>"), None)
