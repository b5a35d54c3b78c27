from guidevane_bench.scheduler_cost import RATE, Sizes, best_of, make_submits, measure, table

SMALL = Sizes(
    num_running=3,
    num_waiting=(0, 2),
    num_blocks=200,
    num_queued=5,
    num_tenants=2,
    num_long_prompt_tokens=50,
    num_steps=3,
    num_rounds=1,
)


def test_the_benchmark_has_a_figure_for_each_measurement() -> None:
    """What it measures is a figure, not a test; that it still runs is."""
    figures = measure(SMALL)
    steps = {name.partition(":")[0] for name in figures if name.startswith("step")}
    assert steps == {"step, 0 waiting", "step, 2 waiting", "step, 2 waiting of 2 tenants", "step, 2 waiting for memory"}
    assert len(figures) == 4 * 5 + 4 + 3 + 2 + 2 and min(figures.values()) > 0


def test_the_best_of_a_time_is_the_least_and_of_a_rate_the_most() -> None:
    assert best_of([{"step, us": 2.0, RATE: 5.0}, {"step, us": 1.0, RATE: 7.0}]) == {"step, us": 1.0, RATE: 7.0}


def test_two_checkouts_stand_side_by_side() -> None:
    columns = {"before": {"step, us": 1234.0, RATE: 0.5}, "now": {"step, us": 12.0, RATE: 0.25}}
    assert list(table(SMALL, columns)) == [
        "| 3 running, 200 blocks | before | now |",
        "|---|---|---|",
        "| step, us | 1,234 | 12 |",
        "| requests/s | 0.50 | 0.25 |",
    ]


def test_its_requests_share_no_token() -> None:
    prompts = [submit.prompt_token_ids for submit in make_submits(20, first=7)]
    assert len({token_id for prompt in prompts for token_id in prompt}) == sum(map(len, prompts))


def test_four_times_the_size_is_four_times_as_much_of_everything() -> None:
    assert SMALL.times(4).num_waiting == (0, 8) and SMALL.times(4).num_blocks == 800
