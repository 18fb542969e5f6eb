"""Tools by name, toolsets, distributions, and result texts."""

import json
from collections import Counter

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import UserError
from hermes_rl.text import cut_middle, json_result, strip_ansi
from hermes_rl.tools import (
    DISTRIBUTIONS,
    TOOLS,
    TOOLSETS,
    Catalogue,
    read_file,
    resolve,
    schema_digest,
    schemas,
    search_files,
    terminal,
)

ALL = Catalogue(provided=frozenset({"vision_analyze"}))
"""That of a run that names a model for images."""


def test_every_tool_has_a_valid_schema_and_is_in_a_toolset() -> None:
    for name, tool in TOOLS.items():
        assert tool.name == name
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        assert all("description" in p for p in tool.parameters["properties"].values())
        assert name in TOOLSETS[tool.toolset].tools
    assert not TOOLS["terminal"].parallel


def test_descriptions_state_the_defaults_and_limits_of_the_code() -> None:
    def described(tool: str, parameter: str) -> str:
        return str(TOOLS[tool].parameters["properties"][parameter]["description"])

    assert described("terminal", "timeout").endswith(
        f"Default {terminal.DEFAULT_TIMEOUT_S}, maximum {terminal.MAX_TIMEOUT_S}."
    )
    assert described("read_file", "limit").endswith(
        f"Default {read_file.DEFAULT_LINES}, maximum {read_file.MAX_LINES}."
    )
    assert described("search_files", "limit").endswith(f"Default {search_files.DEFAULT_LIMIT}.")


def test_names_that_do_not_exist_are_answered_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"unknown toolset 'smell' \(known: terminal, file"):
        resolve(["terminal", "smell"])
    with pytest.raises(UserError, match=r"unknown distribution 'all' \(known: default"):
        Catalogue().draw("all", 1)


def test_toolsets_include_each_other_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARXNG_URL", "http://127.0.0.1:9")  # or web_search is not offered
    some = [
        *("terminal", "process", "read_file", "write_file", "patch", "search_files"),
        *("delegate_task", "todo"),
    ]
    assert list(resolve(["todo", "coding", "delegation"])) == some
    assert list(resolve(["delegation", "file", "todo", "terminal", "coding"])) == some
    assert list(ALL.resolve(TOOLSETS)) == list(TOOLS)
    assert list(resolve(["file_read"])) == ["read_file", "search_files"]
    assert resolve([]) == resolve(["none"]) == {}


def test_the_digest_follows_what_models_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARXNG_URL", "http://127.0.0.1:9")  # or web_search is not offered
    assert schema_digest(ALL.resolve(TOOLSETS).values()) == schema_digest(TOOLS.values())
    assert schema_digest(resolve(["terminal"]).values()) != schema_digest(TOOLS.values())
    assert [s["function"]["name"] for s in schemas(TOOLS.values())] == list(TOOLS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_repeatable_and_follow_the_percentages(name: str) -> None:
    draws = [Catalogue().draw(name, seed) for seed in range(4000)]
    assert draws == [Catalogue().draw(name, seed) for seed in range(4000)]
    counts = Counter(toolset for drawn in draws for toolset in drawn)
    shares = {t: p / 100 for t, p in DISTRIBUTIONS[name].items()}
    none_drawn = 1.0
    for share in shares.values():
        none_drawn *= 1 - share
    likeliest = max(shares, key=lambda t: shares[t])
    for toolset, share in shares.items():
        expected = share + (none_drawn if toolset == likeliest else 0)
        assert counts[toolset] / 4000 == pytest.approx(expected, abs=0.03)
    assert all(resolve(drawn) is not None for drawn in draws)


def test_known_draws_stay() -> None:
    # A change here would change the rows of finished runs.
    drawn = [Catalogue().draw("reasoning", seed) for seed in range(6)]
    assert drawn == [
        ("web", "terminal"),
        ("web", "file"),
        ("web", "file"),
        ("web", "file"),
        ("web",),
        ("web", "file", "terminal"),
    ]


@given(st.text(max_size=300), st.integers(0, 200))
def test_cut_text_keeps_head_and_tail(text: str, most: int) -> None:
    cut = cut_middle(text, most)
    assert len(cut) <= max(most, 0) or cut == text
    if len(text) <= most:
        assert cut == text
    elif most >= 100:
        assert text.startswith(cut[:20])
        assert text.endswith(cut[-20:])


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=2000), st.integers(150, 3000))
def test_a_json_result_is_json_of_the_right_size(text: str, most: int) -> None:
    result = json_result({"output": text, "exit_code": 1}, "output", most)
    assert len(result) <= most
    read = json.loads(result)
    assert read["exit_code"] == 1
    if len(json.dumps(text)) + 50 < most:
        assert read["output"] == text


@given(st.text())
def test_text_without_escapes_stays(text: str) -> None:
    plain = text.replace("\x1b", "")
    assert strip_ansi(plain) == plain
    assert strip_ansi(f"\x1b[31m{plain}\x1b[0m") == plain
