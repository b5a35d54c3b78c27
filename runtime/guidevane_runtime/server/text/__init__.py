"""Text in and out of token ids: tokenizers from either source, chat templates, detokenising, stop strings."""
