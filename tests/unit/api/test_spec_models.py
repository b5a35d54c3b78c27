"""The LLMService models: what the wire says and Python says is the same, and nothing unknown slips in."""

import pytest
from pydantic import ValidationError

from guidevane_api.llmservice import LLMService, LLMServiceSpec
from guidevane_api.spec_control import RetuneMode
from guidevane_api.status import LLMServiceStatus, RetuneMove

SMALL = {"model": {"uri": "file:///models/x"}}
FULL = {
    "model": {"uri": "pvc://models/x", "servedName": "x"},
    "engine": {
        "image": "example.org/runtime:1",
        "env": [{"name": "A", "value": "1"}],
        "extraArgs": ["--num-threads=2"],
    },
    "envelope": {"maxNumSeqs": 16, "kvCacheMemory": "512Mi", "dtype": "Float32"},
    "limits": {"maxNumSeqs": 8},
    "slo": {"ttftP95Milliseconds": 900, "itlP99Milliseconds": 80},
    "retune": {
        "mode": "Auto",
        "settleSeconds": {"raise": 75, "cut": 30},
        "maxStepPercent": {"raise": 5},
        "bounds": [{"knob": "maxNumSeqs", "min": 2, "max": 16}],
    },
    "resources": {"gpu": {"perReplica": 1}, "requests": {"cpu": "4", "memory": "16Gi"}},
    "scheduling": {"nodeSelector": {"zone": "a"}, "affinity": {"podAntiAffinity": {}}},
    "monitoring": {"prometheusURL": "http://prometheus:9090"},
}


def test_a_spec_comes_back_from_the_models_as_it_went_in():
    spec = LLMServiceSpec.model_validate(FULL)
    assert spec.model_dump(by_alias=True, exclude_unset=True, mode="json") == FULL


def test_a_spec_with_its_defaults_written_out_means_the_same():
    spec = LLMServiceSpec.model_validate(SMALL)
    written = spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    assert LLMServiceSpec.model_validate(written) == spec


@pytest.mark.parametrize("block", [name for name in FULL if name != "model"])
def test_an_unknown_key_in_a_block_is_refused(block):
    with pytest.raises(ValidationError, match="surprise"):
        LLMServiceSpec.model_validate({**SMALL, block: {"surprise": 1}})


def test_a_model_is_all_that_a_spec_needs_and_the_tuner_only_observes():
    spec = LLMServiceSpec.model_validate(SMALL)
    assert spec.retune.mode is RetuneMode.OBSERVE
    assert (spec.slo.ttft_p95_milliseconds, spec.slo.itl_p95_milliseconds) == (1500, 120)
    assert (spec.slo.queue_wait_p95_milliseconds, spec.slo.kv_cache_utilization_max_percent) == (500, 88)
    assert (spec.replicas, spec.suspend, spec.resources.gpu) == (1, False, None)


def test_a_spec_cannot_be_changed_after_it_was_read():
    spec = LLMServiceSpec.model_validate(SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        spec.replicas = 2


@pytest.mark.parametrize("quantity", ["500m", "4", "0.5", "16Gi", 4])
def test_a_quantity_is_read_as_text(quantity):
    spec = LLMServiceSpec.model_validate({**SMALL, "resources": {"requests": {"cpu": quantity}}})
    assert spec.resources.requests.cpu == str(quantity)


@pytest.mark.parametrize("quantity", ["", "4 Gi", "Gi", "-1", True])
def test_what_is_no_quantity_is_refused(quantity):
    with pytest.raises(ValidationError, match=r"requests\.cpu"):
        LLMServiceSpec.model_validate({**SMALL, "resources": {"requests": {"cpu": quantity}}})


def test_python_keywords_have_their_plain_names_on_the_wire():
    move = RetuneMove(knob="maxNumSeqs", from_=8, to=9, rule="QueueWaitHigh")
    assert move.model_dump(by_alias=True, exclude_none=True) == {
        "knob": "maxNumSeqs",
        "from": 8,
        "to": 9,
        "rule": "QueueWaitHigh",
        "evidence": "",
        "applied": False,
    }


def test_a_status_of_a_newer_operator_can_be_read():
    status = LLMServiceStatus.model_validate({"limits": {"epoch": 3, "shape": "new"}, "mood": "new"})
    assert status.limits is not None
    assert status.limits.epoch == 3


def test_a_whole_object_as_the_api_server_sends_it_can_be_read():
    body = {
        "apiVersion": "guidevane.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat", "generation": 2, "labels": {"a": "b"}},
        "spec": FULL,
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "1/1"}]},
    }
    service = LLMService.model_validate(body)
    assert service.status is not None
    found = service.status.condition("Ready")
    assert found is not None
    assert found.status == "True"
    assert service.status.condition("SLOMet") is None
