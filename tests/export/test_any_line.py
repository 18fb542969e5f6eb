"""Lines of foreign files that are almost right: taken, or refused in a sentence, never a fault."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_rl.errors import UserError
from hermes_rl.export import Origin, RolloutNamer, rollouts_of
from hermes_rl.segments import row_faults
from hermes_rl.store import encode

ROW: dict[str, Any] = {
    "prompt_index": 0,
    "conversations": [
        {"from": "system", "value": '<tools>\n[{"name": "t"}]\n</tools>'},
        {"from": "human", "value": "Go."},
        {
            "from": "gpt",
            "value": '<think>\n</think>\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>',
        },
        {
            "from": "tool",
            "value": '<tool_response>\n{"tool_call_id": "a", "content": 1}\n</tool_response>',
        },
        {"from": "gpt", "value": "Done."},
    ],
    "metadata": {"timestamp": "2026-01-02T03:04:05", "model": "m"},
    "completed": True,
    "toolsets_used": ["t"],
}
GROUP: dict[str, Any] = {
    "tokens": [[1, 2], [1, 3]],
    "masks": [[-100, 2], [-100, 3]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.5], [1.0, -0.5]],
    "messages": [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], None],
    "overrides": [{}, {"a": 1}],
    "generation_params": {"temperature": 1.0, "top_k": 5},
    "group_overrides": {},
}
"""Both as their lines are decoded."""

SNIPPETS = ("<tool_call>\n", "</tool_call>", "<think>", "<tools>[", '{"a": ', "assistant")
text = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(SNIPPETS)
odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within a line."""
    if path:
        yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


def changed(line: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(line)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


def take(origin: Origin, line: dict[str, Any], *, exact: bool = False) -> None:
    """Fold the rows of a line, and write them as the journal does."""
    with suppress(UserError):
        for made in rollouts_of(line, 1, origin, RolloutNamer("c" * 64), exact):
            encode(made.row)
            for segment in made.segments:
                encode(segment)
                assert not list(row_faults(msgspec.structs.asdict(segment)))


@settings(deadline=None)
@given(st.sampled_from(list(places(ROW))), odd)
@example(("metadata", "timestamp"), "9999-99-99")
def test_any_change_of_a_hermes_row(path: tuple[Any, ...], value: Any) -> None:
    take("hermes", changed(ROW, path, value))


@settings(deadline=None)
@given(st.sampled_from(list(places(GROUP))), odd, st.booleans())
def test_any_change_of_an_atropos_group(path: tuple[Any, ...], value: Any, exact: bool) -> None:
    take("atropos", changed(GROUP, path, value), exact=exact)
