"""A file that changes under a running runtime: new content counts once, a bad one is told once and changes nothing."""

import logging
from pathlib import Path

import pytest

from guidevane_api.pod_files import GuardMode, ProtectionLines
from guidevane_runtime.errors import StartError
from guidevane_runtime.server.watched_file import WatchedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "slo.json"
    path.write_text('{"itlP95Milliseconds": 120}')
    return path


@pytest.fixture
def file(path: Path) -> WatchedFile[ProtectionLines]:
    made = WatchedFile(path, "--slo-file", ProtectionLines)
    made.read()
    return made


def test_new_content_is_a_change_once(path: Path, file: WatchedFile[ProtectionLines]) -> None:
    assert file.changed() is None
    path.write_text('{"mode": "off"}')
    assert file.changed() == ProtectionLines(mode=GuardMode.OFF)
    assert file.changed() is None


def test_a_folder_that_is_swapped_as_the_kubelet_does_it_is_a_change(tmp_path: Path) -> None:
    for name, line in (("one", 100), ("two", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slo.json").write_text(f'{{"itlP95Milliseconds": {line}}}')
    data, mounted = tmp_path / "..data", tmp_path / "slo.json"
    data.symlink_to("one")
    mounted.symlink_to("..data/slo.json")
    file = WatchedFile(mounted, "--slo-file", ProtectionLines)
    assert file.read().itl_p95_milliseconds == 100
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(data)
    assert file.changed() == ProtectionLines(itl_p95_milliseconds=200)


@pytest.mark.parametrize("text", ["{", '{"itl": 5}', '{"itlP95Milliseconds": 0}', None])
def test_a_bad_file_is_told_once_and_changes_nothing(
    path: Path, file: WatchedFile[ProtectionLines], text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path.unlink() if text is None else path.write_text(text)
    assert [file.changed() for _ in range(3)] == [None] * 3
    assert [record.message for record in caplog.records] == ["file ignored"]
    path.write_text('{"itlP95Milliseconds": 90}')
    assert file.changed() == ProtectionLines(itl_p95_milliseconds=90)


@pytest.mark.parametrize(
    ("text", "named"), [("{", "Invalid JSON"), ('{"itl": 5}', "itl: Extra inputs"), (None, "No such")]
)
def test_a_bad_file_stops_the_start_with_its_flag_and_its_fault(path: Path, text: str | None, named: str) -> None:
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(StartError, match=f"can't read --slo-file .*slo.json: .*{named}"):
        WatchedFile(path, "--slo-file", ProtectionLines).read()
