"""A spec is taken over as a whole, or refused with the field and the way out."""

from typing import Any

import pytest

from guidevane_api.conditions import Reason
from guidevane_operator.acceptance import Accepted, Refused, accept

MODEL = {"uri": "file:///models/tiny"}


def test_a_minimal_spec_is_accepted() -> None:
    assert isinstance(accept({"model": MODEL}), Accepted)


@pytest.mark.parametrize(
    "blocks",
    [
        {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1024Mi"}}},
        {"envelope": {"kvCacheMemory": "40Gi"}, "resources": {"gpu": {}, "limits": {"memory": "16Gi"}}},
        {"envelope": {"kvCacheMemory": "4Gi"}},
    ],
    ids=["equal", "cache on the GPU", "no limit"],
)
def test_resources_that_fit_are_accepted(blocks: dict[str, Any]) -> None:
    assert isinstance(accept({"model": MODEL} | blocks), Accepted)


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        ({}, Reason.INVALID_SPEC, "spec.model"),
        ({"model": MODEL, "nonsense": 1}, Reason.INVALID_SPEC, "spec.nonsense"),
        ({"model": {"uri": "hf://org/model"}}, Reason.FIELD_NOT_IN_EFFECT, "spec.model.uri"),
        ({"model": MODEL, "rollout": {"strategy": "Surge"}}, Reason.FIELD_NOT_IN_EFFECT, "spec.rollout.strategy"),
        ({"model": MODEL, "limits": {"maxNumSeqs": 500}}, Reason.INVALID_SPEC, "maxNumSeqs"),
        ({"model": MODEL, "limits": {"prefillChunkSize": 8000}}, Reason.INVALID_SPEC, "prefillChunkSize"),
        (
            {"model": MODEL, "tenancy": {"tenants": [{"name": "a"}, {"name": "b"}]}},
            Reason.INVALID_SPEC,
            "spec.tenancy.tenants: a and b have no keySecretRef; only one may",
        ),
        (
            {"model": MODEL, "resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "1Gi"}}},
            Reason.INVALID_SPEC,
            "spec.resources.requests.memory is 8Gi, above spec.resources.limits.memory 1Gi",
        ),
        (
            {"model": MODEL, "resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "1"}}},
            Reason.INVALID_SPEC,
            "spec.resources.requests.cpu is 1500m, above spec.resources.limits.cpu 1",
        ),
        (
            {"model": MODEL, "envelope": {"kvCacheMemory": "4Gi"}, "resources": {"limits": {"memory": "4096Mi"}}},
            Reason.INVALID_SPEC,
            "spec.envelope.kvCacheMemory is 4Gi, not below spec.resources.limits.memory 4096Mi",
        ),
    ],
)
def test_a_refusal_names_the_field(spec: dict[str, Any], reason: Reason, field: str) -> None:
    verdict = accept(spec)
    assert isinstance(verdict, Refused)
    assert verdict.reason is reason
    assert field in verdict.message
    assert "stay as they are" in verdict.message
