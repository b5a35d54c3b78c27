"""The admin port: fenced, leased, atomic, behind a token."""

import asyncio
import itertools
from typing import Any

import pytest

epochs = itertools.count(10)


@pytest.fixture
async def restored(client: Any) -> Any:
    """The shared runtime, whose start-up limits are put back afterwards."""
    _, before = await client.admin("GET")
    yield client
    await client.admin("PATCH", {"epoch": next(epochs), "limits": before["startup"]})


@pytest.mark.parametrize("token", ["", "wrong", "a-token-for-test"])
async def test_nobody_comes_in_without_the_token(client: Any, token: str) -> None:
    for method in ("GET", "PATCH"):
        status, body = await client.admin(method, {} if method == "PATCH" else None, token=token)
        assert (status, body["error"]["code"]) == (401, "not_authenticated")


async def test_limits_are_not_on_the_serving_port(client: Any) -> None:
    assert (await client.get("/admin/limits"))[0] == 404


async def test_a_patch_is_answered_when_the_engine_obeys_it(restored: Any) -> None:
    epoch = next(epochs)
    status, view = await restored.admin("PATCH", {"epoch": epoch, "limits": {"maxNumSeqs": 3}, "source": "Retune"})
    assert (status, view["target"]["maxNumSeqs"], view["effective"]["maxNumSeqs"]) == (200, 3, 3)
    assert (view["epoch"], view["source"]) == (epoch, "Retune")
    # The lease runs while the engine takes the limits over.
    assert 540 < view["leaseRemainingSeconds"] <= 600
    metrics = await restored.metrics()
    assert metrics["guidevane_limit{kind=effective,name=maxNumSeqs}"] == 3
    assert metrics["guidevane_limits_epoch"] == epoch


async def test_a_patch_whose_sender_did_not_wait_is_known_and_may_be_sent_again(restored: Any) -> None:
    body = {"epoch": next(epochs), "limits": {"maxNumSeqs": 5}}
    with restored.runtime.engine_held():
        first = asyncio.create_task(restored.admin("PATCH", body))
        await restored.wait_for_metric("guidevane_limits_epoch", body["epoch"])
        first.cancel()
        again = asyncio.create_task(restored.admin("PATCH", body))
        done, _ = await asyncio.wait((first, again), timeout=0.3)
        assert done == {first} and first.cancelled(), "answered before the engine obeyed"
    status, view = await again
    assert (status, view["effective"]["maxNumSeqs"]) == (200, 5)


async def test_running_requests_finish_while_the_limit_shrinks(restored: Any) -> None:
    body = {"prompt": "a", "max_tokens": 700, "ignore_eos": True, "temperature": 0}
    tasks = [asyncio.create_task(restored.post("/v1/completions", body)) for _ in range(6)]
    await restored.wait_for_metric("vllm:num_requests_running", 6)
    _, view = await restored.admin("PATCH", {"epoch": next(epochs), "limits": {"maxNumSeqs": 2}})
    assert (view["target"]["maxNumSeqs"], view["effective"]["maxNumSeqs"], view["numRunning"]) == (2, 6, 6)
    answers = await asyncio.gather(*tasks)
    assert {status for status, _, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer, _ in answers}) == 1
    await restored.wait_for_metric("guidevane_limit{kind=effective,name=maxNumSeqs}", 2)


async def test_epochs_fence(restored: Any) -> None:
    epoch = next(epochs)
    body = {"epoch": epoch, "limits": {"maxNumSeqs": 4}}
    assert (await restored.admin("PATCH", body))[0] == 200
    status, view = await restored.admin("PATCH", {**body, "leaseSeconds": 900})
    assert status == 200 and 840 < view["leaseRemainingSeconds"] <= 900
    assert (await restored.admin("PATCH", {"epoch": epoch, "limits": {"maxNumSeqs": 5}}))[0] == 409
    assert (await restored.admin("PATCH", {"epoch": epoch - 1, "limits": {"maxNumSeqs": 5}}))[0] == 409
    assert (await restored.admin("GET"))[1]["target"]["maxNumSeqs"] == 4


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"maxNumSeqs": 100_000}, "limits.maxNumSeqs"),
        ({"maxNumSeqs": 300}, "maxNumSeqs"),
        ({"maxNumSeqs": 0}, "limits.maxNumSeqs"),
        ({"prefillChunkSize": 5000}, "prefillChunkSize"),
        ({"maxModelLen": 20000}, "maxModelLen"),
        ({"maxNumSeq": 3}, "limits.maxNumSeq"),
        ({"maxNumSeqs": "many"}, "limits.maxNumSeqs"),
    ],
)
async def test_a_patch_that_cannot_be_obeyed_changes_nothing_and_names_the_field(
    client: Any, limits: dict[str, Any], field: str
) -> None:
    _, before = await client.admin("GET")
    status, body = await client.admin("PATCH", {"epoch": 10_000, "limits": {"maxQueuedRequests": 7, **limits}})
    assert status == 400 and field in body["error"]["errors"]
    _, after = await client.admin("GET")
    assert (after["target"], after["epoch"]) == (before["target"], before["epoch"])


@pytest.mark.parametrize("body", [None, [], {"epoch": 1}, {"limits": {}}, {"epoch": 0, "limits": {}}])
async def test_a_malformed_patch_is_400(client: Any, body: Any) -> None:
    status, answer = await client.admin("PATCH", body)
    assert status == 400 and answer["error"]["errors"]


async def test_a_lease_that_is_not_renewed_ends_at_the_startup_limits(restored: Any) -> None:
    before = await restored.metrics()
    body = {"epoch": next(epochs), "limits": {"maxNumSeqs": 3}, "leaseSeconds": 1}
    _, view = await restored.admin("PATCH", body)
    name = "guidevane_limits_changes_total{source=LeaseExpired}"
    await restored.wait_for_metric(name, before[name] + 1)
    _, after = await restored.admin("GET")
    assert (after["source"], after["target"], after["leaseRemainingSeconds"]) == ("LeaseExpired", view["startup"], None)
    # Who comes back with the same epoch after a pause is heard.
    status, again = await restored.admin("PATCH", body)
    assert (status, again["target"]["maxNumSeqs"]) == (200, 3)
