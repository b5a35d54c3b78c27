"""What a user sees of the CRD on a real API server: explain, columns, scale, samples, and typos refused."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from guidevane_api.llmservice import LLMServiceSpec, not_in_effect

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "manifests" / "samples"
SAMPLE_NAMES = sorted(path.name for path in SAMPLES.glob("*.yaml") if path.name != "kustomization.yaml")
GOLDENS = ROOT / "tests" / "data" / "explain"
PATH = "/apis/guidevane.dev/v1alpha1/namespaces/default/llmservices"

MINIMAL = {
    "apiVersion": "guidevane.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "seen"},
    "spec": {"model": {"uri": "file:///models/x"}},
}
STATUS: dict[str, Any] = {
    "replicas": 2,
    "readySummary": "1/2",
    "reason": "ScalingUp",
    "selector": "guidevane.dev/name=seen",
    "endpoint": "http://seen.default.svc:8000/v1",
    "slo": {"ttftP95Milliseconds": 840, "itlP95Milliseconds": 61, "attainmentPercent": 98, "kvCachePercent": 72},
    "metrics": {"state": "Known"},
    "limits": {
        "desired": {
            "maxNumSeqs": 128,
            "maxNumBatchedTokens": 8000,
            "prefillChunkSize": 1024,
            "kvCacheUtilizationLimitPercent": 95,
        },
        "epoch": 42,
    },
    "retune": {"state": "Settling"},
    "guard": {"level": 2, "lines": ["itlP95Milliseconds"]},
    "autoscaling": {"recommended": 4, "limitedBy": "MaxReplicas"},
    "rollout": {"revision": "6f9c"},
}


def with_spec(**blocks: Any) -> dict[str, Any]:
    body = copy.deepcopy(MINIMAL)
    body["spec"] |= blocks
    return body


@pytest.fixture
def seen(api_server):
    """A service with a status, and gone again afterwards."""
    created = api_server.request("POST", PATH, MINIMAL)
    assert created.code == 201, created.message
    patched = api_server.request("PATCH", f"{PATH}/seen/status", {"status": STATUS}, "application/merge-patch+json")
    assert patched.code == 200, patched.message
    yield patched.body
    assert api_server.request("DELETE", f"{PATH}/seen").code == 200


def test_the_api_server_takes_the_crd_without_a_warning(bare_api_server):
    applied = bare_api_server.kubectl("apply", "--dry-run=server", "-f", str(ROOT / "crds" / "llmservices.yaml"))
    assert applied.returncode == 0, applied.stderr
    assert applied.stderr == ""


def test_no_schema_violation_keeps_the_crd_out_of_service(api_server):
    found = api_server.request(
        "GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmservices.guidevane.dev"
    )
    conditions = {entry["type"]: entry["status"] for entry in found.body["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_a_sample_applies_with_strict_validation(api_server, name):
    applied = api_server.kubectl("apply", "--validate=strict", "--dry-run=server", "-f", str(SAMPLES / name))
    assert applied.returncode == 0, applied.stderr


@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_a_sample_sets_nothing_that_is_not_in_effect(name):
    assert not_in_effect(yaml.safe_load((SAMPLES / name).read_text())["spec"]) == []


def test_the_sample_of_the_readme_applies_with_strict_validation(api_server):
    (sample,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    applied = api_server.kubectl("apply", "--validate=strict", "--dry-run=server", "-f", "-", stdin=sample)
    assert applied.returncode == 0, applied.stderr


def test_the_samples_apply_as_a_kustomization(api_server):
    applied = api_server.kubectl("apply", "--dry-run=server", "-k", str(SAMPLES))
    assert applied.returncode == 0, applied.stderr
    assert "llmservice.guidevane.dev/smollm2 created" in applied.stdout


def test_a_typo_in_a_field_is_refused_by_name(api_server):
    body = yaml.safe_dump(with_spec(limits={"maxNumSeq": 8}))
    applied = api_server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=body)
    assert applied.returncode != 0
    assert 'unknown field "spec.limits.maxNumSeq"' in applied.stderr


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        ({"limits": {"maxNumSeqs": 300}}, "spec.limits.maxNumSeqs"),
        ({"model": {"uri": ""}}, "spec.model.uri"),
        ({"model": {}}, "spec.model.uri"),
        ({"limits": {"maxNumSeqs": 0}}, "spec.limits.maxNumSeqs"),
        ({"limits": {"maxNumSeqs": "many"}}, "spec.limits.maxNumSeqs"),
        ({"retune": {"mode": "Always"}}, "spec.retune.mode"),
        ({"retune": {"intervalSeconds": 1}}, "spec.retune.intervalSeconds"),
        ({"resources": {"requests": {"memory": "2 GB"}}}, "spec.resources.requests.memory"),
        ({"envelope": {"dtype": "float32"}}, "spec.envelope.dtype"),
    ],
)
def test_a_bad_value_is_refused_with_a_message_that_names_the_field(api_server, blocks, named):
    applied = api_server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(with_spec(**blocks)))
    assert applied.returncode != 0
    assert named in applied.stderr


def test_two_bounds_for_one_knob_are_refused(api_server):
    bound = {"knob": "maxNumSeqs", "min": 1, "max": 2}
    answer = api_server.request("POST", f"{PATH}?dryRun=All", with_spec(retune={"bounds": [bound, bound]}))
    assert answer.code == 422
    assert "spec.retune.bounds[1]: Duplicate value" in answer.message


def test_defaults_are_filled_in_and_read_back_by_the_models_as_they_are(api_server):
    stored = api_server.request("POST", f"{PATH}?dryRun=All", MINIMAL).body["spec"]
    assert stored["envelope"]["maxNumSeqs"] == 256
    assert stored["engine"]["adminPort"] == 8001
    assert "limits" not in stored
    assert LLMServiceSpec.model_validate(stored) == LLMServiceSpec.model_validate(MINIMAL["spec"])
    assert not_in_effect(stored) == []


def test_a_core_count_may_be_a_bare_number(api_server):
    body = with_spec(resources={"requests": {"cpu": 4, "memory": "16Gi"}})
    answer = api_server.request("POST", f"{PATH}?dryRun=All", body)
    assert answer.code == 201, answer.message
    assert LLMServiceSpec.model_validate(answer.body["spec"]).resources.requests.cpu == "4"


def test_status_keeps_every_field_that_is_written(seen):
    assert seen["status"] == STATUS


def test_limits_of_a_running_service_change_by_a_merge_patch(api_server, seen):
    patch = {"spec": {"limits": {"maxNumSeqs": 2}}}
    answer = api_server.request("PATCH", f"{PATH}/seen", patch, "application/merge-patch+json")
    assert answer.code == 200, answer.message
    assert answer.body["metadata"]["generation"] == seen["metadata"]["generation"] + 1


def test_get_shows_the_columns(api_server, seen):
    head, row = api_server.kubectl("get", "llm", "seen").stdout.splitlines()
    assert head.split() == [
        "NAME",
        "READY",
        "REASON",
        "SEQS",
        "TTFT-P95",
        "ITL-P95",
        "SLO%",
        "KV%",
        "RETUNE",
        "SCALE",
        "AGE",
    ]
    assert row.split()[:-1] == ["seen", "1/2", "ScalingUp", "128", "840", "61", "98", "72", "Settling", "MaxReplicas"]


def test_wide_get_shows_more_columns(api_server, seen):
    head, row = api_server.kubectl("get", "llmsvc", "seen", "-o", "wide").stdout.splitlines()
    wide = ["BATCHED", "CHUNK", "KVLIM", "EPOCH", "WANT", "REV", "METRICS", "MODEL", "ENDPOINT"]
    assert head.split()[11:] == wide
    told = ["8000", "1024", "95", "42", "4", "6f9c", "Known", "file:///models/x", "http://seen.default.svc:8000/v1"]
    assert row.split()[11:] == told


def test_get_all_lists_the_service(api_server, seen):
    assert "llmservice.guidevane.dev/seen" in api_server.kubectl("get", "all", "-o", "name").stdout


def test_kubectl_scale_sets_replicas_and_the_selector_is_there_for_an_autoscaler(api_server, seen):
    scaled = api_server.kubectl("scale", "llm/seen", "--replicas=3")
    assert scaled.returncode == 0, scaled.stderr
    scale = api_server.request("GET", f"{PATH}/seen/scale").body
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 2, "selector": "guidevane.dev/name=seen"}


@pytest.mark.parametrize("path", ["llm.spec", "llm.spec.limits", "llm.spec.retune", "llm.spec.envelope.blockSize"])
def test_kubectl_explain_reads_as_in_the_golden(api_server, path):
    explained = api_server.kubectl("explain", path)
    assert explained.returncode == 0, explained.stderr
    golden = GOLDENS / f"{path}.txt"
    if os.environ.get("GUIDEVANE_GOLDENS") == "write":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(explained.stdout)
    assert explained.stdout == golden.read_text()
