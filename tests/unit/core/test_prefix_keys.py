"""Keys of blocks: equal only for equal text in an equal scope."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from guidevane_runtime.core.messages import CacheScope, SamplingParams, Submit
from guidevane_runtime.core.prefix import KEY_VERSION, BlockKeys, cache_root

SCOPE = CacheScope(tenant="acme", salt="s", adapter_digest=b"a")


def root(scope: CacheScope = SCOPE, model_digest: bytes = b"m", block_size: int = 4) -> bytes:
    return cache_root(scope, model_digest=model_digest, block_size=block_size)


def key(token_ids: list[int], index: int, scope: CacheScope = SCOPE) -> bytes:
    return BlockKeys(root(scope), token_ids, 4).key(index)


@pytest.mark.parametrize(
    "other",
    [
        {"scope": CacheScope("evil", "s", b"a")},
        {"scope": CacheScope("acme", "t", b"a")},
        {"scope": CacheScope("acme", "s", b"b")},
        {"model_digest": b"n"},
        {"block_size": 8},
    ],
)
def test_any_other_tenant_salt_adapter_model_or_block_size_has_another_root(other: dict[str, Any]) -> None:
    """D1, D2, D3, I15"""
    assert root(**other) != root()


def test_another_way_to_make_roots_needs_another_version() -> None:
    """If this fails because a field came or went: change KEY_VERSION, then this."""
    assert KEY_VERSION == b"guidevane-kv-1"
    assert root().hex() == "e8e8435a034110aec1bd63500d95e8de6b9b4212b9b35e11bb04297690fbd893"


def test_a_text_moved_from_one_field_of_a_scope_to_another_makes_another_root() -> None:
    """D9: types and lengths are part of the root, so fields can't run into each other."""
    scopes = [
        CacheScope(tenant="ab"),
        CacheScope(tenant="a", salt="b"),
        CacheScope(salt="ab"),
        CacheScope(adapter_digest=b"ab"),
        CacheScope(tenant="a", adapter_digest=b"b"),
    ]
    assert len({root(scope) for scope in scopes} | {root(CacheScope(), model_digest=b"ab")}) == 6


def test_a_key_depends_on_every_token_up_to_its_block_and_on_none_behind_it() -> None:
    tokens = list(range(12))
    for place in range(12):
        changed = [*tokens[:place], 99, *tokens[place + 1 :]]
        same = [key(tokens, index) == key(changed, index) for index in range(3)]
        assert same == [place // 4 > index for index in range(3)]


def test_the_same_block_at_another_place_has_another_key() -> None:
    keys = BlockKeys(root(), [1, 2, 3, 4] * 3, 4)
    assert len({keys.key(index) for index in range(3)}) == 3


def test_keys_are_the_same_in_whatever_order_and_however_late_they_are_asked_for() -> None:
    tokens = [5, 6, 7, 8]
    keys = BlockKeys(root(), tokens, 4)
    first = keys.key(0)
    tokens += [9, 10, 11, 12]
    assert (keys.key(1), keys.key(0)) == (key(tokens, 1), first)


def test_keys_do_not_depend_on_the_process() -> None:
    """D4, D5: no builtin hash, whose seed differs and whose collisions can be made."""
    code = (
        "from guidevane_runtime.core.messages import CacheScope\n"
        "from guidevane_runtime.core.prefix import BlockKeys, cache_root\n"
        "root = cache_root(CacheScope('acme', 's', b'a'), model_digest=b'm', block_size=4)\n"
        "print(BlockKeys(root, [1, 2, 3, 4], 4).key(0).hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == key([1, 2, 3, 4], 0).hex()


IN_KEY = {"prompt_token_ids", "cache_scope"}
KV_NEUTRAL = {
    "request_id": "a name",
    "arrival_s": "when, not what",
    "priority": "when, not what",
    "tenant": "whose turn it is, not what; isolation is cache_scope.tenant",
    "request_class": "when, not what",
    "deadline_s": "when, not what",
    "params": "what is drawn from the logits; a drawn token is in the key of its block like any other",
}


def test_every_field_of_a_request_is_in_the_key_or_does_not_touch_kv() -> None:
    """D9: a new field of Submit has to be put into one of the two lists by somebody who thought about it."""
    assert {field.name for field in dataclasses.fields(Submit)} == IN_KEY | set(KV_NEUTRAL)
    assert {field.name for field in dataclasses.fields(CacheScope)} == {"tenant", "salt", "adapter_digest"}


def test_a_scope_is_given_by_name_so_that_none_lands_in_another_field() -> None:
    params = SamplingParams(max_tokens=1, seed=0)
    with pytest.raises(TypeError, match="positional arguments"):
        Submit("a", (1,), params, 0.0, 0, CacheScope(tenant="a"))  # type: ignore[call-arg, misc]


def test_a_request_is_in_the_shared_scope_unless_it_says_otherwise() -> None:
    submit: Any = Submit("a", (1,), SamplingParams(max_tokens=1, seed=0), 0.0)
    assert submit.cache_scope == CacheScope("", "", b"")
