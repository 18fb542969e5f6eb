"""Tasks of some places of a stream that can only be read from its beginning."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.rl.scoring import TaskLookup
from hermes_rl.rows import LazyRow
from hermes_rl.sources import read_rows

LENGTH = 30


class Counted:
    """A stream that counts what was read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> Iterator[LazyRow]:
        for row in read_rows([{"prompt": f"task {n}"} for n in range(LENGTH)]):
            self.read += 1
            yield row


@given(st.lists(st.frozensets(st.integers(0, LENGTH + 5), max_size=6), max_size=8))
def test_every_place_has_its_row_in_whatever_order_they_are_asked(
    asked: list[frozenset[int]],
) -> None:
    tasks = TaskLookup(Counted())
    for places in asked:
        found = tasks.find(places)
        assert set(found) == {place for place in places if place < LENGTH}
        assert all(row.parse().task.prompt_text == f"task {n}" for n, row in found.items())


def test_places_in_order_read_the_stream_once() -> None:
    stream = Counted()
    tasks = TaskLookup(stream)
    for place in range(0, LENGTH, 3):
        assert set(tasks.find({place, place + 2})) == {place, place + 2}
    assert stream.read == LENGTH
    assert set(tasks.find({4})) == {4}  # went by: read anew
    assert stream.read == LENGTH + 5
