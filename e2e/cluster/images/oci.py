"""The OCI image layout, as a tar stream that `ctr images import` reads.

Knows digests and descriptors. A layer whose bytes the receiver already has is described but not sent.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

# Fixed, so that the same content gives the same digest at any time.
CREATED = "2026-01-01T00:00:00Z"
MTIME = 1767225600

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
PLATFORM = {"architecture": MACHINES.get(platform.machine(), platform.machine()), "os": "linux"}


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer, so its digest is its diff id too."""

    digest: str
    size: int
    source: Path | bytes

    def open(self) -> IO[bytes]:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")


@dataclass(frozen=True)
class ImageConfig:
    entrypoint: tuple[str, ...]
    user: str
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    labels: dict[str, str] = field(default_factory=dict)

    def document(self, layers: Iterable[Layer]) -> dict[str, Any]:
        diffs = [layer.digest for layer in layers]
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **self.env}
        return {
            **PLATFORM,
            "created": CREATED,
            "config": {
                "Entrypoint": list(self.entrypoint),
                "User": self.user,
                "Env": [f"{k}={v}" for k, v in env.items()],
                "WorkingDir": self.workdir,
                "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": diffs},
            "history": [{"created": CREATED, "created_by": "e2e.cluster"} for _ in diffs],
        }


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer_of_bytes(data: bytes) -> Layer:
    return Layer(digest_of(data), len(data), data)


def layer_of_files(files: dict[str, tuple[bytes, int]]) -> Layer:
    """A small layer in memory: path in the image -> (content, mode), with the folders above, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in sorted({str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}):
            tar.addfile(member(folder, 0o755, tarfile.DIRTYPE))
        for path, (content, mode) in sorted(files.items()):
            info = member(path, mode)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return layer_of_bytes(buffer.getvalue())


def member(path: str, mode: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.mode, info.type, info.mtime = mode, kind, MTIME
    return info


class HashingWriter(io.RawIOBase):
    """Writes through to a file and knows digest and size at the end, so a layer of gigabytes is read once only."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._target.write(data)

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


def cached_layer(path: Path, fill: Callable[[tarfile.TarFile], None]) -> Layer:
    """The layer in `path`, made by `fill` if it is not there; digest and size are kept beside it."""
    note = path.with_suffix(".json")
    if not (path.exists() and note.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            writer = HashingWriter(file)
            with tarfile.open(fileobj=writer, mode="w|", bufsize=1 << 20) as tar:
                fill(tar)
        part.replace(path)
        note.write_text(json.dumps({"digest": writer.digest, "size": writer.size}))
    facts = json.loads(note.read_text())
    return Layer(facts["digest"], facts["size"], path)


def encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def describe(data: bytes) -> dict[str, Any]:
    return {"digest": digest_of(data), "size": len(data)}


def manifest_document(layers: list[Layer], config: ImageConfig) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, **describe(encode(config.document(layers)))},
        "layers": [{"mediaType": LAYER, "digest": layer.digest, "size": layer.size} for layer in layers],
    }


def manifest_digest(layers: list[Layer], config: ImageConfig) -> str:
    """What containerd calls the image's target: equal digests are equal images."""
    return digest_of(encode(manifest_document(layers, config)))


def write_archive(
    out: IO[bytes], reference: str, layers: list[Layer], config: ImageConfig, held: Set[str] = frozenset()
) -> None:
    """Stream the image; layers whose digest is in `held` are left out, as the receiver has their bytes."""
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20) as tar:

        def add(name: str, size: int, content: IO[bytes]) -> None:
            info = member(name, 0o644)
            info.size = size
            tar.addfile(info, content)

        def add_json(document: dict[str, Any]) -> dict[str, Any]:
            data = encode(document)
            described = describe(data)
            add(blob_path(described["digest"]), len(data), io.BytesIO(data))
            return described

        sent = set(held)
        for layer in layers:
            if layer.digest not in sent:
                sent.add(layer.digest)
                with layer.open() as content:
                    add(blob_path(layer.digest), layer.size, content)
        add_json(config.document(layers))
        described = {
            **add_json(manifest_document(layers, config)),
            "mediaType": MANIFEST,
            "platform": PLATFORM,
            "annotations": {
                "io.containerd.image.name": reference,
                "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
            },
        }
        index = json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()
        add("index.json", len(index), io.BytesIO(index))
        layout = b'{"imageLayoutVersion": "1.0.0"}'
        add("oci-layout", len(layout), io.BytesIO(layout))


def blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")
