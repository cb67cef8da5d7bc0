"""The table of moves, and the account of a task that stays closed under them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.ledger import (
    MOVES,
    OTHER_REASONS,
    Account,
    Clock,
    End,
    Event,
    Place,
    arrival_event,
    check_move,
    close_line,
    open_ledger,
    take_event,
)
from forebay.core.rollout import Status
from forebay.core.staleness import Floors, Limits
from forebay.errors import InvalidInput

# The table as it is specified: event, where the group is (None: nowhere yet), where it goes.
_TABLE: list[tuple[Event, set[Place | None], Place | End]] = [
    (Event.DRAWN, {None}, Place.IN_FLIGHT),
    (Event.PUT, {None}, Place.BUFFERED),
    (Event.RETURNED, {Place.IN_FLIGHT}, Place.BUFFERED),
    (Event.FILTERED, {Place.IN_FLIGHT}, End.FILTERED),
    (Event.SPENT, {Place.IN_FLIGHT}, End.FAILED),
    # Put by hand and stale on arrival is two rows of the table in one step, hence None.
    (Event.STALE, {None, Place.IN_FLIGHT, Place.BUFFERED}, End.DISCARDED),
    (Event.ABANDONED, {Place.IN_FLIGHT}, Place.BUFFERED),
    (Event.LEASED, {Place.BUFFERED}, Place.LEASED),
    (Event.ACKED, {Place.LEASED}, End.TRAINED),
    (Event.REJECTED, {Place.LEASED}, End.DISCARDED),
    (Event.NACKED, {Place.LEASED}, Place.BUFFERED),
    (Event.TAKEN, {Place.BUFFERED}, End.TRAINED),
    (Event.REDRAWN, {Place.BUFFERED}, Place.IN_FLIGHT),
    (Event.TAKEN_FAILED, {Place.BUFFERED}, End.FAILED),
    (Event.TAKEN_FILTERED, {Place.BUFFERED}, End.FILTERED),
    (Event.DISCARDED, {Place.BUFFERED}, End.DISCARDED),
    (Event.REWOUND, {Place.ARCHIVED}, Place.BUFFERED),
]
_EVERYWHERE: tuple[Place | None, ...] = (None, *Place)


@pytest.mark.parametrize(("event", "origins", "target"), _TABLE, ids=[event.name for event, _, _ in _TABLE])
def test_an_event_moves_groups_from_its_places_and_from_no_other(
    event: Event, origins: set[Place | None], target: Place | End
) -> None:
    assert set(MOVES[event][0]) == origins
    assert MOVES[event][1] is target
    for place in _EVERYWHERE:
        if place in origins:
            assert check_move(event, place) is target
        else:
            with pytest.raises(InvalidInput, match=f"{event.value}.* this one is at {place}"):
                check_move(event, place)


def test_every_event_is_in_the_table() -> None:
    assert [event for event, _, _ in _TABLE] == list(Event)
    assert set(MOVES) == set(Event)


def test_an_illegal_move_names_the_places_that_would_be_legal() -> None:
    with pytest.raises(InvalidInput, match="from None, buffered, in_flight; this one is at leased"):
        check_move(Event.STALE, Place.LEASED)


@pytest.mark.parametrize(
    ("status", "event"),
    [
        (Status.COMPLETED, Event.TAKEN),
        (Status.INIT, Event.REDRAWN),
        (Status.ABORTED, Event.REDRAWN),
        (Status.EXPIRED, Event.REDRAWN),
        (Status.FAILED, Event.TAKEN_FAILED),
        (Status.FILTERED, Event.TAKEN_FILTERED),
    ],
)
def test_taking_for_good_does_what_the_status_calls_for(status: Status, event: Event) -> None:
    assert take_event(status) is event


@pytest.mark.parametrize("status", Status)
def test_a_group_put_by_hand_is_put_whatever_its_status(status: Status) -> None:
    assert arrival_event(None, status, stale=False) is Event.PUT


@pytest.mark.parametrize("status", Status)
def test_a_drawn_group_comes_back_unless_it_ended(status: Status) -> None:
    ended = {Status.FILTERED: Event.FILTERED, Status.FAILED: Event.SPENT}
    assert arrival_event(Place.IN_FLIGHT, status, stale=False) is ended.get(status, Event.RETURNED)


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("place", [None, Place.IN_FLIGHT])
def test_what_is_stale_on_arrival_is_stale_whatever_its_status(place: Place | None, status: Status) -> None:
    assert arrival_event(place, status, stale=True) is Event.STALE


def test_an_account_knows_its_floors() -> None:
    assert Account(train_step=9, limits=Limits(stale_threshold=4)).floors == Floors(oldest=5)
    assert Account(limits=Limits(stale_threshold=4)).floors == Floors()


def test_clocks_only_move_forward_and_limits_are_replaced() -> None:
    account = Account()
    assert account.advance(Clock(train_step=5, limits=Limits(2)))
    assert not account.advance(Clock(train_step=4))
    assert account.advance(Clock(model_step=3, limits=Limits(1)))
    assert (account.train_step, account.model_step, account.limits) == (5, 3, Limits(1))
    account.rewind(2)
    assert (account.train_step, account.model_step) == (3, 2)


# --- accounts -----------------------------------------------------------------------------------------


def test_an_account_counts_ends_tokens_and_reasons() -> None:
    account = Account()
    account.end(End.TRAINED, 100, None)
    account.end(End.DISCARDED, 10, "stale", groups=3)
    account.end(End.DISCARDED, 5, "off topic")
    account.end(End.FAILED, 0, "stale")
    assert account.ended == {End.TRAINED: 1, End.DISCARDED: 4, End.FAILED: 1}
    assert account.ended_tokens == {End.TRAINED: 100, End.DISCARDED: 15, End.FAILED: 0}
    assert account.reasons == {"stale": 4, "off topic": 1}


def test_being_trained_needs_no_reason_and_keeps_none() -> None:
    account = Account()
    account.end(End.TRAINED, 1, "because")
    assert account.reasons == {}


@pytest.mark.parametrize("end", [End.FILTERED, End.FAILED, End.DISCARDED])
@pytest.mark.parametrize("reason", [None, ""])
def test_a_group_that_leaves_without_a_reason_is_counted_under_its_end(end: End, reason: str | None) -> None:
    account = Account()
    account.end(end, 1, reason)
    assert account.reasons == {end.value: 1}


def test_a_long_reason_is_cut() -> None:
    account = Account()
    account.end(End.FAILED, 0, "x" * 10_000)
    account.end(End.FAILED, 0, "x" * 200 + "another end of the same long message")
    assert account.reasons == {"x" * 200: 2}


def test_distinct_reasons_beyond_a_number_are_counted_together() -> None:
    account = Account()
    for number in range(300):
        account.end(End.FAILED, 0, f"error at {number}", groups=2)
    assert len(account.reasons) == 257
    assert account.reasons[OTHER_REASONS] == 2 * (300 - 256)
    account.end(End.FAILED, 0, "error at 0")
    assert account.reasons["error at 0"] == 3, "a known reason is still counted under its name"
    assert sum(account.reasons.values()) == account.ended[End.FAILED] == 601


_WALKS = st.lists(st.tuples(st.sampled_from(Event), st.integers(0, 5)), max_size=60)


@settings(deadline=None, max_examples=200)
@given(_WALKS)
def test_the_ledger_closes_after_any_legal_moves(walk: list[tuple[Event, int]]) -> None:
    account = Account()
    places: dict[Place, int] = {}
    ended = dict.fromkeys(End, 0)
    for event, choice in walk:
        origins, target = MOVES[event]
        held = [place for place in origins if place is None or places.get(place, 0)]
        if not held:
            continue
        origin = sorted(held, key=str)[choice % len(held)]
        if origin is None:
            account.issued += 1
        else:
            places[origin] -= 1
        if isinstance(target, End):
            account.end(target, choice, event.value)
            ended[target] += 1
        else:
            places[target] = places.get(target, 0) + 1
        line = close_line(account, places)
        assert line.pop("issued") == account.issued == sum(line.values())
        assert line == {
            **{str(place): places.get(place, 0) for place in (Place.IN_FLIGHT, Place.BUFFERED, Place.LEASED)},
            **{str(end): groups for end, groups in ended.items()},
        }
        assert sum(account.reasons.values()) == sum(ended.values()) - ended[End.TRAINED]


def test_a_ledger_that_does_not_close_shows() -> None:
    line = close_line(Account(issued=3), {Place.BUFFERED: 2})
    assert line.pop("issued") != sum(line.values())


def test_g01_the_ledger_in_tokens_is_closed_only_if_every_issued_token_is_accounted_for() -> None:
    account = Account(issued=4, issued_tokens=151, reset_tokens=9)
    account.end(End.TRAINED, 100, None)
    account.end(End.FAILED, 7, "timeout")
    line = close_line(account, {Place.BUFFERED: 30, Place.LEASED: 5, Place.ARCHIVED: 100}, tokens=True)
    assert line == {
        "issued": 151,
        "in_flight": 0,
        "buffered": 30,
        "leased": 5,
        "trained": 100,
        "filtered": 0,
        "failed": 7,
        "discarded": 0,
        "reset": 9,
    }
    assert line["issued"] == sum(line.values()) - line["issued"]
    account.reset_tokens = 0
    tokens = {Place.BUFFERED: 30, Place.LEASED: 5}
    places = {Place.BUFFERED: 1, Place.LEASED: 1}
    assert list(open_ledger(account, places, tokens, "math")) == [
        "task 'math' issued 151 tokens, but 142 are accounted for"
    ]
