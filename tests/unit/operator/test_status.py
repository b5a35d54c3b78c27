"""Status: which condition says what, and when it is worth a write."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_api.conditions import ConditionStatus, ConditionType, Reason
from guidevane_api.llmservice import LLMServiceSpec
from guidevane_api.spec_traffic import TenancySpec
from guidevane_api.status import LLMServiceStatus, MetricsState
from guidevane_operator.admin_client import Refused, Unreachable
from guidevane_operator.facts import PodFacts, Termination, read_pod
from guidevane_operator.kube import ServiceKey
from guidevane_operator.limits_plan import next_desired
from guidevane_operator.signals import Invalid, Known, Signals
from guidevane_operator.status import StatusFacts, build_status, is_urgent, merge_patch
from guidevane_operator.status.write import to_json
from guidevane_operator.tenants import plan_tenants
from tests.json_merge import merged

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SPEC = LLMServiceSpec.model_validate({"model": {"uri": "file:///models/tiny"}, "replicas": 2})
NEW, OLD = "new", "old"


def pod(name: str = "a", ready: bool = True, revision: str = NEW, **changes: Any) -> PodFacts:
    base = PodFacts(name, f"uid-{name}", "10.0.0.1", revision, ready, False, 0, True)
    return dataclasses.replace(base, **changes)


def facts(*pods: PodFacts, **changes: Any) -> StatusFacts:
    base = StatusFacts(
        key=ServiceKey("demo", "chat"),
        generation=7,
        now=NOW,
        previous=LLMServiceStatus(),
        spec=SPEC,
        wanted_replicas=2,
        revision=NEW,
        pods=pods,
        desired=next_desired(SPEC.limits, SPEC.envelope, None),
        in_sync=frozenset(pod.name for pod in pods),
    )
    return dataclasses.replace(base, **changes)


def condition(found: StatusFacts, kind: ConditionType) -> tuple[ConditionStatus, str, str]:
    got = build_status(found).condition(kind)
    assert got is not None
    return got.status, got.reason, got.message


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (facts(pod("a"), pod("b")), Reason.READY),
        (facts(pod("a")), Reason.SCALING_UP),
        (facts(pod("a", revision=OLD), pod("b", ready=False)), Reason.ROLLOUT_IN_PROGRESS),
        (facts(pod("a", revision=OLD), pod("b", revision=OLD)), Reason.ROLLOUT_IN_PROGRESS),
        (facts(pod("a", ready=False)), Reason.LOADING),
        (facts(pod("a", ready=False, started=False)), Reason.PENDING),
        (facts(), Reason.PENDING),
        (facts(wanted_replicas=0), Reason.SUSPENDED),
        (facts(pod("a"), deleting=True), Reason.TERMINATING),
        (facts(child_error="422 Invalid: no"), Reason.CHILD_REFUSED),
        (facts(pod("a", ready=False, started=False, waiting_reason="ErrImagePull")), Reason.IMAGE_PULL_FAILED),
        (facts(pod("a", ready=False, restarts=5, termination=Termination(1, "Error", "boom"))), Reason.CRASH_LOOP),
        (facts(pod("a", ready=False, termination=Termination(3, "Error", "no such path"))), Reason.MODEL_NOT_FOUND),
        (facts(pod("a", ready=False, started=False, unschedulable="0/3 nodes")), Reason.PENDING),
        (facts(refused="spec.cache: later", refused_reason=Reason.FIELD_NOT_IN_EFFECT), Reason.FIELD_NOT_IN_EFFECT),
    ],
)
def test_ready_says_the_most_telling_reason(found: StatusFacts, reason: Reason) -> None:
    status, got, _ = condition(found, ConditionType.READY)
    assert got == reason
    assert (status is ConditionStatus.TRUE) is (reason is Reason.READY)
    assert build_status(found).reason == reason


def test_old_ready_pods_do_not_make_a_broken_revision_ready() -> None:
    broken = facts(pod("a", revision=OLD), pod("b", revision=OLD), pod("c", ready=False))
    status = build_status(broken)
    assert (status.ready_summary, status.ready_replicas) == ("0/2", 2)
    assert condition(broken, ConditionType.AVAILABLE)[0] is ConditionStatus.TRUE
    assert condition(broken, ConditionType.READY)[0] is ConditionStatus.FALSE


def test_a_terminating_pod_counts_nowhere() -> None:
    status = build_status(facts(pod("a"), pod("b", terminating=True)))
    assert (status.replicas, status.ready_replicas, status.ready_summary) == (1, 1, "1/2")


def test_the_transition_time_moves_only_with_the_status() -> None:
    first = build_status(facts(pod("a")))
    later = facts(pod("a"), pod("b"), previous=first, now=NOW + timedelta(minutes=5))
    second = build_status(later)
    third = build_status(dataclasses.replace(later, previous=second, now=NOW + timedelta(minutes=9)))
    times = [s.condition(ConditionType.READY).last_transition_time for s in (first, second, third)]  # type: ignore[union-attr]
    assert times == ["2026-01-01T12:00:00Z", "2026-01-01T12:05:00Z", "2026-01-01T12:05:00Z"]


def test_a_refusal_of_limits_carries_the_pods_words() -> None:
    refused = Refused(400, "bad", {"maxNumSeqs": "maxNumSeqs is 99, above 64"})
    found = facts(pod("a"), pod("b"), in_sync=frozenset({"b"}), answers={"a": refused})
    assert condition(found, ConditionType.LIMITS_IN_SYNC) == (
        ConditionStatus.FALSE,
        "PatchFailed",
        "pod a refused the limits: maxNumSeqs is 99, above 64",
    )
    silent = dataclasses.replace(found, answers={"a": Unreachable("TimeoutError at 10.0.0.1:8001")})
    assert condition(silent, ConditionType.LIMITS_IN_SYNC)[1] == "AdminUnreachable"


def seen(**values: float) -> Signals:
    return Signals(state=MetricsState.KNOWN, **{name: Known(value, 1.0, 100) for name, value in values.items()})


def test_the_slo_counts_as_missed_when_that_is_settled_and_unknown_without_traffic() -> None:
    late = seen(ttft_p95_ms=3000, itl_p95_ms=50)
    base = facts(pod("a"), signals=late, metrics_state=MetricsState.KNOWN)
    settled = dataclasses.replace(base, slo_missed=True)
    assert condition(base, ConditionType.SLO_MET)[0] is ConditionStatus.TRUE
    assert condition(settled, ConditionType.SLO_MET)[:2] == (ConditionStatus.FALSE, "TTFTHigh")
    quiet = dataclasses.replace(base, signals=seen())
    assert condition(quiet, ConditionType.SLO_MET)[:2] == (ConditionStatus.UNKNOWN, "NoTraffic")


def test_an_invalid_sample_is_said() -> None:
    nan = dataclasses.replace(seen(ttft_p95_ms=100), kv_percent=Invalid("kv_percent is nan"))
    found = facts(pod("a"), signals=nan, metrics_state=MetricsState.KNOWN)
    assert condition(found, ConditionType.METRICS_FRESH) == (ConditionStatus.FALSE, "NaNSample", "kv_percent is nan")
    assert json.dumps(to_json(build_status(found)), allow_nan=False)


def ready_before(*pods: PodFacts, **changes: Any) -> StatusFacts:
    """Two pods were ready; now these are there."""
    previous = build_status(facts(pod("a"), pod("b")))
    return facts(*pods, previous=previous, **changes)


def test_ready_outlasts_a_short_shortage_while_some_pods_serve() -> None:
    blip = ready_before(pod("a"), pod("b", ready=False), unready_s=29)
    assert condition(blip, ConditionType.READY)[0] is ConditionStatus.TRUE
    assert condition(dataclasses.replace(blip, unready_s=30), ConditionType.READY)[:2] == (
        ConditionStatus.FALSE,
        "ScalingUp",
    )
    assert build_status(blip).ready_summary == "1/2"


@pytest.mark.parametrize(
    "found",
    [
        ready_before(pod("a", ready=False), pod("b", ready=False)),
        ready_before(pod("a"), generation=8),
        ready_before(pod("a"), pod("b", revision=OLD), revision=NEW + "er"),
        ready_before(pod("a"), deleting=True),
        facts(pod("a")),
    ],
    ids=["no pod serves", "another spec", "another revision", "deleted", "never ready"],
)
def test_nothing_else_is_taken_for_a_short_shortage(found: StatusFacts) -> None:
    assert condition(found, ConditionType.READY)[0] is ConditionStatus.FALSE


def test_a_refused_spec_does_not_count_as_tuning_whatever_ran_before() -> None:
    found = facts(pod("a"), refused="no", refused_reason=Reason.INVALID_SPEC, metrics_state=MetricsState.KNOWN)
    assert condition(found, ConditionType.RETUNE_ACTIVE)[:2] == (ConditionStatus.FALSE, "InvalidSpec")


def test_a_refused_child_is_said_while_all_pods_are_ready() -> None:
    found = facts(pod("a"), pod("b"), child_error="403 Forbidden: exceeded quota")
    assert condition(found, ConditionType.READY)[0] is ConditionStatus.TRUE
    assert condition(found, ConditionType.PROGRESSING)[1:] == ("ChildRefused", "403 Forbidden: exceeded quota")


def test_a_paused_service_is_not_said_to_be_on_its_way() -> None:
    found = facts(pod("a"), paused=True, in_sync=frozenset())
    assert condition(found, ConditionType.PROGRESSING)[:2] == (ConditionStatus.FALSE, "Paused")
    assert condition(found, ConditionType.LIMITS_IN_SYNC)[:2] == (ConditionStatus.UNKNOWN, "Paused")


def test_a_rollout_has_a_step_from_its_start_to_its_end() -> None:
    before = build_status(facts(pod("a", revision=OLD), pod("b", revision=OLD), revision=OLD))
    assert before.rollout is not None
    assert (before.rollout.stable_revision, before.rollout.step) == (OLD, None)
    half = build_status(facts(pod("a"), pod("b", revision=OLD), previous=before))
    assert half.rollout is not None
    assert (half.rollout.stable_revision, half.rollout.step) == (OLD, "1/2")
    done = build_status(facts(pod("a"), pod("b"), previous=half))
    assert done.rollout is not None
    assert (done.rollout.stable_revision, done.rollout.step) == (NEW, None)


def test_scaling_is_no_rollout() -> None:
    before = build_status(facts(pod("a"), pod("b")))
    more = build_status(facts(pod("a"), pod("b"), wanted_replicas=3, previous=before))
    assert more.rollout is not None
    assert more.rollout.step is None


def test_a_pod_that_misses_scrapes_now_and_then_costs_no_write_each_time() -> None:
    def status(fresh: int) -> dict[str, Any]:
        signals = Signals(state=MetricsState.KNOWN, fresh_pods=fresh)
        return to_json(build_status(facts(pod("a"), signals=signals, metrics_state=MetricsState.KNOWN)))

    assert not is_urgent(status(1), status(0))


def test_numbers_are_rounded_and_alone_are_not_urgent() -> None:
    def status(ttft: float) -> dict[str, Any]:
        found = facts(pod("a"), signals=seen(ttft_p95_ms=ttft), metrics_state=MetricsState.KNOWN)
        return to_json(build_status(found))

    assert status(843.2)["slo"]["ttftP95Milliseconds"] == 840
    assert merge_patch(status(841), status(838)) == {}
    assert merge_patch(status(841), status(960)) != {}
    assert not is_urgent(status(841), status(960))


def test_the_guard_is_shown_while_it_is_known_and_its_first_step_is_urgent() -> None:
    def status(level: float | None) -> dict[str, Any]:
        signals = seen() if level is None else dataclasses.replace(seen(guard_level=level), guard_lines=("a", "b"))
        return to_json(build_status(facts(pod("a"), signals=signals, metrics_state=MetricsState.KNOWN)))

    assert status(2)["guard"] == {"level": 2, "lines": ["a", "b"]}
    assert "guard" not in status(None)
    assert is_urgent(status(0), status(1)) and is_urgent(status(2), status(0))
    assert not is_urgent(status(1), status(2))


def test_a_locked_out_tenant_is_a_condition_and_no_keys_are_none() -> None:
    kind = ConditionType.TENANT_KEYS_FOUND
    tenancy = TenancySpec.model_validate({"tenants": [{"name": "gold", "keySecretRef": {"name": "keys", "key": "k"}}]})
    locked = facts(pod("a"), tenants=plan_tenants(tenancy, {}))
    assert condition(locked, kind) == (
        ConditionStatus.FALSE,
        "KeyMissing",
        "tenant gold: Secret keys does not exist; create it with a key in k. Until then it is refused.",
    )
    assert condition(facts(pod("a"), tenants=plan_tenants(None, {})), kind)[:2] == (ConditionStatus.TRUE, "KeysFound")
    assert condition(facts(pod("a")), kind)[:2] == (ConditionStatus.UNKNOWN, "KeysNotRead")


def test_a_transition_is_urgent() -> None:
    before, after = to_json(build_status(facts(pod("a")))), to_json(build_status(facts(pod("a"), pod("b"))))
    assert is_urgent(before, after)


documents = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
)
objects = st.dictionaries(st.sampled_from("abcd"), documents, max_size=4)


@given(objects, objects)
def test_the_patch_turns_the_old_status_into_the_new_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, merge_patch(old, new)) == new
    assert merge_patch(new, new) == {}


def test_a_pod_object_is_read_with_its_last_termination() -> None:
    body = {
        "metadata": {"name": "a", "uid": "u", "labels": {"guidevane.dev/revision": "r1"}},
        "spec": {"containers": [{"name": "runtime", "ports": [{"name": "admin", "containerPort": 8001}]}]},
        "status": {
            "phase": "Running",
            "podIP": "10.1.2.3",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [
                {"name": "sidecar", "restartCount": 9},
                {
                    "name": "runtime",
                    "restartCount": 3,
                    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                    "lastState": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no model \n"}},
                },
            ],
        },
    }
    got = read_pod(body)
    assert (got.revision, got.restarts, got.waiting_reason) == ("r1", 3, "CrashLoopBackOff")
    assert got.termination == Termination(3, "Error", "no model")
    assert got.admin_port == 8001
    assert not got.can_be_patched
