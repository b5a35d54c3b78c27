"""Every CEL rule of the CRD on a real API server: one object that passes, one that is refused with the field named."""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from guidevane_api.crd import structural_schema
from guidevane_api.docs import rule_messages
from guidevane_api.limits import Envelope, PartialLimits, SchedulerLimits, limit_violations

PATH = "/apis/guidevane.dev/v1alpha1/namespaces/default/llmservices"


@dataclass(frozen=True)
class Case:
    """One rule. `before` makes it a case of an update."""

    message: str
    """Beginning of the rule's message, enough to tell it from the others."""
    names: str
    """Field that the API server blames."""
    good: dict[str, Any]
    bad: dict[str, Any]
    before: dict[str, Any] | None = field(default=None)


def bounds(knob: str, low: int, high: int) -> dict[str, Any]:
    return {"retune.bounds": [{"knob": knob, "min": low, "max": high}]}


GPU = {"resources.gpu": {"perReplica": 1}}
CLAIMS = {"resources.claims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}

CASES = [
    Case("metadata.name must", "metadata.name", {"name": "a-1"}, {"name": "1.chat"}),
    Case("metadata.name must", "metadata.name", {"name": "a" * 52}, {"name": "a" * 53}),
    Case(
        "spec.limits.maxNumSeqs must", "spec.limits.maxNumSeqs", {"limits.maxNumSeqs": 256}, {"limits.maxNumSeqs": 257}
    ),
    Case(
        "spec.limits.maxNumSeqs must",
        "spec.limits.maxNumSeqs",
        {"limits.maxNumSeqs": 4, "envelope.maxNumSeqs": 4},
        {"limits.maxNumSeqs": 5, "envelope.maxNumSeqs": 4},
    ),
    Case(
        "spec.limits.maxNumBatchedTokens must",
        "spec.limits.maxNumBatchedTokens",
        {"limits.maxNumBatchedTokens": 8192},
        {"limits.maxNumBatchedTokens": 8193},
    ),
    Case(
        "spec.limits.maxModelLen must",
        "spec.limits.maxModelLen",
        {"limits.maxModelLen": 100_000},  # the envelope's 0 means: as the model says
        {"limits.maxModelLen": 2049, "envelope.maxModelLen": 2048},
    ),
    Case(
        "spec.limits.prefillChunkSize must not exceed",
        "spec.limits.prefillChunkSize",
        {"limits.prefillChunkSize": 4096},
        {"limits.prefillChunkSize": 4112},
    ),
    Case(
        "spec.limits.prefillChunkSize must not exceed",
        "spec.limits.prefillChunkSize",
        {"limits.prefillChunkSize": 1024, "envelope.maxNumBatchedTokens": 1024},
        {"limits.prefillChunkSize": 2048, "envelope.maxNumBatchedTokens": 1024},
    ),
    Case(
        "spec.limits.prefillTokenBudget must",
        "spec.limits.prefillTokenBudget",
        {"limits.prefillTokenBudget": 8000, "limits.maxNumBatchedTokens": 8000},
        {"limits.prefillTokenBudget": 8001, "limits.maxNumBatchedTokens": 8000},
    ),
    Case(
        "spec.limits.decodeTokenBudget must",
        "spec.limits.decodeTokenBudget",
        {"limits.decodeTokenBudget": 4096},
        {"limits.decodeTokenBudget": 4097},
    ),
    Case(
        "spec.limits.maxPromptTokens must",
        "spec.limits.maxPromptTokens",
        {"limits.maxPromptTokens": 8192},
        {"limits.maxPromptTokens": 8193},
    ),
    Case(
        "spec.limits.maxOutputTokens must",
        "spec.limits.maxOutputTokens",
        {"limits.maxOutputTokens": 2048, "envelope.maxModelLen": 2048},
        {"limits.maxOutputTokens": 2049, "envelope.maxModelLen": 2048},
    ),
    Case(
        "spec.limits.prefillChunkSize must be a multiple",
        "spec.limits.prefillChunkSize",
        {"limits.prefillChunkSize": 96},
        {"limits.prefillChunkSize": 100},
    ),
    Case(
        "spec.retune.bounds: max must", "spec.retune.bounds", bounds("maxNumSeqs", 1, 256), bounds("maxNumSeqs", 1, 257)
    ),
    Case(
        "spec.retune.bounds: max must",
        "spec.retune.bounds",
        bounds("prefillChunkSize", 16, 8192),
        bounds("prefillChunkSize", 16, 8193),
    ),
    Case(
        "spec.retune.bounds: max must",
        "spec.retune.bounds",
        bounds("kvCacheUtilizationLimitPercent", 50, 100),
        bounds("kvCacheUtilizationLimitPercent", 50, 101),
    ),
    Case(
        "spec.retune.bounds: min must",
        "spec.retune.bounds[0].min",
        bounds("maxNumSeqs", 8, 8),
        bounds("maxNumSeqs", 9, 8),
    ),
    Case(
        "spec.retune.windowSeconds must",
        "spec.retune.windowSeconds",
        {"retune.windowSeconds": 60, "monitoring.scrapeIntervalSeconds": 15},
        {"retune.windowSeconds": 60, "monitoring.scrapeIntervalSeconds": 16},
    ),
    Case(
        "spec.retune.settleSeconds.raise must",
        "spec.retune.settleSeconds.raise",
        {"retune.settleSeconds": {"raise": 75}},
        {"retune.settleSeconds": {"raise": 74}},
    ),
    Case(
        "spec.retune.deadbandPercent: low",
        "spec.retune.deadbandPercent.low",
        {"retune.deadbandPercent": {"low": 100}},
        {"retune.deadbandPercent": {"low": 101}},
    ),
    Case(
        "spec.rollout.strategy DrainFirst",
        "spec.rollout.strategy",
        {"rollout": {"strategy": "DrainFirst", "allowDowntime": True}},
        {"rollout": {"strategy": "DrainFirst"}},
    ),
    Case(
        "spec.rollout.canary needs",
        "spec.rollout.strategy",
        {"rollout": {"strategy": "Surge", "canary": {"enabled": True}}},
        {"rollout": {"strategy": "Recreate", "canary": {"enabled": True}}},
    ),
    Case("spec.model.uri must not be empty", "spec.model.uri", {"model.uri": "hf://org/name"}, {"model.uri": ""}),
    Case("spec.model.uri must not be empty", "spec.model.uri", {"model.uri": "s3://b/m"}, {"model.uri": "ftp://b/m"}),
    Case("spec.model.uri with file://", "spec.model.uri", {"model.uri": "file:///models/x"}, {"model.uri": "file://x"}),
    Case("spec.model.uri with pvc://", "spec.model.uri", {"model.uri": "pvc://claim/x"}, {"model.uri": "pvc:///x"}),
    Case(
        "the scheme of spec.model.uri",
        "spec.model.uri",
        {"model.uri": "file:///models/other"},
        {"model.uri": "pvc://claim/other"},
        before={},
    ),
    Case(
        "spec.limits (live) must not change together",
        "spec.limits",
        {"limits.maxNumSeqs": 9, "envelope.maxNumSeqs": 16},
        {"limits.maxNumSeqs": 9, "envelope.maxNumSeqs": 32},
        before={"limits.maxNumSeqs": 8, "envelope.maxNumSeqs": 16},
    ),
    Case(
        "spec.limits (live) must not change together",
        "spec.limits",
        {"engine.image": "example.org/runtime:2"},
        {"engine.image": "example.org/runtime:2", "limits.maxNumSeqs": 8},
        before={},
    ),
    Case("spec.engine.adminPort must", "spec.engine.adminPort", {"engine.adminPort": 8002}, {"engine.adminPort": 8000}),
    Case(
        "spec.engine.image needs",
        "spec.engine.image",
        {"engine.image": "reg:5000/a:1"},
        {"engine.image": "reg/a:latest"},
    ),
    Case(
        "spec.engine.image needs", "spec.engine.image", {"engine.image": "a@sha256:00"}, {"engine.image": "reg:5000/a"}
    ),
    Case(
        "spec.engine.extraArgs must",
        "spec.engine.extraArgs",
        {"engine.extraArgs": ["--num-threads=4", "--log-format", "json", "--modelling"]},
        {"engine.extraArgs": ["--num-threads=4", "--envelope-max-num-seqs=8"]},
    ),
    Case(
        "spec.engine.extraArgs must",
        "spec.engine.extraArgs",
        {"engine.extraArgs": []},
        {"engine.extraArgs": ["--model"]},
    ),
    *(
        Case("spec.engine.extraArgs must", "spec.engine.extraArgs", {}, {"engine.extraArgs": [flag]})
        for flag in ("--slo-file=x", "--slo-itl-p95-ms=5", "--guard=off", "--tenants-file=x")
    ),
    Case(
        "spec.tenancy.tenants: only one",
        "spec.tenancy.tenants",
        {"tenancy.tenants": [{"name": "a"}, {"name": "b", "keySecretRef": {"name": "keys", "key": "b"}}]},
        {"tenancy.tenants": [{"name": "a"}, {"name": "b"}]},
    ),
    Case(
        "spec.engine.env must not set",
        "spec.engine.env[0].name",
        {"engine.env": [{"name": "MY_GUIDEVANE_", "value": "1"}]},
        {"engine.env": [{"name": "GUIDEVANE_PORT", "value": "1"}]},
    ),
    Case(
        "spec.engine.env takes",
        "spec.engine.env[0].value",
        {"engine.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        {"engine.env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
    ),
    Case(
        "spec.monitoring.prometheusURL must",
        "spec.monitoring.prometheusURL",
        {"monitoring.prometheusURL": "http://prometheus.monitoring.svc:9090"},
        {"monitoring.prometheusURL": "prometheus:9090"},
    ),
    Case(
        "spec.autoscaling.minReplicas must",
        "spec.autoscaling.minReplicas",
        {"autoscaling": {"minReplicas": 2, "maxReplicas": 2}},
        {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
    ),
    Case(
        "spec.autoscaling.minReplicas 0",
        "spec.autoscaling.minReplicas",
        {"autoscaling": {"minReplicas": 0, "scaleToZero": {"enabled": True}}},
        {"autoscaling": {"minReplicas": 0}},
    ),
    Case(
        "spec.autoscaling.target.downUtilizationPercent",
        "spec.autoscaling.target.downUtilizationPercent",
        {"autoscaling": {"target": {"downUtilizationPercent": 65}}},
        {"autoscaling": {"target": {"downUtilizationPercent": 66}}},
    ),
    Case(
        "spec.resources takes gpu or claims",
        "spec.resources.claims",
        {"resources.gpu": {"perReplica": 0}} | CLAIMS,
        GPU | CLAIMS,
    ),
    Case(
        "spec.resources.gpu.resourceName can't",
        "spec.resources.gpu.resourceName",
        {"resources.gpu": {"perReplica": 2}},
        {"resources.gpu": {"resourceName": "nvidia.com/mig-1g.10gb"}},
        before=GPU,
    ),
    Case(
        "spec.cache.weights.type can't",
        "spec.cache.weights.type",
        {"cache": {"weights": {"type": "PVC", "size": "10Gi"}}},
        {"cache": {"weights": {"type": "EmptyDir"}}},
        before={"cache": {"weights": {}}},
    ),
]
IDS = [f"{number}-{case.names}" for number, case in enumerate(CASES)]


def service(changes: dict[str, Any]) -> dict[str, Any]:
    """A service with some fields, given by path, set on top of the least that is valid."""
    spec: dict[str, Any] = {"model": {"uri": "file:///models/x"}}
    for path, value in copy.deepcopy(changes).items():
        if path == "name":
            continue
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    metadata = {"name": changes.get("name", "rule")}
    return {"apiVersion": "guidevane.dev/v1alpha1", "kind": "LLMService", "metadata": metadata, "spec": spec}


@pytest.fixture
def submit(api_server):
    """Offer a case's object to the API server, as an update if the case has a `before`. Nothing stays."""
    created = []

    def offer(case: Case, changes: dict[str, Any]):
        if case.before is None:
            return api_server.request("POST", f"{PATH}?dryRun=All", service(changes))
        if not created:
            answer = api_server.request("POST", PATH, service(case.before))
            assert answer.code == 201, answer.message
            created.append(answer.body["metadata"]["resourceVersion"])
        body = service(changes)
        body["metadata"]["resourceVersion"] = created[0]
        return api_server.request("PUT", f"{PATH}/rule?dryRun=All", body)

    yield offer
    if created:
        api_server.request("DELETE", f"{PATH}/rule")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_api_server_takes_what_keeps_the_rule(submit, case):
    answer = submit(case, case.good)
    assert answer.code in (200, 201), answer.message


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_api_server_refuses_what_breaks_the_rule_and_names_the_field(submit, case):
    answer = submit(case, case.bad)
    assert answer.code == 422, answer.body
    causes = answer.body["details"]["causes"]
    assert [cause["field"] for cause in causes] == [case.names], answer.message
    assert case.message in causes[0]["message"]


def test_every_rule_of_the_crd_has_a_case():
    messages = list(rule_messages(structural_schema()))
    untested = [text for text in messages if not any(text.startswith(case.message) for case in CASES)]
    assert untested == []
    ambiguous = [case.message for case in CASES if sum(text.startswith(case.message) for text in messages) != 1]
    assert ambiguous == []


def random_limits(dice: random.Random) -> tuple[dict[str, int], dict[str, int]]:
    """Some limits and an envelope, often near each other; chunks are multiples of a block."""
    envelope = {"maxNumSeqs": dice.choice([4, 8]), "maxNumBatchedTokens": dice.choice([1024, 4096, 8192])}
    envelope["maxModelLen"] = dice.choice([0, 1024, 16384])
    sizes = [512, 1024, 2048, 4096, 8192, 16384]
    fields = dict.fromkeys(("maxNumBatchedTokens", "prefillTokenBudget", "decodeTokenBudget"), sizes)
    fields |= dict.fromkeys(("prefillChunkSize", "maxModelLen", "maxPromptTokens", "maxOutputTokens"), sizes)
    fields["maxNumSeqs"] = [2, 4, 8, 16]
    chosen = dice.sample(sorted(fields), dice.randint(0, 3))
    return {name: dice.choice(fields[name]) for name in chosen}, envelope


@pytest.mark.parametrize("seed", range(60))
def test_the_api_server_and_the_models_agree_on_which_limits_fit(api_server, seed):
    limits, envelope = random_limits(random.Random(seed))
    answer = api_server.request("POST", f"{PATH}?dryRun=All", service({"limits": limits, "envelope": envelope}))
    ceiling = Envelope.model_validate(envelope)
    resolved = SchedulerLimits.resolve(PartialLimits.model_validate(limits), ceiling)
    blamed = {cause["field"].rsplit(".", 1)[1] for cause in answer.body.get("details", {}).get("causes", ())}
    # A limit above its envelope counts as the envelope in the rules on what it bounds: one fault, one message.
    violations = set(limit_violations(resolved, ceiling))
    assert bool(blamed) == bool(violations)
    assert blamed >= violations & {"maxNumSeqs", "maxNumBatchedTokens", "maxModelLen"}
