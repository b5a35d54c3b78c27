"""Metrics that cannot be true: whoever says them, they are never zero, decide nothing, and do not block status."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guidevane_api.status import MetricsState
from guidevane_operator.pod_metrics import PodRing, read_scrape, signals_of
from guidevane_operator.prometheus import PLAIN_SIGNALS, QUANTILES, SAMPLES, Target, read_signals
from guidevane_operator.signals import Invalid, Known, Signals, known_value
from guidevane_operator.status import build_status
from guidevane_operator.status.write import to_json
from tests.unit.operator.test_status import facts, pod

TARGET = Target("demo", ("chat-0",), window_s=60, scrape_interval_s=15)
NOW = 1_000_000.0
LIES = ["NaN", "+Inf", "-Inf", "-1", "1e300"]
NAMES = (*PLAIN_SIGNALS, *QUANTILES, *(name + SAMPLES for name in QUANTILES))


def answer(scraped_at: str = str(NOW - 1), **values: str) -> list[dict[str, Any]]:
    """What Prometheus says of one pod."""
    calm = dict.fromkeys(NAMES, "50")
    found = [{"metric": {"signal": name}, "value": [NOW, value]} for name, value in (calm | values).items()]
    return [*found, {"metric": {"signal": "scraped_at", "pod": "chat-0"}, "value": [NOW, scraped_at]}]


def exposition(value: str, bucket: str = "50") -> str:
    """What a pod says: every gauge, counter and bucket that is read."""
    gauges = ["vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"]
    lines = [f"# TYPE {name} gauge\n{name} {value}" for name in [*gauges, "guidevane_guard_level"]]
    for name in ("vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens"):
        lines.append(f"# TYPE {name}_total counter\n{name}_total {value}")
    for name in sorted({histogram for _, histogram in QUANTILES.values()}):
        lines.append(f"# TYPE {name} histogram")
        lines += [f'{name}_bucket{{le="{le}"}} {bucket}' for le in ("0.1", "1", "+Inf")]
    return "\n".join(lines) + "\n"


def scraped(*texts: str) -> Signals:
    ring = PodRing()
    for number, text in enumerate(texts):
        ring.add(read_scrape(text, 15.0 * number), 60.0)
    return signals_of([ring], 1)


def values_of(signals: Signals) -> dict[str, float]:
    return {name: value.value for name, value in vars(signals).items() if isinstance(value, Known)}


def written(signals: Signals) -> dict[str, Any]:
    """The status that these signals make, as the API server would take it."""
    state = MetricsState.KNOWN
    status = to_json(build_status(dataclasses.replace(facts(pod()), signals=signals, metrics_state=state)))
    found: dict[str, Any] = json.loads(json.dumps(status, allow_nan=False))
    for number in (*found["slo"].values(), found.get("guard", {}).get("level", 0)):
        assert abs(number) < 2**53
    return found


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_lie_of_prometheus_is_invalid_and_status_is_written(name: str, lie: str) -> None:
    signals = read_signals(answer(**{name: lie}), TARGET)
    about = getattr(signals, name.removesuffix(SAMPLES))
    assert known_value(about, min_samples=30) is None
    assert not name.endswith(SAMPLES) or not isinstance(about, Known)
    written(signals)


@pytest.mark.parametrize("lie", ["NaN", "+Inf", "-Inf"])
def test_a_scrape_at_an_impossible_time_is_not_fresh(lie: str) -> None:
    assert read_signals(answer(scraped_at=lie), TARGET).state is not MetricsState.KNOWN


def test_a_quantile_without_its_count_is_not_known() -> None:
    samples = [s for s in answer() if s["metric"]["signal"] != "ttft_p95_ms" + SAMPLES]
    assert known_value(read_signals(samples, TARGET).ttft_p95_ms, 30) is None


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_a_pod_is_no_value_and_status_is_written(lie: str) -> None:
    signals = scraped(exposition(lie, lie), exposition(lie, lie))
    assert values_of(signals).keys() <= {"preemptions", "prompt_tokens", "generation_tokens"}, "steady, so none came in"
    assert isinstance(signals.kv_percent, Invalid)
    written(signals)


def test_a_lie_of_one_pod_is_not_hidden_by_what_another_says() -> None:
    for order in ((0.9, math.nan), (math.nan, 0.9)):
        rings = [PodRing(), PodRing()]
        for ring, value in zip(rings, order, strict=True):
            ring.add(read_scrape(exposition(str(value)), 0.0), 60.0)
        assert isinstance(signals_of(rings, 2).kv_percent, Invalid)


def test_a_line_without_its_label_is_no_exposition() -> None:
    with pytest.raises(ValueError, match="line"):
        read_scrape("# TYPE guidevane_guard_line_breached gauge\nguidevane_guard_line_breached 1\n", 0.0)


NUMBERS = st.one_of(st.sampled_from(LIES), st.floats().map(str))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4))
def test_status_can_be_written_whatever_pods_say(said: list[tuple[str, str]]) -> None:
    signals = scraped(*(exposition(value, bucket) for value, bucket in said))
    assert all(math.isfinite(value) and value >= 0 for value in values_of(signals).values())
    written(signals)


@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS), NUMBERS)
def test_status_can_be_written_whatever_prometheus_says(said: dict[str, str], scraped_at: str) -> None:
    signals = read_signals(answer(scraped_at, **said), TARGET)
    assert all(math.isfinite(value) and value >= 0 for value in values_of(signals).values())
    written(signals)


@given(st.text(alphabet='abc:_{}="#\\ \n0123456789.+-eNaInf', max_size=200))
def test_any_text_is_an_exposition_or_a_value_error(text: str) -> None:
    try:
        read_scrape(text, 0.0)
    except ValueError:
        return
