"""Who gets in and who is put out, as arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.admission import MAX_OVERTAKEN, Pages, choose_admissions, choose_victim, free_room

amounts = st.builds(lambda blocks, slots: Pages(blocks=blocks, slots=slots), st.integers(1, 9), st.integers(1, 4))


def room(blocks: int, slots: int = 99, rows: int = 99) -> Pages:
    return Pages(blocks=blocks, slots=slots, rows=rows)


def needs(*blocks: int) -> list[Pages]:
    return [Pages(blocks=count, slots=1) for count in blocks]


def test_one_that_does_not_fit_does_not_block_those_behind_it() -> None:
    assert choose_admissions(needs(9, 2, 9, 3), [0] * 4, room(5)) == [1, 3]


def test_the_bound_keeps_the_room_for_the_overtaken_one() -> None:
    assert choose_admissions(needs(9, 1, 1, 1), [MAX_OVERTAKEN - 2, 0, 0, 0], room(5)) == [1, 2]
    assert choose_admissions(needs(9, 1, 1), [MAX_OVERTAKEN, 0, 0], room(5)) == []
    assert choose_admissions(needs(9, 1, 1), [MAX_OVERTAKEN, 0, 0], room(10)) == [0, 1]


def test_a_growing_request_keeps_a_block_for_its_next_position() -> None:
    assert choose_admissions(needs(3), [0], free_room(free_blocks=4, free_slots=9, free_rows=9, growing=2)) == []
    assert choose_admissions(needs(3), [0], free_room(free_blocks=5, free_slots=9, free_rows=9, growing=2)) == [0]


@given(waiting=st.lists(amounts, max_size=12), have=amounts, rows=st.integers(0, 6), data=st.data())
def test_what_is_admitted_fits_together(waiting: list[Pages], have: Pages, rows: int, data: st.DataObject) -> None:
    overtaken = data.draw(st.lists(st.integers(0, MAX_OVERTAKEN), min_size=len(waiting), max_size=len(waiting)))
    admitted = choose_admissions(waiting, overtaken, room(have.blocks, have.slots, rows))
    assert admitted == sorted(set(admitted))
    assert sum(waiting[i].blocks for i in admitted) <= have.blocks
    assert sum(waiting[i].slots for i in admitted) <= have.slots
    assert len(admitted) <= rows
    for index in set(range(len(waiting))) - set(admitted):
        assert overtaken[index] + sum(1 for i in admitted if i > index) <= MAX_OVERTAKEN


def test_only_younger_ones_give_way_and_the_youngest_first() -> None:
    assert choose_victim([3, 9, 5], 4) == 1
    assert choose_victim([3, 2], 4) is None
    assert choose_victim([], 4) is None
