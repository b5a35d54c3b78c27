"""What was applied and what is seen since, in every order in which the two can arrive."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from guidevane_operator.ledger import (
    CALM_S,
    FREE_CORRECTIONS,
    MAX_PAUSE_S,
    Child,
    ChildKey,
    ChildLedger,
    content_of,
    count_correction,
    digest_of,
    pause_s,
)

KEY = ChildKey("ConfigMap", "chat-limits")


def body(version: int, data: str = "ours", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": "chat-limits", "resourceVersion": str(version), **meta}, "data": {"limits": data}}


def applied(version: int = 10) -> ChildLedger:
    ledger = ChildLedger()
    ledger.expect(KEY)
    ledger.note(KEY, "d", body(version))
    return ledger


def test_the_echo_of_our_own_write_asks_for_nothing() -> None:
    ledger = applied()
    assert not ledger.see(KEY, body(10))
    assert not ledger.children[KEY].is_disturbed


def test_an_edit_asks_for_a_pass_until_it_is_undone() -> None:
    ledger = applied()
    assert ledger.see(KEY, body(11, "theirs"))
    assert ledger.children[KEY].is_disturbed
    ledger.note(KEY, "d", body(12))
    assert not ledger.children[KEY].is_disturbed


def test_an_edit_that_is_seen_before_our_write_is_answered_is_not_lost() -> None:
    ledger = ChildLedger()
    ledger.expect(KEY)
    assert ledger.see(KEY, body(10)), "our own write, not answered yet: look again"
    ledger.see(KEY, body(11, "theirs"))
    ledger.note(KEY, "d", body(10))
    assert ledger.children[KEY].is_disturbed


def test_a_child_that_is_wanted_again_is_watched_from_its_first_call_on() -> None:
    ledger = ChildLedger()
    ledger.withdraw(KEY)
    ledger.expect(KEY)
    assert ledger.see(KEY, body(10))
    assert ledger.see(KEY, body(11), gone=True)
    ledger.note(KEY, "d", body(10))
    assert ledger.gone() == [KEY]


def test_an_old_sighting_neither_disturbs_nor_hides_a_newer_one() -> None:
    ledger = applied()
    ledger.see(KEY, body(9, "before"))
    assert not ledger.children[KEY].is_disturbed
    ledger.see(KEY, body(12, "theirs"))
    ledger.see(KEY, body(10))
    assert ledger.children[KEY].is_disturbed


def test_a_deletion_counts_unless_the_child_was_made_again_since() -> None:
    ledger = applied()
    ledger.see(KEY, body(11), gone=True)
    assert ledger.gone() == [KEY]
    ledger.note(KEY, "d", body(12))
    assert ledger.gone() == []
    ledger.see(KEY, body(11), gone=True)
    assert ledger.gone() == []


def test_what_a_read_finds_counts_whatever_its_version() -> None:
    ledger = applied(50)
    ledger.doubt()
    ledger.check(KEY, body(3, "restored from a backup"))
    assert ledger.children[KEY].is_disturbed
    ledger.note(KEY, "d", body(4))
    ledger.doubt()
    ledger.check(KEY, body(4))
    assert not ledger.children[KEY].is_disturbed
    ledger.check(KEY, None)
    assert ledger.gone() == [KEY]


def test_what_is_not_ours_or_not_wanted_is_not_looked_at() -> None:
    ledger = ChildLedger()
    assert not ledger.see(KEY, body(10))
    ledger.check(KEY, None)
    assert ledger.gone() == []
    ledger.withdraw(KEY)
    assert not ledger.see(KEY, body(11), gone=True)
    assert ledger.gone() == []


def test_status_versions_and_annotations_are_no_content_but_labels_and_owners_are() -> None:
    plain = content_of(body(1))
    assert content_of(body(2, annotations={"a": "b"}, managedFields=[{}], generation=3) | {"status": {"x": 1}}) == plain
    assert content_of(body(1, labels={"a": "b"})) != plain
    assert content_of(body(1, ownerReferences=[{"uid": "u"}])) != plain


def test_pauses_between_corrections_grow_and_end_after_a_calm_time() -> None:
    child, now_s, pauses = Child("d", corrected_at_s=-CALM_S - 1), 0.0, []
    for _ in range(16):
        pauses.append(pause_s(child, now_s))
        now_s += pauses[-1]
        count_correction(child, now_s)
    assert pauses[:FREE_CORRECTIONS] == [0.0] * FREE_CORRECTIONS
    assert pauses[FREE_CORRECTIONS : FREE_CORRECTIONS + 4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == MAX_PAUSE_S
    assert pause_s(child, now_s + CALM_S + 1) == 0.0
    count_correction(child, now_s + CALM_S + 1)
    assert child.corrections == 1


CONTENTS = ("ours", "theirs", "third", None)


@given(st.data())
def test_whatever_the_order_the_newest_fact_decides(data: st.DataObject) -> None:
    """The API server's history of one child, delivered as watches do: in order, but late against our own answers."""
    ledger, versions = applied(1), itertools.count(2)
    pending: list[tuple[int, str | None]] = []
    truth: str | None = "ours"
    for _ in range(data.draw(st.integers(1, 20))):
        step = data.draw(st.sampled_from(("edit", "deliver", "apply")))
        if step == "edit":
            truth = data.draw(st.sampled_from(CONTENTS))
            pending.append((next(versions), truth))
        elif step == "apply":
            truth = "ours"
            version = next(versions)
            ledger.note(KEY, "d", body(version))
            pending.append((version, truth))
        elif pending:
            version, content = pending.pop(0)
            ledger.see(KEY, body(version, content or "ours"), gone=content is None)
    for version, content in pending:
        ledger.see(KEY, body(version, content or "ours"), gone=content is None)
    assert ledger.children[KEY].is_disturbed == (truth != "ours")


def test_digests_do_not_depend_on_the_order_of_fields() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
