"""Loaders for engine processes of these tests: `fake_model:load_runner` and those that fail in some way."""

import gc
import time
from dataclasses import dataclass, field

from guidevane_runtime.core.fake_runner import FakeRunner
from guidevane_runtime.core.messages import EngineSettings
from guidevane_runtime.core.plan import ScheduledBatch, StepOutput
from guidevane_runtime.errors import ModelNotFound

VOCAB_SIZE = 1000
HANG_TOKEN = 777
CRASH_TOKEN = 778
COUNT_TOKEN = 779


@dataclass(frozen=True)
class Shape:
    vocab_size: int = VOCAB_SIZE


class ScriptedRunner:
    """A fake runner with some real step time, that hangs, crashes or counts frozen objects at a prompt's first word."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._runner = FakeRunner(num_blocks, block_size, VOCAB_SIZE)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        first_tokens = {seq.token_ids[0] for seq in batch.seqs if seq.start == 0}
        if HANG_TOKEN in first_tokens:
            time.sleep(3600)
        if CRASH_TOKEN in first_tokens:
            raise ZeroDivisionError("the model divided by zero")
        if COUNT_TOKEN in first_tokens:
            raise RuntimeError(f"{gc.get_freeze_count()} objects are frozen")
        time.sleep(0.002)
        return self._runner.execute(batch)


@dataclass(frozen=True)
class FakeModel:
    runner: ScriptedRunner
    config: Shape = field(default_factory=Shape)
    num_blocks: int = 256
    block_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    eos_token_ids: frozenset[int] = frozenset()
    max_model_len: int = 512


def load_runner(settings: EngineSettings) -> FakeModel:
    return FakeModel(ScriptedRunner(256, 4))


def load_nothing(settings: EngineSettings) -> FakeModel:
    raise ModelNotFound(f"no model at {settings.model_path}; give --model a directory that has a config.json")


def load_badly(settings: EngineSettings) -> FakeModel:
    raise OSError("the disk is gone")
