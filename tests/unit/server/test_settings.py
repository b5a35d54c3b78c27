import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guidevane_api.limits import PartialLimits, SchedulerLimits
from guidevane_runtime.errors import ModelNotFound, StartError, UnsupportedModel
from guidevane_runtime.model_source import local_model_path
from guidevane_runtime.settings import RuntimeSettings, read_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RuntimeSettings.model_fields:
        monkeypatch.delenv(f"GUIDEVANE_{name.upper()}", raising=False)


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUIDEVANE_PORT", "9000")
    monkeypatch.setenv("GUIDEVANE_BLOCK_SIZE", "32")
    settings = read_settings(["--model", "m", "--port", "9001"], {})
    assert (settings.port, settings.block_size, settings.admin_port) == (9001, 32, 8001)


@pytest.mark.parametrize(("flags", "is_on"), [([], True), (["--prefix-caching", "off"], False)])
def test_the_prefix_cache_is_on_unless_it_is_switched_off(flags: list[str], is_on: bool) -> None:
    settings = read_settings(["--model", "m", *flags], {})
    assert settings.engine_settings("m", SchedulerLimits()).enable_prefix_caching is is_on


@pytest.mark.parametrize(
    ("text", "value"), [("512Mi", 512 << 20), ("4Gi", 4 << 30), ("2G", 2 * 10**9), ("1048576", 1 << 20)]
)
def test_the_cache_size_is_a_quantity(text: str, value: int) -> None:
    assert read_settings(["--model", "m", "--kv-cache-memory", text], {}).kv_cache_memory == value


@pytest.mark.parametrize("text", ["0.5Gi", "many", "", "12MB"])
def test_what_is_no_quantity_stops_the_start(text: str) -> None:
    with pytest.raises(StartError, match="kv"):
        read_settings(["--model", "m", "--kv-cache-memory", text], {})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("GUIDEVANE_PROT", "GUIDEVANE_PORT"), ("GUIDEVANE_BLOCKSIZE", "GUIDEVANE_BLOCK_SIZE")],
)
def test_a_misspelt_variable_stops_the_start_and_is_named(name: str, meant: str) -> None:
    with pytest.raises(StartError, match=f"{name} is no setting of the runtime; {meant} is"):
        read_settings(["--model", "m"], {name: "1", "HOME": "/"})


@pytest.mark.parametrize(
    "name", ["GUIDEVANE_TERMINATION_LOG", "GUIDEVANE_CACHE_DIR", "GUIDEVANE_KERNELS_PROVIDER", "GUIDEVANE_SERVICE_HOST"]
)
def test_variables_of_others_are_no_fault(name: str) -> None:
    assert read_settings(["--model", "m"], {name: "/x"}).model == "m"


def test_an_unknown_flag_ends_with_status_2_and_is_named_where_kubernetes_looks(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    ended = subprocess.run(
        [sys.executable, "-m", "guidevane_runtime", "--model", "m", "--prot", "1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GUIDEVANE_TERMINATION_LOG": str(reason)},
    )
    assert ended.returncode == 2 and "--prot" in ended.stderr
    assert "--prot" in reason.read_text()


@pytest.mark.parametrize("flag", ["--drain-seconds", "--hang-seconds", "--num-threads", "--envelope-max-model-len"])
def test_a_number_that_nothing_could_count_to_is_named(flag: str) -> None:
    with pytest.raises(StartError, match=flag.removeprefix("--").replace("-", "_")):
        read_settings(["--model", "m", flag, "9" * 400], {})


def test_the_served_name_is_the_last_part_of_the_model_by_default() -> None:
    assert read_settings(["--model", "/models/smol/"], {}).model_name == "smol"
    assert read_settings(["--model", "/m", "--served-model-name", "x"], {}).model_name == "x"
    assert read_settings(["--model", "."], {}).model_name == Path.cwd().name


def test_startup_limits_come_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text(json.dumps({"maxNumSeqs": 3}))
    settings = read_settings(["--model", "m", "--limits-file", str(file)], {})
    assert settings.read_startup_limits() == PartialLimits(max_num_seqs=3)


@pytest.mark.parametrize("content", ["", "[]", '{"maxNumSeq": 3}', '{"maxNumSeqs": 0}'])
def test_a_bad_limits_file_stops_the_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "limits.json"
    file.write_text(content)
    with pytest.raises(StartError, match="--limits-file"):
        read_settings(["--model", "m", "--limits-file", str(file)], {}).read_startup_limits()


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_without_a_token_stops_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartError, match="--admin-token-file"):
        read_settings(["--model", "m", "--admin-token-file", str(file)], {}).read_admin_token()


def test_a_folder_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        local_model_path(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    assert local_model_path(str(tmp_path)) == tmp_path / "a.gguf" == local_model_path(f"file://{tmp_path}")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        local_model_path(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert local_model_path(str(tmp_path)) == tmp_path


def test_a_scheme_that_is_not_read_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="s3://"):
        local_model_path("s3://bucket/model")


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 256, 256), (64, 64, 64)])
def test_as_many_connections_are_allowed_as_the_system_lets_us(soft: int, hard: int, raised: int) -> None:
    code = (
        "import resource\n"
        "from guidevane_runtime.__main__ import allow_many_connections\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "allow_many_connections()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str((raised, hard))


def test_the_server_never_imports_torch() -> None:
    code = (
        "import pkgutil, sys, importlib, guidevane_runtime.__main__, guidevane_runtime.server as server\n"
        "for module in pkgutil.walk_packages(server.__path__, 'guidevane_runtime.server.'):\n"
        "    importlib.import_module(module.name)\n"
        "found = {'torch', 'triton', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
