"""CLUSTER=current: a cluster of somebody's own, into which nothing is loaded."""

from pathlib import Path

import pytest

from e2e.cluster.external import Current
from e2e.cluster.images.build import build_images, version
from e2e.cluster.progress import Progress
from e2e.cluster.settings import Settings


def test_no_image_is_built_for_a_cluster_that_takes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, progress = Settings("current", tmp_path / "state", tmp_path / "cache", "group"), Progress()
    build_images([], settings, Current(settings, progress), progress)
    assert f"guidevane.dev/operator:{version()}, guidevane.dev/runtime:{version()}" in capsys.readouterr().out
    assert not settings.cache.exists()
