"""Any return value of an environment is a reward that columns can store, or a fault."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import VerifierFault
from hermes_rl.events import RewardPart
from hermes_rl.rl import Rewards, check_rewards, part

anything: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.floats(),
    st.integers(),
    st.just(10**400),
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
    st.just(np.float32(0.5)),
    st.just(np.array([1.0, 2.0])),
    st.just(np.array([0.5])),
)
parts = st.builds(
    RewardPart,
    name=anything,
    score=anything,
    weight=anything,
    turn=anything,
    detail=anything,
)
metrics = st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), anything, max_size=2)
return_values = st.one_of(
    anything, st.builds(Rewards, st.lists(st.one_of(parts, anything), max_size=3), metrics)
)


@given(return_values, st.sampled_from([None, (0.0, 1.0), (-5.0, 5.0)]))
def test_any_return_value_is_a_finite_reward_or_a_fault(
    returned: Any, bounds: tuple[float, float] | None
) -> None:
    try:
        rewards = check_rewards(returned, bounds, turns=2)
    except VerifierFault:
        return
    assert math.isfinite(rewards.total)
    assert bounds is None or bounds[0] <= rewards.total <= bounds[1]
    assert all(isinstance(p.name, str) and isinstance(p.detail, str | None) for p in rewards.parts)
    assert all(math.isfinite(p.score) and math.isfinite(p.weight) for p in rewards.parts)
    assert all(p.turn in (None, 1, 2) for p in rewards.parts)
    assert all(isinstance(k, str) and math.isfinite(v) for k, v in rewards.metrics.items())


HUGE: Any = 10**400
OBJECT: Any = {"x": 1}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.array([1.0, 2.0]), "is not a number"),
        (HUGE, "is not a number"),
        (Rewards([part("a", 1e308), part("b", 1e308)]), "outside"),
        (Rewards([RewardPart(name="a", score=HUGE)]), "not finite"),
        (Rewards([part("a", 1.0, detail=OBJECT)]), "must be texts"),
        (Rewards([part("a", 1.0)], {"long": HUGE}), "finite numbers"),
    ],
)
def test_values_that_columns_cannot_store_are_reported(returned: Any, message: str) -> None:
    with pytest.raises(VerifierFault, match=message):
        check_rewards(returned, None, turns=1)


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.int64(1)])
def test_a_number_becomes_one_component(value: Any) -> None:
    rewards = check_rewards(value, (0.0, 1.0), 0)
    assert [p.name for p in rewards.parts] == ["reward"]
    assert rewards.total == float(value)
    assert type(rewards.parts[0].score) is float
