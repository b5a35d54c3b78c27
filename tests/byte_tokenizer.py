"""A tokenizer that tests can read: one token per byte, ids in the order of GPT-2's alphabet, then special tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer(*special_tokens: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return made
