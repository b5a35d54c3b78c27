"""Which tokens may come, how often they come, and that no row disturbs another."""

import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guidevane_runtime.core.messages import SamplingParams
from guidevane_runtime.core.plan import SampledToken, ScheduledSeq, TokenHistory
from guidevane_runtime.engine.sampler import CANDIDATE_STAGES, Sampler
from guidevane_runtime.engine.sampler_penalties import Penalties
from guidevane_runtime.engine.sampler_random import keyed_uniform

EOS = 2
CHI_SQUARE_999 = {3: 16.27, 7: 24.32}
"""99.9 % quantile by degrees of freedom; the seeds are fixed, so a pass is a pass for ever."""


def sequence(
    *, position: int = 1, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **params: object
) -> ScheduledSeq:
    """A sequence whose next token has index `position`, or comes after `prompt` and `output`."""
    position = len(prompt + output) or position
    sampling = SamplingParams(**{"max_tokens": 64, "seed": 0, **params})
    return ScheduledSeq(
        request_id="a",
        token_ids=(0,),
        start=position - 1,
        block_ids=(1,),
        samples=True,
        params=sampling,
        history=TokenHistory(prompt + output, len(prompt)) if sampling.has_penalties else None,
        num_output_tokens=len(output),
    )


class CountingList(list[int]):
    """Knows how many tokens were read of it."""

    num_read = 0

    def __getitem__(self, part: Any) -> Any:
        read = super().__getitem__(part)
        self.num_read += len(read)
        return read


def sample(logits: torch.Tensor, seqs: list[ScheduledSeq]) -> list[SampledToken]:
    return Sampler(frozenset((EOS,))).sample(logits.clone(), seqs)


def draws(logits: torch.Tensor, num_draws: int, **params: object) -> list[int]:
    """Tokens drawn from one row of logits at as many positions."""
    seqs = [sequence(position=position, **params) for position in range(1, num_draws + 1)]
    return [token.token_id for token in sample(logits.expand(num_draws, -1), seqs)]


def reference_support(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that the filters leave, by sorting: min_p, then top_k, then top_p over what is left."""
    highest = max(logits)
    weights = [math.exp((value - highest) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = [token for token in order if weights[token] >= min_p]
    kept = kept[:top_k] if top_k else kept
    mass, support = sum(weights[token] for token in kept), set()
    covered = 0.0
    for token in kept:
        if covered >= top_p * mass:
            break
        support.add(token)
        covered += weights[token]
    return support


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    total = sum(counts.values())
    return sum((counts[token] - share * total) ** 2 / (share * total) for token, share in expected.items())


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-8, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert draws(torch.tensor([1.0, 7.0, 6.999]), 20, temperature=temperature) == [1] * 20


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_small_temperatures_do_not_overflow(temperature: float) -> None:
    assert draws(torch.tensor([-3e4, 3e4, 2.9e4]), 20, temperature=temperature) == [1] * 20


@settings(max_examples=60)
@given(
    ranks=st.permutations(range(12)),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 12]),
    top_p=st.sampled_from([0.05, 0.6, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_only_tokens_of_the_reference_support_are_drawn(
    ranks: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [0.37 * rank for rank in ranks]
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}

    seen = set(draws(torch.tensor(logits), 300, **filters))

    assert seen <= reference_support(logits, **filters)


def test_every_token_of_the_support_is_drawn_sooner_or_later() -> None:
    logits = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    filters = {"temperature": 1.0, "top_k": 4, "top_p": 0.95, "min_p": 0.1}

    assert set(draws(torch.tensor(logits), 2000, **filters)) == reference_support(logits, **filters)


BEYOND_A_STAGE = [
    ({"top_k": 200}, 0),
    ({"top_p": 0.1}, 0),
    ({"min_p": 0.95}, 0),
    ({"top_k": 300, "top_p": 0.5}, 0),
    ({"top_p": 0.97}, 1),
    ({"min_p": 0.2}, 1),
    ({"top_k": 1500}, 1),
    ({"top_k": 1500, "top_p": 0.9}, 1),
]


@pytest.mark.parametrize(("filters", "stage"), BEYOND_A_STAGE)
def test_supports_beyond_a_stage_of_candidates_are_complete(filters: dict[str, float], stage: int) -> None:
    size = 3 * CANDIDATE_STAGES[-1]
    logits = torch.linspace(0.0, 2.0, size)
    asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}

    seen = set(draws(logits, 1500, **asked))

    support = reference_support(logits.tolist(), **asked)
    # float32 and float64 may disagree about the very last token
    assert min(seen) >= min(support) - 1
    assert min(seen) < size - CANDIDATE_STAGES[stage], "tokens after the candidates come too"


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}], ids=["plain", "filtered"])
def test_draws_follow_the_softmax(filters: dict[str, int]) -> None:
    weights = [0.1, 0.2, 0.3, 0.4] if filters else [0.02, 0.03, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3]
    logits = torch.tensor(weights).log()

    counts = Counter(draws(logits, 20_000, temperature=1.0, seed=1234, **filters))

    expected = dict(enumerate(weights))
    assert set(counts) <= set(expected)
    assert chi_square(counts, expected) < CHI_SQUARE_999[len(weights) - 1]


def test_draws_over_seeds_follow_the_softmax_as_draws_over_positions_do() -> None:
    weights = [0.1, 0.2, 0.3, 0.4]
    seqs = [sequence(position=9, seed=seed, temperature=1.0) for seed in range(20_000)]

    tokens = sample(torch.tensor(weights).log().expand(len(seqs), -1), seqs)

    counts = Counter(token.token_id for token in tokens)
    assert chi_square(counts, dict(enumerate(weights))) < CHI_SQUARE_999[3]


def test_uniforms_are_keyed_by_seed_and_position() -> None:
    keys = [(seed, position) for seed in (-1, 0, 1, 2**64 - 2) for position in (0, 1, 1 << 40)]

    values = [keyed_uniform(*key) for key in keys]

    assert len(set(values)) == len(keys)
    assert all(0.0 <= value < 1.0 for value in values)
    assert values == [keyed_uniform(*key) for key in keys]


def test_a_row_with_bad_logits_fails_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    seqs = [sequence(seed=row, temperature=1.0, top_p=0.9, num_logprobs=1) for row in range(4)]
    healthy = sample(logits, seqs)

    for bad in (math.nan, math.inf, -math.inf):
        poisoned = logits.clone()
        poisoned[2, 7] = bad
        tokens = sample(poisoned, seqs)

        assert "not finite" in tokens[2].error
        assert [tokens[row] for row in (0, 1, 3)] == [healthy[row] for row in (0, 1, 3)]


def test_a_request_draws_the_same_in_any_company() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    seqs = [
        sequence(seed=1, temperature=1.0),
        sequence(seed=2, temperature=0.0),
        sequence(seed=3, temperature=1.0, top_k=7),
        sequence(seed=4, temperature=2.0, top_p=0.999),
        sequence(seed=5, temperature=1.0, min_p=1e-6),
        sequence(seed=6, temperature=0.7, top_p=0.9, num_logprobs=2),
    ]

    together = sample(logits, seqs)

    assert together == [sample(logits[row : row + 1], [seq])[0] for row, seq in enumerate(seqs)]


def test_ends_are_masked_until_min_tokens_are_out() -> None:
    logits = torch.tensor([0.0, 1.0, 9.0, 8.0, 2.0])
    stops = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": frozenset((3,))}

    short = sample(logits.expand(1, -1), [sequence(output=(1, 1), **stops)])
    long_enough = sample(logits.expand(1, -1), [sequence(output=(1, 1, 1), **stops)])
    ignoring = sample(logits.expand(1, -1), [sequence(output=(1, 1), ignore_eos=True, **stops)])

    assert [rows[0].token_id for rows in (short, long_enough, ignoring)] == [4, EOS, EOS]


def test_min_tokens_counts_without_the_tokens_themselves() -> None:
    params = SamplingParams(max_tokens=9, seed=0, temperature=0.0, min_tokens=3)
    logits = torch.tensor([[0.0, 1.0, 9.0]])

    def token_after(num_output_tokens: int) -> int:
        seq = ScheduledSeq("a", (0,), 0, (1,), True, params, num_output_tokens=num_output_tokens)
        return sample(logits, [seq])[0].token_id

    assert [token_after(2), token_after(3)] == [1, EOS]


def test_logit_bias_is_added_also_where_a_token_is_named_twice() -> None:
    biased = sequence(temperature=0.0, logit_bias=((3, 2.0), (3, 2.0), (1, -100.0)))

    assert sample(torch.tensor([[0.0, 9.0, 5.0, 1.5]]), [biased])[0].token_id == 3


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 1.0}, [0.0, 2.0, 2.0, -1.0]),
        ({"frequency_penalty": 1.0}, [0.0, 1.0, 2.0, -1.0]),
        ({"repetition_penalty": 2.0}, [0.0, 1.5, 1.5, -2.0]),
        ({"repetition_penalty": 0.5, "presence_penalty": -1.0}, [0.0, 7.0, 7.0, -0.5]),
    ],
)
def test_penalties_are_those_of_the_openai_api_and_of_ctrl(params: dict[str, float], expected: list[float]) -> None:
    """Prompt holds token 3; output holds token 1 twice and token 2 once."""
    row = torch.tensor([0.0, 3.0, 3.0, -1.0])

    Penalties().apply(row, sequence(output=(1, 2, 1), prompt=(3,), **params))

    assert row.tolist() == expected


ALL_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.25}


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.integers(1, 20),
    st.lists(st.integers(1, 20), max_size=6),
)
def test_counts_kept_from_step_to_step_are_those_of_all_tokens(
    token_ids: list[int], num_prompt_tokens: int, ends: list[int]
) -> None:
    """Prompts in chunks, decodes, and a preempted request that samples at the same place again."""
    history = TokenHistory(token_ids, min(num_prompt_tokens, len(token_ids)))
    kept, params = Penalties(), SamplingParams(max_tokens=9, seed=0, **ALL_PENALTIES)
    for end in sorted(min(end, len(token_ids)) for end in ends):
        seq = ScheduledSeq("a", (0,), end - 1, (1,), True, params, history)
        rows = [torch.tensor([0.0, 3.0, 2.0, -1.0, 1.0, -2.0]) for _ in range(2)]
        kept.apply(rows[0], seq)
        Penalties().apply(rows[1], seq)
        assert rows[0].tolist() == rows[1].tolist()


def test_a_token_is_counted_once_however_many_steps_follow() -> None:
    """A request of n tokens costs n counts, not n * n / 2."""
    token_ids, penalties = CountingList(range(100)), Penalties()
    history = TokenHistory(token_ids, 50)
    for end in range(50, 100):
        seq = ScheduledSeq("a", (0,), end - 1, (1,), True, SamplingParams(9, 0, frequency_penalty=1.0), history)
        penalties.apply(torch.zeros(100), seq)
    assert token_ids.num_read == 99


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    penalties, seq = Penalties(), sequence(output=(1,), presence_penalty=1.0)
    penalties.apply(torch.zeros(9), seq)
    assert seq.history is not None
    history = weakref.ref(seq.history)

    del seq

    assert history() is None


def test_logprobs_are_those_of_the_model_before_any_parameter() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    asked = sequence(temperature=0.0, num_logprobs=2, logit_bias=((0, 100.0),))

    found = sample(logits, [asked])[0].logprobs

    raw = logits[0].log_softmax(dim=-1).tolist()
    assert found is not None
    assert (found.token_id, found.logprob) == (0, pytest.approx(raw[0]))
    assert found.top == ((1, pytest.approx(raw[1])), (2, pytest.approx(raw[2])))


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    seqs = [sequence(temperature=0.0), sequence(temperature=0.0, num_logprobs=0)]

    without, only_sampled = sample(torch.tensor([[1.0, 3.0], [1.0, 3.0]]), seqs)

    assert without.logprobs is None
    assert only_sampled.logprobs is not None
    assert only_sampled.logprobs.top == ()
