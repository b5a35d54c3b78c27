"""The children of a service: goldens, and what must hold for every service."""

import base64
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from guidevane_api.pod_files import TenantsFile
from guidevane_api.spec_traffic import TenancySpec
from guidevane_operator.children import RenderContext, render, revision_of
from guidevane_operator.children.__main__ import context_of, main, render_text
from guidevane_operator.children.quantity import to_bytes
from guidevane_operator.tenants import plan_tenants

CASES = Path(__file__).parents[2] / "data" / "children"


def context(**blocks: Any) -> RenderContext:
    spec = {"model": {"uri": "file:///models/tiny"}} | blocks
    return context_of({"metadata": {"name": "chat", "namespace": "demo"}, "spec": spec})


def child(kind: str, **blocks: Any) -> dict[str, Any]:
    return next(manifest for manifest in render(context(**blocks)) if manifest["kind"] == kind)


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir()))
def test_golden_children_are_those_that_a_person_has_read(case: str) -> None:
    output, rendered = CASES / case / "output.yaml", render_text((CASES / case / "input.yaml").read_text())
    if os.environ.get("GUIDEVANE_GOLDENS") == "write":
        output.write_text(rendered)
    assert rendered == output.read_text(), "make goldens, then read the diff"


def test_every_kind_of_case_is_there() -> None:
    assert {path.name for path in CASES.iterdir()} >= {"cpu", "gpu", "minimal", "pvc", "suspended"}


def test_a_change_of_live_blocks_leaves_the_pod_template_alone() -> None:
    before = child("Deployment")["spec"]["template"]
    live: list[dict[str, Any]] = [
        {"limits": {"maxNumSeqs": 3, "prefillChunkSize": 512}},
        {"slo": {"ttftP95Milliseconds": 100}},
        {"retune": {"mode": "Auto"}},
        {"replicas": 7},
        {"suspend": True},
        {"monitoring": {"prometheusURL": "http://elsewhere:9090"}},
        {"disruption": {"pdb": "Off"}},
        {"tenancy": {"tenants": [{"name": "a", "keySecretRef": {"name": "keys", "key": "a"}}]}},
        {"tenancy": {"tenants": [{"name": "b", "weight": 3}], "classes": {"offline": 4}}},
    ]
    for blocks in live:
        assert child("Deployment", **blocks)["spec"]["template"] == before, blocks


def test_a_change_of_start_up_blocks_is_a_new_revision() -> None:
    before = revision_of(context())
    startup: list[dict[str, Any]] = [
        {"envelope": {"maxNumSeqs": 128}},
        {"engine": {"image": "registry.example/runtime:2"}},
        {"model": {"uri": "file:///models/other"}},
        {"resources": {"limits": {"memory": "8Gi"}}},
        {"scheduling": {"nodeSelector": {"pool": "b"}}},
        {"security": {"automountToken": True}},
        {"drain": {"shutdownSeconds": 46}},
        {"probes": {"liveness": {"periodSeconds": 11}}},
    ]
    revisions = [revision_of(context(**blocks)) for blocks in startup]
    assert before not in revisions
    assert len(set(revisions)) == len(revisions)


def test_a_requested_restart_is_a_new_revision() -> None:
    asked = dataclasses.replace(context(), restart_requested_at="2026-01-01T00:00:00Z")
    deployment = next(manifest for manifest in render(asked) if manifest["kind"] == "Deployment")
    assert revision_of(asked) != revision_of(context())
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"guidevane.dev/restart-requested-at": "2026-01-01T00:00:00Z"}


def test_rendering_twice_gives_the_same() -> None:
    assert render(context(replicas=2)) == render(context(replicas=2))


def test_the_admin_port_is_never_in_the_service() -> None:
    assert [port["name"] for port in child("Service")["spec"]["ports"]] == ["http"]


def test_every_child_is_owned_by_the_service_and_in_its_namespace() -> None:
    for manifest in render(context(replicas=2)):
        owner = manifest["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("LLMService", "chat", True)
        assert manifest["metadata"]["namespace"] == "demo"


def test_the_lines_of_the_slo_lie_beside_the_limits_with_what_the_guard_may_do() -> None:
    found = {
        mode: json.loads(child("ConfigMap", slo={"itlP95Milliseconds": 99, "guard": mode})["data"]["slo.json"])
        for mode in ("Off", "DryRun", "On")
    }
    assert {mode: lines.pop("mode") for mode, lines in found.items()} == {
        "Off": "off",
        "DryRun": "dry-run",
        "On": "on",
    }
    assert (
        found["On"]
        == found["Off"]
        == {
            "ttftP95Milliseconds": 1500,
            "itlP95Milliseconds": 99,
            "queueWaitP95Milliseconds": 500,
            "kvCacheUtilizationMaxPercent": 88,
            "admissionRejectRateMaxPercent": 1,
        }
    )


def test_the_tenants_file_says_who_shares_the_service() -> None:
    tenants = plan_tenants(TenancySpec.model_validate({"tenants": [{"name": "a", "weight": 3}]}), {}).file
    rendered = render(dataclasses.replace(context(), tenants=tenants))
    secret = next(m for m in rendered if m["metadata"]["name"] == "chat-tenants")
    text = base64.b64decode(secret["data"]["tenants.json"])
    assert TenantsFile.model_validate_json(text) == tenants


def test_the_token_is_in_the_secret_and_nowhere_else() -> None:
    secret = dataclasses.replace(context(), token="s3cret-token")
    others = [manifest for manifest in render(secret) if manifest["kind"] != "Secret"]
    assert "s3cret-token" not in json.dumps(others)


@pytest.mark.parametrize(("replicas", "expected"), [(0, False), (1, False), (2, True), (9, True)])
def test_a_budget_exists_from_two_replicas_on(replicas: int, expected: bool) -> None:
    kinds = {manifest["kind"] for manifest in render(context(replicas=replicas))}
    assert ("PodDisruptionBudget" in kinds) is expected


def test_a_gpu_rollout_takes_the_old_pod_first() -> None:
    gpu = child("Deployment", resources={"gpu": {"perReplica": 1}}, replicas=2)["spec"]["strategy"]["rollingUpdate"]
    cpu = child("Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert gpu == {"maxSurge": 0, "maxUnavailable": 1}
    assert cpu == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_drain_that_is_cut_short_still_ends_before_the_node_kills_the_pod() -> None:
    drain = {"preStopSeconds": 300, "shutdownSeconds": 400, "marginSeconds": 15, "maxSeconds": 500}
    pod = child("Deployment", drain=drain)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 500
    assert "--drain-seconds=185" in pod["containers"][0]["args"]


def test_lengths_that_only_the_pod_knows_are_left_to_it() -> None:
    unknown = json.loads(child("ConfigMap")["data"]["limits.json"])
    known = json.loads(child("ConfigMap", envelope={"maxModelLen": 2048})["data"]["limits.json"])
    given = json.loads(child("ConfigMap", limits={"maxModelLen": 1000})["data"]["limits.json"])
    assert "maxModelLen" not in unknown
    assert (known["maxModelLen"], known["maxPromptTokens"]) == (2048, 2048)
    assert given["maxModelLen"] == 1000


@pytest.mark.parametrize(
    ("memory", "flag"),
    [("2Gi", "--kv-cache-memory=512Mi"), ("64Gi", "--kv-cache-memory=4096Mi"), ("1G", "--kv-cache-memory=238Mi")],
)
def test_a_cpu_pod_gets_a_quarter_of_its_memory_for_the_cache(memory: str, flag: str) -> None:
    pod = child("Deployment", resources={"limits": {"memory": memory}})["spec"]["template"]["spec"]
    assert flag in pod["containers"][0]["args"]


@pytest.mark.parametrize(("text", "expected"), [("1Ki", 1024), ("1.5Gi", 1610612736), ("2M", 2000000), ("7", 7)])
def test_quantities_are_read_as_bytes(text: str, expected: int) -> None:
    assert to_bytes(text) == expected


def test_a_users_variable_replaces_ours() -> None:
    env = child("Deployment", engine={"env": [{"name": "HOME", "value": "/data"}]})
    found = [e for e in env["spec"]["template"]["spec"]["containers"][0]["env"] if e["name"] == "HOME"]
    assert found == [{"name": "HOME", "value": "/data"}]


def test_a_refused_service_is_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump({"metadata": {"name": "x"}, "spec": {"model": {"uri": "hf://org/model"}}}))
    assert main([str(path)]) == 1
    assert "spec.model.uri" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "- a", "kind: Pod", "{"])
def test_a_file_that_is_no_service_is_said_to_be_none(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    assert main([str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "missing.yaml")])
    assert end.value.code == 2
    assert "missing.yaml can't be read" in capsys.readouterr().err
