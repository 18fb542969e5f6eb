"""Ids are functions of content alone."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl import identity
from hermes_rl.tasks import parse_row

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_digests_survive_json_round_trips(value: object) -> None:
    again = json.loads(json.dumps(value))
    assert identity.digest(again) == identity.digest(value)


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_key_order_does_not_matter(value: dict[str, object]) -> None:
    turned = dict(reversed(value.items()))
    assert identity.digest(turned) == identity.digest(value)


def test_integral_floats_hash_as_integers_and_nan_is_refused() -> None:
    assert identity.digest({"a": 1.0}) == identity.digest({"a": 1})
    assert identity.digest({"a": True}) != identity.digest({"a": 1})
    assert identity.digest("1") != identity.digest(1)
    with pytest.raises(ValueError, match="not a JSON number"):
        identity.digest({"a": math.nan})


def test_ids_are_the_same_in_another_process() -> None:
    code = (
        "from hermes_rl import identity as i;"
        "print(i.unit_id('c','t',1,2), i.group_id('c','t',1), i.unit_seed(7, 'u'))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    unit, group = identity.unit_id("c", "t", 1, 2), identity.group_id("c", "t", 1)
    assert out == [unit, group, str(identity.unit_seed(7, "u"))]


def test_ids_equal_those_of_earlier_versions() -> None:
    """Run directories of earlier versions find their units by them."""
    assert identity.unit_id("c" * 64, "d" * 64, 1, 2) == "c4262ecd87d3d5067a3b9efe3fdcb86c"
    assert identity.group_id("c" * 64, "d" * 64, 1) == "4cc691cf2848c408c91cd42381fa00e0"
    assert identity.unit_key("c", "t", 0, 3).hex() == identity.unit_id("c", "t", 0, 3)


def test_every_part_changes_the_unit_id() -> None:
    base = ("c", "t", 0, 0)
    others = [("d", "t", 0, 0), ("c", "u", 0, 0), ("c", "t", 1, 0), ("c", "t", 0, 1)]
    ids = {identity.unit_id(*key) for key in [base, *others]}
    assert len(ids) == 5
    assert identity.group_id("c", "t", 0) not in ids


def test_a_task_hash_covers_unknown_columns_and_verify_but_not_oracle_and_repeats() -> None:
    row = {"prompt": "p", "verify": "true", "level": 3}

    def hash_of(**changes: object) -> str:
        return parse_row({**row, **changes}, 0, "here").task_hash

    plain = hash_of()
    assert hash_of(oracle="x") == plain
    assert hash_of(repeats=4) == plain
    assert hash_of(level=3.0) == plain
    assert hash_of(system=None) == plain
    assert hash_of(level=4) != plain
    assert hash_of(verify="false") != plain
