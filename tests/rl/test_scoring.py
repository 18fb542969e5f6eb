"""Inputs of graders and scorers: tasks by index, and a configuration without a policy."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.config import parse_config
from hermes_rl.rl import TaskLookup, without_policy
from hermes_rl.sources import read_rows
from hermes_rl.tasks import LazyRow

LENGTH = 30


class Counted:
    """A stream that counts the rows that were read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> Iterator[LazyRow]:
        for row in read_rows([{"prompt": f"task {n}"} for n in range(LENGTH)]):
            self.read += 1
            yield row


@given(st.lists(st.frozensets(st.integers(0, LENGTH + 5), max_size=6), max_size=8))
def test_tasks_are_found_by_index_in_any_order(
    requests: list[frozenset[int]],
) -> None:
    tasks = TaskLookup(Counted())
    for places in requests:
        found = tasks.find(places)
        assert set(found) == {place for place in places if place < LENGTH}
        assert all(row.parse().task.prompt_text == f"task {n}" for n, row in found.items())


def test_increasing_indices_read_the_stream_once() -> None:
    stream = Counted()
    tasks = TaskLookup(stream)
    for place in range(0, LENGTH, 3):
        assert set(tasks.find({place, place + 2})) == {place, place + 2}
    assert stream.read == LENGTH
    assert set(tasks.find({4})) == {4}  # an earlier index: read again
    assert stream.read == LENGTH + 5


def test_a_configuration_without_the_policy_keeps_budgets_of_judges() -> None:
    config = parse_config(
        {
            "env": {"name": "made_up", "judge": {"name": "critic"}},
            "model": {"name": "policy"},
            "endpoint": {"base_url": "http://127.0.0.1:9/v1", "fallbacks": [{"model": "other"}]},
            "run": {
                "budget_usd": 3,
                "model_budgets": {"policy": 1, "critic": 2},
                "model_token_budgets": {"other": 10, "critic": 20},
            },
        }
    )
    plain = without_policy(config)
    assert (plain.model.name, plain.endpoint.fallbacks) == ("noop", ())
    assert plain.run.budget_usd == 3
    assert plain.run.model_budgets == {"critic": 2}
    assert plain.run.model_token_budgets == {"critic": 20}
