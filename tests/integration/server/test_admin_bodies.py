"""PATCH /admin/limits with values that no operator sends: refused, and nothing is changed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.server.in_process import TOKEN, House, house


@pytest.fixture
async def plain() -> AsyncIterator[House]:
    async with house() as opened:
        yield opened


async def change(house: House, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with house.admin.patch("/admin/limits", data=json.dumps(body), headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("epoch", [1 << 53, 10**40, 10**400])
async def test_an_epoch_that_nobody_could_go_beyond_is_refused(plain: House, epoch: int) -> None:
    status, body = await change(plain, {"epoch": epoch, "limits": {"maxNumSeqs": 1}})
    assert (status, body["error"]["param"]) == (400, "epoch")
    limits = await plain.limits()
    assert (limits["epoch"], limits["target"]["maxNumSeqs"]) == (0, 2)


@pytest.mark.parametrize("value", [True, "1", 1.0])
async def test_a_limit_of_another_type_is_refused_not_read_as_a_number(plain: House, value: Any) -> None:
    status, body = await change(plain, {"epoch": 1, "limits": {"maxNumSeqs": value}})
    assert (status, body["error"]["param"]) == (400, "limits.maxNumSeqs")
