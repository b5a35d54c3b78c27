"""The operator's settings: flags over environment over defaults; an unknown one stops the start."""

import pytest
from pydantic import ValidationError

from guidevane_operator.errors import SettingsError
from guidevane_operator.settings import read_settings


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUIDEVANE_PROMETHEUS_URL", "http://env:9090")
    monkeypatch.setenv("GUIDEVANE_NAMESPACES", "a, b")
    settings = read_settings(["--prometheus-url", "http://flag:9090"])
    assert settings.prometheus_url == "http://flag:9090"
    assert settings.watched_namespaces() == ("a", "b")


def test_an_unknown_variable_is_named() -> None:
    with pytest.raises(SettingsError, match="GUIDEVANE_PROMETHEUS is no setting"):
        read_settings([], {"GUIDEVANE_PROMETHEUS": "x"})


def test_an_unknown_flag_stops_the_start() -> None:
    with pytest.raises(SystemExit):
        read_settings(["--nope"])


def test_a_bad_value_is_named() -> None:
    with pytest.raises(ValidationError, match="drift_seconds"):
        read_settings(["--drift-seconds", "0"])
