from guidevane_bench.scheduler_cost import Sizes, make_submits, tables

SMALL = Sizes(
    num_running=3,
    num_waiting=(0, 2),
    num_blocks=200,
    num_queued=5,
    num_long_prompt_tokens=50,
    num_steps=3,
    num_rounds=1,
)


def test_the_benchmark_prints_a_row_for_each_measurement() -> None:
    """What it measures is a figure, not a test; that it still runs is."""
    rows = [line.split(" | ")[0] for line in tables(SMALL) if line.startswith("| ")]
    assert rows == [
        "| step: 3 running, waiting",
        "| 0",
        "| 2",
        "| beside 3 running",
        "| put in the queue, 5 of them",
        "| taken from it into one step, 3 of them",
        "| prefix look-up, 50 tokens",
        "| first",
        "| again, while it waits",
    ]


def test_its_requests_share_no_token() -> None:
    prompts = [submit.prompt_token_ids for submit in make_submits(20, first=7)]
    assert len({token_id for prompt in prompts for token_id in prompt}) == sum(map(len, prompts))


def test_four_times_the_size_is_four_times_as_much_of_everything() -> None:
    assert SMALL.times(4).num_waiting == (0, 8) and SMALL.times(4).num_blocks == 800
