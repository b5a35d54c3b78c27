"""Class, priority and deadline, from headers and body."""

from typing import Any, cast

import pytest

from guidevane_runtime.core.leases import Standing
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.errors import InvalidRequest
from guidevane_runtime.server.jobs import Job, read_completion
from guidevane_runtime.server.schemas import CompletionRequest
from guidevane_runtime.server.standing import Wishes


class Anything:
    """Services that serve every model."""

    vocab_size = 100

    def check_model(self, name: str | None) -> None:
        pass


def job(**body: Any) -> Job:
    return read_completion(CompletionRequest(prompt="a", **body), cast(Any, Anything()))


def standing(headers: dict[str, str], **body: Any) -> Standing:
    return Wishes.of(headers).standing("a", job(**body), arrival_s=50.0)


def test_without_a_word_a_request_is_interactive_and_has_no_deadline() -> None:
    assert standing({}) == Standing(50.0, "a", RequestClass.INTERACTIVE, 0, None)


@pytest.mark.parametrize(
    ("header", "tier", "expected"),
    [
        (None, None, RequestClass.INTERACTIVE),
        (None, "auto", RequestClass.INTERACTIVE),
        (None, "default", RequestClass.INTERACTIVE),
        (None, "flex", RequestClass.OFFLINE),
        ("offline", None, RequestClass.OFFLINE),
        ("offline", "default", RequestClass.OFFLINE),
        ("interactive", "flex", RequestClass.INTERACTIVE),
        (" Offline ", None, RequestClass.OFFLINE),
    ],
)
def test_the_header_goes_before_the_service_tier(header: str | None, tier: str | None, expected: RequestClass) -> None:
    headers = {} if header is None else {"X-Request-Class": header}
    assert standing(headers, service_tier=tier).request_class is expected


def test_the_priority_header_goes_before_the_body() -> None:
    assert standing({}, priority=3).priority == 3
    assert standing({"X-Priority": "-7"}, priority=3).priority == -7
    assert standing({"X-Priority": "0"}, priority=3).priority == 0


@pytest.mark.parametrize(("given", "deadline_s"), [("1", 50.001), ("2500", 52.5), ("86400000", 86450.0)])
def test_the_deadline_counts_from_the_arrival(given: str, deadline_s: float) -> None:
    assert standing({"X-Deadline-Ms": given}).deadline_s == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("X-Deadline-Ms", given) for given in ("0", "-1", "86400001", "1.5", "1e3", "", "soon", "٣", "9" * 5000)),
        *(("X-Priority", given) for given in ("high", "2147483648", "-2147483649", "1.0")),
        *(("X-Request-Class", given) for given in ("batch", "", "interactive,offline")),
    ],
)
def test_a_header_that_says_nothing_known_is_400_and_named(name: str, given: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        standing({name: given})
    assert raised.value.param == name and len(raised.value.message) < 200


@pytest.mark.parametrize("tier", ["priority", "scale", "", "FLEX"])
def test_a_tier_that_is_not_offered_is_400(tier: str) -> None:
    with pytest.raises(InvalidRequest, match="must be auto, default or flex") as raised:
        job(service_tier=tier)
    assert raised.value.param == "service_tier"


@pytest.mark.parametrize(
    ("salt", "is_good"), [(None, True), ("s", True), ("s" * 256, True), ("", False), ("s" * 257, False)]
)
def test_a_cache_salt_has_one_to_256_characters(salt: str | None, is_good: bool) -> None:
    if is_good:
        assert job(cache_salt=salt).cache_salt == (salt or "")
    else:
        with pytest.raises(InvalidRequest, match="cache_salt has"):
            job(cache_salt=salt)
