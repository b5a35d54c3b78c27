"""Builds a `tokenizers` backend from GGUF metadata.

`tokenizer.ggml.pre` names how text is cut before the merges. It must be obeyed: with GPT-2's rule in place of
`smollm`'s, "2024" gets ids that the model was never trained on. A name we don't know stops the start.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from guidevane_runtime.errors import StartError

_LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Kind(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "default"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _single_digits),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), lambda: _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _split(_QWEN2)),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe"}
"""These take a word that is in the vocabulary as it is, before any merge."""


def backend_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes, with its special tokens and its BOS/EOS rule."""
    kind = metadata.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}.get(str(kind))
    if build is None:
        raise StartError(f"tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    backend = build(metadata)
    _add_special_tokens(backend, metadata)
    _add_bos_eos_rule(backend, metadata)
    return backend


def special_tokens_of_gguf(metadata: dict[str, Any]) -> tuple[str | None, str | None]:
    """BOS and EOS as the vocabulary spells them."""
    bos, eos = (_token_named(metadata, name) for name in ("bos", "eos"))
    return bos and bos[0], eos and eos[0]


def _byte_level_bpe(metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise StartError(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(_PRE_TOKENIZERS))}")
    merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab=_vocab(metadata), merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre.endswith(("qwen2", "-qwen")):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(metadata: dict[str, Any]) -> Tokenizer:
    vocab = _vocab(metadata)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_by_score(metadata)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*joined, *strip])
    return backend


def _vocab(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merge(line: str) -> tuple[str, str]:
    # The first half may itself begin with a space, so the separator is the first space after it.
    cut = line.index(" ", 1)
    return line[:cut], line[cut + 1 :]


def _merges_by_score(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: a pair may merge if the result is a token, the best score first."""
    vocab, scores = _vocab(metadata), metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    normal = {token for token, i in vocab.items() if kinds[i] in (_Kind.NORMAL, _Kind.USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token in normal:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-scores[vocab[token]], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special_tokens(backend: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    by_kind: dict[int, list[str]] = {}
    for token, kind in zip(tokens, kinds, strict=False):
        by_kind.setdefault(kind, []).append(token)
    special = [*by_kind.get(_Kind.CONTROL, []), *by_kind.get(_Kind.UNKNOWN, [])]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = by_kind.get(_Kind.USER_DEFINED, [])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_bos_eos_rule(backend: Tokenizer, metadata: dict[str, Any]) -> None:
    # llama.cpp's defaults where the file is silent: SentencePiece models begin with BOS, byte-level ones do not.
    by_default = metadata["tokenizer.ggml.model"] == "llama"
    bos = _token_named(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", by_default) else None
    eos = _token_named(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    added = [token for token in (bos, eos) if token]
    if added:
        head, tail = ([token[0]] if token else [] for token in (bos, eos))
        backend.post_processor = processors.TemplateProcessing(
            single=[*head, "$A", *tail], special_tokens=[tuple(token) for token in added]
        )


def _token_named(metadata: dict[str, Any], name: str) -> tuple[str, int] | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token_id is None else (metadata["tokenizer.ggml.tokens"][token_id], token_id)
