"""New terms for tenants on their way through the mail into the scheduler."""

import logging
from typing import Any

import pytest

from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.block_pool import BlockPool
from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import SamplingParams, SetTenants, Submit
from guidevane_runtime.core.scheduler import Scheduler
from guidevane_runtime.core.tenants import TenantPolicy, TenantTerms
from guidevane_runtime.engine.loop import EngineLoop
from guidevane_runtime.engine.mailbox import FrameBuffer, encode

COMMAND = SetTenants(TenantPolicy((TenantTerms("acme", weight=3, max_in_flight=1),)), epoch=1)


class OneMail:
    def __init__(self, commands: list[Any]) -> None:
        self.commands = commands

    def take(self, timeout_s: float) -> list[Any]:
        taken, self.commands = self.commands, []
        return taken

    def put(self, message: object) -> None:
        pass


def test_terms_come_through_the_mailbox_as_they_were_sent() -> None:
    frames = FrameBuffer()
    frames.feed(encode(COMMAND))
    assert list(frames.messages()) == [COMMAND]


def test_the_engine_obeys_new_terms_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scheduler = Scheduler(BlockPool(20, 4), SchedulerLimits(), max_model_len=100, eos_token_ids=frozenset())
    submits = [Submit(name, (1,), SamplingParams(4, seed=0), 0.0, tenant="acme") for name in "ab"]
    mailbox = OneMail([COMMAND, COMMAND, *submits])
    EngineLoop(mailbox, scheduler, FakeRunner(20, 4, vocab_size=10), lambda: 0.0).run_once()
    assert [request.request_id for request in scheduler.running] == ["a"]
    assert [record.message for record in caplog.records] == ["tenants changed", "stale tenants ignored"]
