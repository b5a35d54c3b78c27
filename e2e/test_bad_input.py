"""Story: bad input is refused with the field's name, or told in a condition; nothing storms."""

import time

import pytest

from e2e import support


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"limits": {"maxNumSeqs": 64}, "envelope": {"maxNumSeqs": 16}}, "maxNumSeqs"),
        ({"model": {"uri": ""}}, "spec.model.uri"),
        ({"limits": {"maxNumSeq": 4}}, "maxNumSeq"),
    ],
    ids=["limit above envelope", "empty model URI", "unknown field"],
)
def test_bad_service_is_refused_by_the_api_server_naming_the_field(
    namespace: str, spec: dict[str, support.Manifest], named: str
) -> None:
    with pytest.raises(support.KubectlError, match=named):
        support.apply(support.sample("smollm2-cpu", **spec), namespace)


def test_model_path_that_does_not_exist_is_told_in_a_condition_without_a_restart_storm(namespace: str) -> None:
    support.apply(support.sample("smollm2-cpu", model={"uri": "file:///models/absent.gguf"}), namespace)

    told = support.wait_for(
        "a condition that names the path",
        lambda: (
            (c := support.condition(support.get("llm", "smollm2", namespace), "Ready")).get("reason") == "ModelNotFound"
            and c
        ),
        timeout_s=120,
    )

    assert "/models/absent.gguf" in told["message"]
    (before,) = support.pods_of("smollm2", namespace)
    time.sleep(60)
    (after,) = support.pods_of("smollm2", namespace)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert support.restarts(after) - support.restarts(before) <= 3, "kubelet's back-off damps the restarts"


def test_field_not_in_effect_yet_is_refused_with_a_condition_that_names_it(namespace: str) -> None:
    manifest = support.sample("smollm2-cpu", autoscaling={"mode": "Internal", "maxReplicas": 3})
    manifest["metadata"]["name"] = "early"
    support.apply(manifest, namespace)

    refused = support.wait_for("SpecAccepted False", support.has_condition("early", namespace, "SpecAccepted", "False"))

    assert "spec.autoscaling" in support.condition(refused, "SpecAccepted")["message"]
    assert support.pods_of("early", namespace) == []
