"""The kopf side: where handlers run, and what is watched for how long."""

import inspect
import itertools
from typing import Any

import kopf

from guidevane_operator.handlers import BACKOFFS_S, build_registry, configure, probe


async def never() -> Any:
    raise AssertionError("nothing is started here")


def test_every_handler_runs_in_the_event_loop_never_in_a_thread() -> None:
    registry = build_registry(never)
    handlers = [*registry._activities.get_all_handlers(), *registry._watching.get_all_handlers()]
    assert len(handlers) >= 11
    assert [handler.id for handler in handlers if not inspect.iscoroutinefunction(handler.fn)] == []


def test_an_outage_of_any_length_does_not_end_the_operator() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    backoffs = settings.networking.error_backoffs
    assert not isinstance(backoffs, float)
    for _ in range(2):  # kopf takes a new series for each request
        first = list(itertools.islice(backoffs, 100))
        assert first[: len(BACKOFFS_S)] == list(BACKOFFS_S)
        assert set(first[len(BACKOFFS_S) :]) == {BACKOFFS_S[-1]}


def test_pods_and_children_of_services_are_watched_and_no_secret_is() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    assert set(settings.watching.label_selectors.values()) == {"guidevane.dev/name"}
    watched = {handler.selector.any_name for handler in build_registry(never)._watching.get_all_handlers()}
    assert watched - {"llmservices", None} == {
        "pods",
        "configmaps",
        "deployments",
        "poddisruptionbudgets",
        "serviceaccounts",
        "services",
    }
    assert len(settings.watching.label_selectors) == 6


def test_an_operator_that_waits_for_its_crd_is_not_restarted() -> None:
    assert "waiting" in probe([])
