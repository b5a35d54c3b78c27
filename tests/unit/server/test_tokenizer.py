import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from guidevane_runtime.errors import BrokenModel, StartError
from guidevane_runtime.server.text.gguf_vocab import backend_from_gguf
from guidevane_runtime.server.text.tokenizer import SpecialTokens, Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def byte_level_metadata(pre: str, merges: list[str], **more: Any) -> dict[str, Any]:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), "<bos>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 1) + [CONTROL],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        **more,
    }


def sentencepiece_metadata(pieces: dict[str, float]) -> dict[str, Any]:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (3 + 256) + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def names(metadata: dict[str, Any], text: str) -> list[str]:
    backend = backend_from_gguf(metadata)
    return [metadata["tokenizer.ggml.tokens"][i] for i in backend.encode(text).ids]


def test_smollm_splits_digits_before_any_merge() -> None:
    assert names(byte_level_metadata("smollm", ["2 0", "20 2"]), "2024") == ["2", "0", "2", "4"]


def test_gpt2_merges_digits() -> None:
    assert names(byte_level_metadata("gpt-2", ["2 0", "20 2"]), "2024") == ["202", "4"]


def test_llama3_takes_three_digits_at_a_time_and_whole_words_first() -> None:
    metadata = byte_level_metadata("llama-bpe", ["1 2", "12 3", "4 5"])
    assert names(metadata, "12345") == ["123", "45"]


def test_an_unknown_pre_tokenizer_stops_the_start() -> None:
    with pytest.raises(StartError, match=r"tokenizer\.ggml\.pre is 'martian'"):
        backend_from_gguf(byte_level_metadata("martian", []))


def test_an_unknown_tokenizer_model_stops_the_start() -> None:
    with pytest.raises(StartError, match=r"tokenizer\.ggml\.model is 't5'"):
        backend_from_gguf({"tokenizer.ggml.model": "t5"})


def test_bos_is_added_only_where_the_file_says_so() -> None:
    assert names(byte_level_metadata("gpt-2", []), "a") == ["a"]
    assert names(byte_level_metadata("gpt-2", [], **{"tokenizer.ggml.add_bos_token": True}), "a") == ["<bos>", "a"]


def test_a_control_token_in_a_text_is_one_token() -> None:
    assert names(byte_level_metadata("gpt-2", []), "a<bos>") == ["a", "<bos>"]


PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "ab": -4.0, "▁a": -5.0, "▁ab": -6.0, "ba": -3.5, "aba": -7.0}


def sentencepiece_reference(text: str) -> list[str]:
    """SentencePiece BPE by its definition: merge the best-scored neighbours, leftmost first, until none is a token."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-PIECES[left + right], i) for i, (left, right) in enumerate(pairwise(symbols)) if left + right in PIECES
        ]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(st.text("ab ", min_size=1, max_size=20))
def test_sentencepiece_merges_the_best_score_first(text: str) -> None:
    assert names(sentencepiece_metadata(PIECES), text) == ["<s>", *sentencepiece_reference(text)]


def test_sentencepiece_falls_back_to_bytes() -> None:
    assert names(sentencepiece_metadata(PIECES), "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]


@given(st.text("abé🙂 ", max_size=20))
def test_token_bytes_join_to_the_text_for_sentencepiece(text: str) -> None:
    tokenizer = Tokenizer(backend_from_gguf(sentencepiece_metadata(PIECES)), SpecialTokens(), None)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == (" " + text if text else "")


@given(st.text(max_size=30))
def test_token_bytes_join_to_the_text_for_byte_level(text: str) -> None:
    tokenizer = Tokenizer(backend_from_gguf(byte_level_metadata("smollm", ["a b"])), SpecialTokens(), None)
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text == tokenizer.decode(ids)


def test_a_huggingface_directory_gives_the_same_ids(tmp_path: Path) -> None:
    backend = backend_from_gguf(byte_level_metadata("smollm", ["a b"]))
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "</s>", "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("abab 2024<bos>") == backend.encode("abab 2024<bos>").ids
    assert (loaded.special, loaded.chat_template) == (SpecialTokens("<bos>", "</s>"), "x")


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    backend_from_gguf(byte_level_metadata("smollm", [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(tmp_path).chat_template == "new"


def test_a_directory_without_tokenizer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_configuration_that_is_no_object_stops_the_start(tmp_path: Path) -> None:
    backend_from_gguf(byte_level_metadata("smollm", [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BrokenModel, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(tmp_path)


def test_a_gguf_file_without_its_vocabulary_stops_the_start(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    file = tmp_path / "model.gguf"
    string_type = struct.pack("<I", 8)
    pair = text("tokenizer.ggml.model") + string_type + text("gpt2")
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    with pytest.raises(BrokenModel, match=r"incomplete: KeyError\('tokenizer\.ggml\.merges'\)"):
        load_tokenizer(file)


def test_no_token_stands_for_more_characters_than_the_longest(tokenizer: Tokenizer) -> None:
    assert tokenizer.max_token_chars == len("</s>")


def test_special_tokens_are_invisible_in_answers(tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.encode("</s>")
    assert (tokenizer.visible_bytes(eos), tokenizer.token_bytes(eos)) == (b"", b"</s>")
