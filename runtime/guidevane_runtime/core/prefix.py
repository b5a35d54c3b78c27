"""Under which keys KV blocks are found.

A key is sha256 over the key of the block before and the block's own token ids, so equal keys mean equal text from the
first token on. The chain hangs from a root that names all else that KV depends on or that must keep requests apart.
Only full blocks have keys, and only after the step that filled them is over; nobody writes to them any more.
"""

import hashlib
import struct
from array import array

from guidevane_runtime.core.messages import CacheScope

KEY_VERSION = b"guidevane-kv-1"
"""Changes with the way keys are made."""
FIELD_HEAD = struct.Struct("!4sQ")
"""Type and length in bytes, before each field of the root: no two lists of fields give the same bytes."""


def cache_root(scope: CacheScope, *, model_digest: bytes, block_size: int) -> bytes:
    """First link of a scope's key chains: equal only for the same model, adapter, tenant, salt and block size."""
    fields = (
        (b"vers", KEY_VERSION),
        (b"modl", model_digest),
        (b"size", str(block_size).encode()),
        (b"lora", scope.adapter_digest),
        (b"tnnt", scope.tenant.encode()),
        (b"salt", scope.salt.encode()),
    )
    return hashlib.sha256(b"".join(FIELD_HEAD.pack(kind, len(value)) + value for kind, value in fields)).digest()


class BlockKeys:
    """Keys of one request's full blocks, each made when first asked for, and kept: tokens only get appended."""

    __slots__ = ("_block_size", "_links", "_token_ids")

    def __init__(self, root: bytes, token_ids: list[int], block_size: int) -> None:
        self._links = [root]
        self._token_ids = token_ids
        self._block_size = block_size

    def key(self, index: int) -> bytes:
        """Key of block `index`, all of whose tokens must be known."""
        links, size = self._links, self._block_size
        for start in range((len(links) - 1) * size, (index + 1) * size, size):
            token_bytes = array("I", self._token_ids[start : start + size]).tobytes()
            links.append(hashlib.sha256(links[-1] + token_bytes).digest())
        return links[index + 1]
