"""A spec is taken over as a whole, or refused with the field and the way out."""

from typing import Any

import pytest

from guidevane_api.conditions import Reason
from guidevane_operator.acceptance import Accepted, Refused, accept

MODEL = {"uri": "file:///models/tiny"}


def test_a_minimal_spec_is_accepted() -> None:
    assert isinstance(accept({"model": MODEL}), Accepted)


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
    ],
)
def test_a_refusal_names_the_field(spec: dict[str, Any], reason: Reason, field: str) -> None:
    verdict = accept(spec)
    assert isinstance(verdict, Refused)
    assert verdict.reason is reason
    assert field in verdict.message
    assert "stay as they are" in verdict.message
