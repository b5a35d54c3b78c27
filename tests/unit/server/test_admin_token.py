"""The admin port's token: a rotated file counts at once, a file that is gone or empty locks nobody out."""

from pathlib import Path

import pytest

from guidevane_runtime.server.api.admin import AdminToken
from guidevane_runtime.settings import RuntimeSettings, read_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("first")
    return file


@pytest.fixture
def token(file: Path) -> AdminToken:
    settings: RuntimeSettings = read_settings(["--model", "m", "--admin-token-file", str(file)])
    first = settings.read_admin_token()
    assert first is not None
    return AdminToken(settings.read_admin_token, first)


def test_a_rotated_token_counts_at_the_next_request(file: Path, token: AdminToken) -> None:
    file.write_text("second")

    assert token.matches("second")
    assert not token.matches("first")


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_that_is_gone_or_empty_leaves_the_last_token_in_force(
    file: Path, token: AdminToken, content: str | None
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_text(content)

    assert token.matches("first")
    assert not token.matches("")
