"""What looks at the SLO add up to."""

from guidevane_operator.slo_history import WINDOW_S, SLOHistory


def after(*looks: bool | None) -> SLOHistory:
    history = SLOHistory()
    for number, good in enumerate(looks):
        history.look(good, 15.0 * number)
    return history


def test_two_looks_in_a_row_decide_in_both_directions() -> None:
    assert not after(False).missed
    assert not after(False, True, False).missed
    assert after(False, False).missed
    assert after(False, False, True).missed
    assert after(False, False, True, False, True).missed
    assert not after(False, False, True, True).missed


def test_a_look_without_traffic_breaks_a_row_and_does_not_count() -> None:
    history = after(False, None, False)
    assert not history.missed
    assert history.attainment_percent == 0
    assert after(None, None).attainment_percent is None


def test_attainment_is_rounded_down_so_that_100_means_never_missed() -> None:
    assert after(*[True] * 300).attainment_percent == 100
    assert after(*[True] * 200, False).attainment_percent == 99


def test_what_is_older_than_the_window_is_forgotten() -> None:
    history = after(False, False)
    history.look(True, WINDOW_S + 60)
    assert history.attainment_percent == 100
    assert history.missed


def test_memory_does_not_grow_with_looks() -> None:
    history = SLOHistory()
    for second in range(20_000):
        history.look(True, float(second))
    assert len(history._slices) <= 61
