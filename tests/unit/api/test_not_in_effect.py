"""Fields whose behaviour comes later are found wherever they are set, and only there."""

import pytest

from guidevane_api.conditions import ConditionType, EventReason, Reason
from guidevane_api.docs import docstrings_of
from guidevane_api.llmservice import not_in_effect

MODEL = {"model": {"uri": "file:///models/x"}}


def paths(spec):
    return [path for path, _ in not_in_effect({**MODEL, **spec})]


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (
            {"autoscaling": {"mode": "Internal", "maxReplicas": 4}},
            ["spec.autoscaling.mode", "spec.autoscaling.maxReplicas"],
        ),
        ({"cache": {"weights": {"size": "10Gi"}}}, ["spec.cache.weights.size"]),
        ({"gateway": {"inferencePool": {"enabled": True}}}, ["spec.gateway.inferencePool.enabled"]),
        ({"gateway": {"httpRoute": {"hostnames": ["a.example"]}}}, ["spec.gateway.httpRoute.hostnames"]),
        ({"rollout": {"canary": {"enabled": True}}}, ["spec.rollout.canary.enabled"]),
        ({"rollout": {"strategy": "Recreate"}}, ["spec.rollout.strategy"]),
        ({"retune": {"verdict": {"worsePercent": 20}}}, ["spec.retune.verdict.worsePercent"]),
        ({"retune": {"knobs": ["maxNumSeqs", "maxNumBatchedTokens"]}}, ["spec.retune.knobs"]),
        (
            {"retune": {"bounds": [{"knob": "kvCacheUtilizationLimitPercent", "min": 1, "max": 2}]}},
            ["spec.retune.bounds[0].knob"],
        ),
        ({"resources": {"claims": [{"name": "a", "resourceClaimTemplateName": "b"}]}}, ["spec.resources.claims"]),
        ({"envelope": {"maxAdapters": 4}}, ["spec.envelope.maxAdapters"]),
        ({"monitoring": {"podMonitor": True}}, ["spec.monitoring.podMonitor"]),
        ({"slo": {"objectivePercent": 99}}, ["spec.slo.objectivePercent"]),
        ({"disruption": {"protectStartup": False}}, ["spec.disruption.protectStartup"]),
        ({"probes": {"liveness": {"stuckSeconds": 60}}}, ["spec.probes.liveness.stuckSeconds"]),
        ({"model": {"uri": "hf://org/name", "revision": "abc"}}, ["spec.model.uri", "spec.model.revision"]),
    ],
)
def test_a_field_that_asks_for_later_behaviour_is_found(spec, found):
    assert paths(spec) == found


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": {"uri": "pvc://claim/x"}},
        {"autoscaling": {"mode": "Off", "minReplicas": 1}},
        {"rollout": {"strategy": "Auto", "canary": {"enabled": False}}},
        {"monitoring": {"podMonitor": False, "scrapeIntervalSeconds": 2}},
        {"retune": {"mode": "Auto", "knobs": ["maxNumSeqs"], "verdict": {"worsePercent": 10}}},
        {"retune": {"bounds": [{"knob": "maxNumSeqs", "min": 1, "max": 2}]}},
        {"tenancy": {"tenants": [{"name": "a", "weight": 3}], "classes": {"interactive": 5}}},
        {"slo": {"admissionRejectRateMaxPercent": 5}},
        {"model": {"uri": "file:///x", "secretRef": {"name": ""}}},
    ],
)
def test_a_field_that_works_or_asks_for_its_default_is_not_found(spec):
    assert paths(spec) == []


def test_the_sentence_says_the_way_out():
    [(path, sentence)] = not_in_effect({"model": {"uri": "s3://bucket/x"}})
    assert path == "spec.model.uri"
    assert sentence == "not in effect yet (downloads); use file:// or pvc://"


@pytest.mark.parametrize("words", [ConditionType, Reason, EventReason])
def test_every_word_of_status_and_events_is_documented(words):
    assert [word.name for word in words if not docstrings_of(words).get(word)] == []
