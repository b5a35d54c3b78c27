"""Layers and images: the same input gives the same digest, and what has no place in an image is not in it."""

import io
import json
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from e2e.cluster.errors import ClusterError
from e2e.cluster.images.build import refuse_torch
from e2e.cluster.images.deps import DEPS, is_needed
from e2e.cluster.images.layers import LayerWriter, is_needed_of_python
from e2e.cluster.images.oci import ImageConfig, Layer, layer_of_files, manifest_digest, write_archive

CONFIG = ImageConfig(entrypoint=("/x",), user="10001")


def blobs(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {m.name: f.read() for m in tar if (f := tar.extractfile(m))}


def archive_of(layers: list[Layer], held: frozenset[str] = frozenset()) -> dict[str, bytes]:
    out = io.BytesIO()
    write_archive(out, "guidevane.dev/x:1", layers, CONFIG, held)
    return blobs(out.getvalue())


def test_a_layer_that_the_store_holds_is_described_and_not_sent() -> None:
    big, small = layer_of_files({"big": (b"b" * 9000, 0o644)}), layer_of_files({"small": (b"s", 0o644)})

    sent = archive_of([big, small], held=frozenset({big.digest}))

    manifest_name = json.loads(sent["index.json"])["manifests"][0]["digest"]
    manifest = json.loads(sent["blobs/" + manifest_name.replace(":", "/")])
    assert [layer["digest"] for layer in manifest["layers"]] == [big.digest, small.digest]
    assert "blobs/" + big.digest.replace(":", "/") not in sent
    assert "blobs/" + small.digest.replace(":", "/") in sent
    assert manifest_name == manifest_digest([big, small], CONFIG)


def test_a_tree_gives_the_same_layer_whenever_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("text")
    (tmp_path / "a").symlink_to("b/file")

    def layer() -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            LayerWriter(tar).tree("opt/x", tmp_path, lambda path: True)
        return buffer.getvalue()

    first = layer()
    (tmp_path / "b" / "file").touch()
    assert layer() == first
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        assert tar.getnames() == ["opt", "opt/x", "opt/x/a", "opt/x/b", "opt/x/b/file"]
        assert {member.uid for member in tar} == {0}


def test_an_operator_image_with_torch_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"contains opt/guidevane/deps/torch/__init__\.py"):
        refuse_torch(layer_of_files({f"{DEPS}/torch/__init__.py": (b"", 0o644)}))


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("bin/python3.11", True),
        ("bin/gcc", False),
        ("lib/python3.11/json/decoder.py", True),
        ("lib/python3.11/site-packages", False),
        ("lib/libpython3.11.so.1.0", True),
        ("lib/firefox", False),
        ("share", False),
    ],
)
def test_only_what_is_pythons_is_taken_from_its_prefix(path: str, needed: bool) -> None:
    assert is_needed_of_python(PurePosixPath(path), "python3.11") is needed


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("torch/bin/torch_shm_manager", True),
        ("torch/include", False),
        ("triton", False),
        ("nvidia/cu13/lib/libcublas.so.13", True),
        ("nvidia/cudnn/lib/libcudnn_adv.so.9", False),
        ("nvidia/cu13/lib/other.py", True),
        ("numpy/core.py", True),
        ("numpy/__pycache__", False),
    ],
)
def test_only_what_a_cpu_needs_goes_into_the_layer(path: str, needed: bool) -> None:
    assert is_needed(PurePosixPath(path), {"nvidia/cu13/lib/libcublas.so.13"}) is needed
