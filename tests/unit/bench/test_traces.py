from pathlib import Path

import pytest

from guidevane_bench.errors import InputError
from guidevane_bench.workload.request import LoadRequest
from guidevane_bench.workload.traces import TraceCut, read_trace


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_tenant_trace_is_read_in_order_from_zero(trace: Path) -> None:
    requests = read_trace(trace)
    assert len(requests) == 200
    assert requests[0] == LoadRequest(0, 0.0, 13, 199, "13")
    assert [request.number for request in requests] == list(range(200))
    assert sorted(request.arrival_s for request in requests) == [request.arrival_s for request in requests]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("client.csv", "arrival_s,prompt_tokens,output_tokens,client_id\n5.5,30,4,a\n3.5,20,2,b\n"),
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:05.9799600,30,4\n2023-11-16 18:17:03.9799600,20,2\n",
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 5500, "input_length": 30, "output_length": 4}\n'
            '{"timestamp": 3500, "input_length": 20, "output_length": 2}\n',
        ),
        (
            "ours.jsonl",
            '{"arrival_s": 5.5, "prompt_tokens": 30, "output_tokens": 4}\n'
            '{"arrival_s": 3.5, "prompt_tokens": 20, "output_tokens": 2}\n',
        ),
    ],
)
def test_every_published_form_gives_the_same_requests(tmp_path: Path, name: str, text: str) -> None:
    requests = read_trace(written(tmp_path, name, text))
    sizes = [(request.arrival_s, request.num_prompt_tokens, request.num_output_tokens) for request in requests]
    assert sizes == [(0.0, 20, 2), (2.0, 30, 4)]


def test_lengths_without_arrivals_all_come_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "lengths.csv", "prompt_tokens,output_tokens\n30,4\n20,2\n")
    assert [request.arrival_s for request in read_trace(path)] == [0.0, 0.0]


def test_cut_scales_and_bounds_what_it_takes(trace: Path) -> None:
    cut = TraceCut(max_requests=3, time_scale=2.0, length_scale=0.5, max_prompt_tokens=10, max_output_tokens=80)
    whole, requests = read_trace(trace), read_trace(trace, cut)
    assert [request.arrival_s for request in requests] == [2 * row.arrival_s for row in whole[:3]]
    assert [request.num_prompt_tokens for request in requests] == [6, 10, 10]
    assert [request.num_output_tokens for request in requests] == [80, 68, 78]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("empty.csv", "arrival_s,prompt_tokens,output_tokens\n", "no request"),
        ("columns.csv", "a,b\n1,2\n", "prompt_tokens"),
        ("words.csv", "prompt_tokens,output_tokens\nmany,2\n", "request 1"),
        ("zero.csv", "prompt_tokens,output_tokens\n4,4\n3,0\n", "request 2"),
        ("broken.jsonl", "{\n", "broken.jsonl"),
    ],
)
def test_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, name: str, text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_trace(written(tmp_path, name, text))


def test_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"gone\.csv"):
        read_trace(Path("gone.csv"))


def test_prompts_share_a_beginning_exactly_as_their_prefix_ids_say() -> None:
    first = LoadRequest(1, 0.0, 1200, 1, prefix_ids=(7, 8, 9)).prompt_token_ids()
    second = LoadRequest(2, 0.0, 1100, 1, prefix_ids=(7, 8, 5)).prompt_token_ids()
    assert len(first) == 1200
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]


def test_prompts_without_prefix_ids_share_nothing() -> None:
    prompts = [LoadRequest(number, 0.0, 5, 1).prompt_token_ids() for number in range(3)]
    assert {len(prompt) for prompt in prompts} == {5}
    assert len({prompt[0] for prompt in prompts}) == 3


def test_prompt_longer_than_its_prefix_ids_ends_in_tokens_of_its_own() -> None:
    prompts = [LoadRequest(number, 0.0, 600, 1, prefix_ids=(3,)).prompt_token_ids() for number in (1, 2)]
    assert prompts[0][:512] == prompts[1][:512]
    assert set(prompts[0][512:]).isdisjoint(prompts[1][512:])
