"""Story: kubectl apply of an LLMService, and an answer streams through its Service."""

import json

import aiohttp

from e2e import support

SERVICE = "smollm2"


async def test_applied_service_becomes_ready_and_streams_a_chat_answer(namespace: str) -> None:
    support.apply(support.sample("smollm2-cpu"), namespace)
    support.wait_ready(SERVICE, namespace)

    seen = await support.chat(support.service_url(SERVICE, namespace), "Say hello.", max_tokens=16)

    assert seen.whole, seen
    assert seen.text


async def test_unstreamed_answer_and_model_list_come_through_the_service(namespace: str) -> None:
    url = support.service_url(SERVICE, namespace)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as answer:
            models = await answer.json()
        body = {"model": SERVICE, "prompt": "One two three", "max_tokens": 4, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            completion = await answer.json()

    assert [model["id"] for model in models["data"]] == [SERVICE]
    assert completion["usage"]["completion_tokens"] == 4


def test_kubectl_get_llm_answers_in_one_line(namespace: str) -> None:
    header, row = support.kubectl("get", "llm", "-n", namespace).splitlines()

    assert header.split()[:4] == ["NAME", "READY", "REASON", "SEQS"]
    assert row.split()[:2] == [SERVICE, "1/1"]
    wide = support.kubectl("get", "llm", "-n", namespace, "-o", "wide").splitlines()[0]
    assert {"EPOCH", "METRICS", "MODEL", "ENDPOINT"} <= set(wide.split())


def test_children_belong_to_the_service_and_go_with_it(namespace: str) -> None:
    owned = json.loads(support.kubectl("get", "deploy,svc,cm,secret,sa", "-n", namespace, "-o", "json"))["items"]
    owners = {ref["name"] for item in owned for ref in item["metadata"].get("ownerReferences", [])}
    assert owners == {SERVICE}
    assert not support.get("llm", SERVICE, namespace)["metadata"].get("finalizers")

    support.kubectl("delete", "llm", SERVICE, "-n", namespace)

    support.wait_for(
        "children collected",
        lambda: not json.loads(support.kubectl("get", "deploy", "-n", namespace, "-o", "json"))["items"],
    )
