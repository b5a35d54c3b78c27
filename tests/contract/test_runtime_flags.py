"""The command line and the files that the operator gives a pod are ones that the runtime takes."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from guidevane_api.pod_files import ProtectionLines, TenantsFile
from guidevane_runtime.settings import read_settings

CASES = sorted((Path(__file__).parents[1] / "data" / "children").glob("*/output.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_the_runtime_takes_the_flags_and_the_files_of_a_pod(case: Path) -> None:
    children: dict[tuple[str, str], Any] = {
        (child["kind"], child["metadata"]["name"]): child for child in yaml.safe_load_all(case.read_text())
    }
    name = next(name for kind, name in children if kind == "Deployment")
    (container,) = children["Deployment", name]["spec"]["template"]["spec"]["containers"]

    settings = read_settings(container["args"], {})

    assert str(settings.slo_file) == "/etc/guidevane/limits/slo.json"
    assert str(settings.tenants_file) == "/etc/guidevane/tenants/tenants.json"
    ProtectionLines.model_validate_json(children["ConfigMap", f"{name}-limits"]["data"]["slo.json"])
    TenantsFile.model_validate_json(base64.b64decode(children["Secret", f"{name}-tenants"]["data"]["tenants.json"]))
