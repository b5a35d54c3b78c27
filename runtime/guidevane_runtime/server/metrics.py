"""Every series of /metrics, on a registry of its own. vLLM's names and meanings, so that what was built for vLLM works.

Gauges stand as the engine's last report says; they are written on every report, so an idle engine shows zero.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from guidevane_api.admin import LimitsSource
from guidevane_api.limits import SchedulerLimits
from guidevane_runtime.core.batch_bounds import Bounds, memory_aware_cap
from guidevane_runtime.core.door import OVERLOAD, Rejection
from guidevane_runtime.core.guard import GuardDecision
from guidevane_runtime.core.guard_steps import Line
from guidevane_runtime.core.messages import EngineReady, EngineStats, RequestOutput, StepReport
from guidevane_runtime.core.tenants import RequestClass
from guidevane_runtime.server.choices import Choice
from guidevane_runtime.server.tenant_metrics import TenantMetrics

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
"""vLLM's, and 1.5: the default SLO."""
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""vLLM's; below 10 ms for small models; 80 and 120 ms, so that a quantile near the default SLO is exact."""
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *LATENCY_BUCKETS)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_LABELS = ("model_name", "engine")
_OUTCOMES = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class RequestTimes:
    """When things happened to one request; seconds of the monotonic clock."""

    arrival_s: float
    tenant: str = ""
    request_class: RequestClass = RequestClass.INTERACTIVE
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


def count_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `largest`."""
    decades = range(len(str(largest)))
    return tuple(step * 10**i for i in decades for step in (1, 2, 5) if step * 10**i <= largest)


class ServerMetrics:
    """The families and the moments at which they move."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_model_len: int) -> None:
        # Process-wide in prometheus_client: a `_created` series doubles every family and no consumer reads it.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}
        self._lengths = _LengthFamilies(self, max_model_len)
        self._make_gauges()
        self._make_counters()
        self._make_latencies()
        self._make_ours()
        self.tenants = TenantMetrics(self._labels)
        registry.register(self.tenants)
        self._seen = EngineStats()
        self._estimate: int | None = None
        self.on_sample: Callable[[Line, float], None] = lambda line, value: None
        """Hears every sample of a protection line: ms, or percent."""

    # ------------------------------------------------------------------------------------------------------ families

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(**self._labels)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(**self._labels)

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """One counter per value of a label, all there from the start."""
        family = Counter(name, text, (*_LABELS, label), registry=self.registry)
        return {str(value): family.labels(**self._labels, **{label: str(value)}) for value in values}

    def latencies(self, name: str, text: str, buckets: Iterable[float]) -> dict[RequestClass, Histogram]:
        """One histogram per class: nobody waits for offline work, so no SLO is judged by it."""
        family = Histogram(name, text, (*_LABELS, "class"), buckets=tuple(buckets), registry=self.registry)
        return {kind: family.labels(**self._labels, **{"class": str(kind)}) for kind in RequestClass}

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, text, _LABELS, buckets=tuple(buckets), registry=self.registry)
        return family.labels(**self._labels)

    def _make_gauges(self) -> None:
        self._running = self.gauge("vllm:num_requests_running", "Requests in the running list at the last step.")
        self._waiting = self.gauge("vllm:num_requests_waiting", "Requests waiting for their first step or preempted.")
        by_reason = "vllm:num_requests_waiting_by_reason"
        family = Gauge(by_reason, "Waiting requests by reason.", (*_LABELS, "reason"), registry=self.registry)
        self._waiting_capacity = family.labels(**self._labels, reason="capacity")
        family.labels(**self._labels, reason="deferred")
        self._kv_use = self.gauge("vllm:kv_cache_usage_perc", "KV-cache blocks in use, 0 to 1.")
        self._cache_info = Gauge(
            "vllm:cache_config_info",
            "Configuration of the KV cache, as labels.",
            (*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
            registry=self.registry,
        )

    def _make_counters(self) -> None:
        self._prompt_tokens = self.counter("vllm:prompt_tokens", "Prompt tokens, each prompt once.")
        self._generation_tokens = self.counter("vllm:generation_tokens", "Output tokens.")
        self._preemptions = self.counter("vllm:num_preemptions", "Preemptions.")
        self._success = self.counters("vllm:request_success", "Ended requests.", "finished_reason", _OUTCOMES)
        self._prefix_queries = self.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache, each prompt once."
        )
        self._prefix_hits = self.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_cached = self.counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        reasons = ("max_num_queued_reqs", "max_num_queued_tokens")
        self._queue_rejections = self.counters(
            "vllm:admission_rejections", "Requests refused because the queue was full.", "reason", reasons
        )

    def _make_latencies(self) -> None:
        make = self.latencies
        self._ttft = make("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = make("vllm:inter_token_latency_seconds", "Gap between two outputs of a request.", ITL_BUCKETS)
        self._tpot = make("vllm:request_time_per_output_token_seconds", "Mean gap of a request.", ITL_BUCKETS)
        self._e2e = make("vllm:e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS)
        self._queue = make("vllm:request_queue_time_seconds", "Arrival to first step.", QUEUE_BUCKETS)
        self._inference = make("vllm:request_inference_time_seconds", "First step to last token.", LATENCY_BUCKETS)
        self._prefill = make("vllm:request_prefill_time_seconds", "First step to first token.", LATENCY_BUCKETS)
        self._decode = make("vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS)

    def _make_ours(self) -> None:
        self._step = self.histogram("guidevane_step_seconds", "Duration of a step.", STEP_BUCKETS)
        self._iteration = self.histogram("vllm:iteration_tokens_total", "Tokens of a step.", ITERATION_BUCKETS)
        self._limit = Gauge(
            "guidevane_limit", "Live limits: asked for and obeyed.", (*_LABELS, "name", "kind"), registry=self.registry
        )
        self._epoch = self.gauge("guidevane_limits_epoch", "Epoch of the last accepted PATCH /admin/limits.")
        self._changes = self.counters("guidevane_limits_changes", "Changes of the live limits.", "source", LimitsSource)
        self._rejections = self.counters(
            "guidevane_admission_rejections", "Requests refused at the door or in the queue.", "reason", Rejection
        )
        blocks = Gauge("guidevane_kv_blocks", "KV-cache blocks.", (*_LABELS, "state"), registry=self.registry)
        self._blocks_free = blocks.labels(**self._labels, state="free")
        self._blocks_cached = blocks.labels(**self._labels, state="cached")
        self._blocks_used = blocks.labels(**self._labels, state="used")
        self._oldest = self.gauge("guidevane_oldest_waiting_seconds", "Longest wait so far for a first step.")
        self._disconnects = self.counter("guidevane_client_disconnects", "Clients gone before their answer's end.")
        self._recomputed = self.counter(
            "guidevane_preempted_tokens_recomputed", "Tokens computed again after a preemption."
        )
        self._restarts = self.counter("guidevane_engine_restarts", "Starts of the engine after the first.")
        self._estimated_max_num_seqs = Gauge(
            "guidevane_estimated_max_num_seqs",
            "Requests whose KV blocks would fill the cache, by the size of those that ran when some waited last.",
            _LABELS,
            registry=self.registry,
        )
        self._tenants_file = self.gauge(
            "guidevane_tenants_file_good", "1 while the tenants file as it is now is obeyed, 0 while an older one is."
        )
        self._tenants_file.set(1)
        self._guard_level = self.gauge("guidevane_guard_level", "Steps by which the guard gives way; 0 is normal.")
        breached = Gauge(
            "guidevane_guard_line_breached",
            "1 while a protection line is over.",
            (*_LABELS, "line"),
            registry=self.registry,
        )
        self._breached = {line: breached.labels(**self._labels, line=str(line)) for line in Line}
        self._http = Counter("http_requests", "HTTP requests.", ("method", "handler", "status"), registry=self.registry)

    # ------------------------------------------------------------------------------------------------------- moments

    def engine_ready(self, ready: EngineReady) -> None:
        """The engine started: its cache configuration and an empty block pool."""
        self._seen = EngineStats()
        self._forget_estimate()
        self._cache_info.clear()
        self._cache_info.labels(
            **self._labels,
            block_size=str(ready.block_size),
            num_gpu_blocks=str(ready.num_blocks),
            cache_dtype=ready.dtype,
            enable_prefix_caching=str(ready.enable_prefix_caching),
        ).set(1)
        self._set_gauges(EngineStats(num_blocks_total=ready.num_blocks))
        self.limits_effective(ready.limits)

    def engine_lost(self) -> None:
        """The engine died: nothing runs, waits or holds a block."""
        self._forget_estimate()
        self._set_gauges(EngineStats())

    def engine_restarted(self) -> None:
        self._restarts.inc()

    def step(self, report: StepReport) -> None:
        """One report of the engine, of a step or of an idle second."""
        stats, seen = report.stats, self._seen
        self._set_gauges(stats)
        self._preemptions.inc(max(0, stats.num_preemptions - seen.num_preemptions))
        self._recomputed.inc(max(0, stats.num_recomputed_tokens - seen.num_recomputed_tokens))
        self._prefix_queries.inc(max(0, stats.num_prefix_queried_tokens - seen.num_prefix_queried_tokens))
        self._prefix_hits.inc(max(0, stats.num_prefix_hit_tokens - seen.num_prefix_hit_tokens))
        self._seen = stats
        self._estimate_max_num_seqs(stats)
        if report.effective is not None:
            self.limits_effective(report.effective)
        if stats.num_blocks_total:
            self.on_sample(Line.KV_USE, 100 * stats.num_blocks_used / stats.num_blocks_total)
        num_tokens = report.num_prefill_tokens + report.num_decode_tokens
        if num_tokens:
            self._step.observe(report.step_s)
            self._iteration.observe(num_tokens)

    def limits_effective(self, limits: SchedulerLimits) -> None:
        self._set_limits(limits, "effective")

    def limits_target(self, limits: SchedulerLimits) -> None:
        self._set_limits(limits, "target")

    def limits_changed(self, source: LimitsSource, epoch: int) -> None:
        """Limits were accepted: count and wire epoch move together; `effective` follows when a step obeys."""
        self._changes[source].inc()
        self._epoch.set(epoch)

    def request_accepted(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """A choice goes to the engine."""
        self._lengths.prompt.observe(num_prompt_tokens)
        self._lengths.max_tokens.observe(max_tokens)
        self.on_sample(Line.REJECTS, 0.0)

    def answer_ended(self, n: int, longest: int) -> None:
        """All choices of a body have ended; `longest` is the most output tokens of one of them."""
        self._lengths.n.observe(n)
        self._lengths.longest.observe(longest)

    def output_arrived(
        self, times: RequestTimes, output: RequestOutput, choice: Choice, num_new_tokens: int, now_s: float
    ) -> None:
        """Outputs of one step for one choice."""
        if times.first_scheduled_s is None and output.first_scheduled_s is not None:
            times.first_scheduled_s = output.first_scheduled_s
            wait_s = max(0.0, output.first_scheduled_s - times.arrival_s)
            self._observe(self._queue, Line.QUEUE_WAIT, wait_s, times.request_class)
        if not num_new_tokens:
            return
        totals = self.tenants.totals(times.tenant)
        totals.num_generation_tokens += num_new_tokens
        self._generation_tokens.inc(num_new_tokens)
        if times.first_token_s is None:
            times.first_token_s = now_s
            self._observe(self._ttft, Line.TTFT, now_s - times.arrival_s, times.request_class)
            totals.num_prompt_tokens += len(choice.prompt_token_ids)
            self._prompt_tokens.inc(len(choice.prompt_token_ids))
            self._prompt_cached.inc(choice.num_cached_tokens)
            self._lengths.computed.observe(len(choice.prompt_token_ids) - choice.num_cached_tokens)
        elif times.last_token_s is not None:
            self._observe(self._itl, Line.ITL, now_s - times.last_token_s, times.request_class)
        times.last_token_s = now_s

    def request_ended(self, times: RequestTimes, choice: Choice, outcome: str, now_s: float) -> None:
        """The one end of an accepted request."""
        self._success[outcome].inc()
        kind = times.request_class
        self._e2e[kind].observe(now_s - times.arrival_s)
        self._lengths.generation.observe(choice.num_tokens)
        first, last, scheduled = times.first_token_s, times.last_token_s, times.first_scheduled_s
        if first is None or last is None:
            return
        self._decode[kind].observe(last - first)
        if choice.num_tokens > 1:
            self._tpot[kind].observe((last - first) / (choice.num_tokens - 1))
        if scheduled is not None:
            self._inference[kind].observe(max(0.0, last - scheduled))
            self._prefill[kind].observe(max(0.0, first - scheduled))

    def rejected(self, reason: Rejection, tenant: str | None = None) -> None:
        """tenant: None while nobody knows whose request it was."""
        self._rejections[reason].inc()
        if tenant is not None:
            self.tenants.totals(tenant).rejections[reason] += 1
        if reason in OVERLOAD:
            self.on_sample(Line.REJECTS, 100.0)
        mirrored = {
            Rejection.QUEUE_FULL: "max_num_queued_reqs",
            Rejection.QUEUED_TOKENS: "max_num_queued_tokens",
        }.get(reason)
        if mirrored:
            self._queue_rejections[mirrored].inc()

    def tenants_file_read(self, *, is_good: bool) -> None:
        self._tenants_file.set(is_good)

    def guard_ticked(self, decision: GuardDecision) -> None:
        self._guard_level.set(decision.level)
        for line, gauge in self._breached.items():
            gauge.set(line in decision.breached)

    def client_gone(self) -> None:
        self._disconnects.inc()

    def http_answered(self, method: str, handler: str, status: int) -> None:
        self._http.labels(method=method, handler=handler, status=str(status)).inc()

    # -------------------------------------------------------------------------------------------------------- inside

    def _set_gauges(self, stats: EngineStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_capacity.set(stats.num_waiting)
        self._oldest.set(stats.oldest_waiting_s if math.isfinite(stats.oldest_waiting_s) else 0)
        total = stats.num_blocks_total
        self._kv_use.set(stats.num_blocks_used / total if total else 0)
        self._blocks_used.set(stats.num_blocks_used)
        self._blocks_cached.set(stats.num_blocks_cached)
        self._blocks_free.set(total - stats.num_blocks_used - stats.num_blocks_cached)

    def _estimate_max_num_seqs(self, stats: EngineStats) -> None:
        """Absent until requests have waited behind others that ran: unknown is not 0."""
        estimate = memory_aware_cap(stats, self._estimate, Bounds(1, stats.num_blocks_total))
        if estimate is not None and estimate != self._estimate:
            self._estimated_max_num_seqs.labels(**self._labels).set(estimate)
        self._estimate = estimate

    def _forget_estimate(self) -> None:
        self._estimate = None
        self._estimated_max_num_seqs.clear()

    def _observe(
        self, latencies: dict[RequestClass, Histogram], line: Line, seconds: float, request_class: RequestClass
    ) -> None:
        """The guard hears of latencies that somebody waits for."""
        latencies[request_class].observe(seconds)
        if request_class is RequestClass.INTERACTIVE:
            self.on_sample(line, seconds * 1000)

    def _set_limits(self, limits: SchedulerLimits, kind: str) -> None:
        for name, value in limits.model_dump(by_alias=True).items():
            self._limit.labels(**self._labels, name=name, kind=kind).set(value)


class _LengthFamilies:
    """Histograms of token counts, whose buckets follow the longest request."""

    def __init__(self, metrics: ServerMetrics, max_model_len: int) -> None:
        buckets = count_buckets(max_model_len)
        make = metrics.histogram
        self.prompt = make("vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets)
        self.generation = make("vllm:request_generation_tokens", "Output tokens of a request.", buckets)
        self.longest = make("vllm:request_max_num_generation_tokens", "Longest choice of a request.", buckets)
        self.max_tokens = make("vllm:request_params_max_tokens", "max_tokens of a request.", buckets)
        self.computed = make("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed.", buckets)
        self.n = make("vllm:request_params_n", "n of a request.", (1, 2, 5, 10, 20))
