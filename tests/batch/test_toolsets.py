"""Toolsets of a run: its mine, those that lack something here, and what skills and a memory add."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest

from batch_runner import Silent, arun_batch, dry_run
from hermes_rl.errors import StoreError, UserError
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest
from hermes_rl.tools import PROVIDERS, TOOLS, Catalogue, Memory

SKILL = "---\nname: {name}\ndescription: Says {name}.\n---\n{text}\n"
TASKS = [{"id": f"task-{n}", "prompt": "Do it."} for n in range(3)]


def policy(request: ServedRequest) -> Any:
    """Save a fact, read a skill, answer."""
    results = [m for m in request.messages if type(m).__name__ == "ToolMessage"]
    match len(results):
        case 0:
            arguments = {"action": "add", "list": "notes", "content": "A new fact."}
            return {"calls": [{"name": "memory", "arguments": arguments}]}
        case 1:
            return {"calls": [{"name": "skill_view", "arguments": {"name": "greet"}}]}
    return "done"


async def run(folder: Path, server: FakeServer, **agent: Any) -> Any:
    config = kit.make_config(folder, TASKS, endpoint={"base_url": server.base_url}, agent=agent)
    return await arun_batch(config, progress=Silent())


@pytest.fixture
async def playing() -> Any:
    async with FakeServer(FakeConfig(plays={"fake": policy})) as server:
        yield server


async def test_units_have_skills_and_a_memory_each(tmp_path: Path, playing: FakeServer) -> None:
    (tmp_path / "skills" / "greet").mkdir(parents=True)
    skill = tmp_path / "skills" / "greet" / "SKILL.md"
    skill.write_text(SKILL.format(name="greet", text="Say hello."))
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "notes.md").write_text("An old fact.")
    agent = {
        "user_toolsets": {"kept": {"tools": ["memory"], "includes": ["skills"]}},
        "toolsets": ["kept"],
        "skills": [str(tmp_path / "skills")],
        "memory": str(tmp_path / "memory"),
    }
    report = await run(tmp_path, playing, **agent)
    assert report.done == len(TASKS)
    for row in kit.read_table(tmp_path / "run", "trajectories"):
        messages = [json.loads(text) for text in row["messages"]]
        system = messages[0]["content"]
        assert "- greet: Says greet." in system
        assert "- An old fact." in system
        results = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
        assert results[0]["entries"] == ["An old fact.", "A new fact."], "no other unit's"
        assert "Say hello." in results[1]["content"]
    assert Memory(tmp_path / "memory").read({})["notes"] == ["An old fact."]
    skill.write_text(SKILL.format(name="greet", text="Say goodbye."))
    with pytest.raises(StoreError, match=r"skills"):
        await run(tmp_path, playing, **agent)


async def test_a_distribution_of_the_user_is_drawn_by_seed(
    tmp_path: Path, playing: FakeServer
) -> None:
    mine = {"mine": {"todo": 50, "terminal": 50}}
    agent = {"user_distributions": mine, "distribution": "mine", "toolsets": None}
    config = kit.make_config(
        tmp_path,
        [{"prompt": f'{n}\nSCRIPT: ["done"]'} for n in range(40)],
        endpoint={"base_url": playing.base_url},
        model={"name": "scripted"},
        agent=agent,
    )
    await arun_batch(config, progress=Silent())
    drawn = {tuple(row["toolsets"]) for row in kit.read_table(tmp_path / "run", "trajectories")}
    assert drawn == {("todo",), ("terminal",), ("todo", "terminal")}


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        ({"user_toolsets": {"file": {}}}, "the toolset 'file' exists already"),
        ({"user_toolsets": {"mine": {"tools": ["todos"]}}}, "did you mean 'todo'"),
        ({"user_toolsets": {"a": {"includes": ["a"]}}, "toolsets": ["a"]}, "'a' includes itself"),
        ({"user_distributions": {"mine": {"todo": 150}}}, "0 to 100 percent"),
        ({"user_distributions": {"mine": {"todos": 50}}}, "did you mean 'todo'"),
        ({"toolsets": ["terminal", "image_gen"]}, "the toolset 'image_gen' has no tools"),
        ({"skills": ["/nowhere"]}, "skills: no folder /nowhere"),
        ({"memory": "/nowhere"}, "'agent.memory': no folder /nowhere"),
    ],
)
async def test_wrong_definitions_are_refused_before_a_model_is_paid(
    tmp_path: Path, playing: FakeServer, agent: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        await run(tmp_path, playing, **agent)
    assert not playing.entries


async def test_a_tool_that_lacks_something_is_refused_or_not_offered(
    tmp_path: Path, playing: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOOLS, "todo", replace(TOOLS["todo"], missing=lambda: "no key: set TODO"))
    with pytest.raises(UserError, match=r"'todo' cannot be offered here \(no key: set TODO\)"):
        await run(tmp_path, playing, toolsets=["terminal", "todo"])
    mine = {"mine": {"todo": 100, "image_gen": 100, "terminal": 100}}
    notes: list[str] = []

    class Noted(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    config = kit.make_config(
        tmp_path,
        TASKS,
        endpoint={"base_url": playing.base_url},
        agent={"user_distributions": mine, "distribution": "mine", "toolsets": None},
    )
    await arun_batch(config, progress=Noted())
    assert "not offered: todo (no key: set TODO)" in notes
    assert "not offered: the toolset image_gen has no tools" in notes
    for row in kit.read_table(tmp_path / "run", "trajectories"):
        names = [tool["function"]["name"] for tool in json.loads(row["tools"])]
        assert names == ["terminal", "process"]


async def test_a_key_or_program_that_comes_or_goes_is_named_at_resume(
    tmp_path: Path, playing: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in PROVIDERS:
        monkeypatch.delenv(service.variable, raising=False)
    agent = {
        "user_distributions": {"mine": {"web": 100, "todo": 100, "terminal": 100}},
        "distribution": "mine",
        "toolsets": None,
    }
    absent = replace(TOOLS["todo"], programs=("no-such-program",), install="apt-get install it")
    assert (await run(tmp_path, playing, **agent)).done == len(TASKS)
    monkeypatch.setenv("TAVILY_API_KEY", "key-1")
    with pytest.raises(
        StoreError,
        match=r"was made without web_search, which can be offered here now \(TAVILY_API_KEY is set",
    ):
        await run(tmp_path, playing, **agent)
    monkeypatch.delenv("TAVILY_API_KEY")
    with monkeypatch.context() as changed:
        lacking = replace(TOOLS["web_extract"], missing=lambda: "not installed: pip install it")
        changed.setitem(TOOLS, "web_extract", lacking)
        why = r"made with web_extract, which cannot be offered here \(not installed: pip install it"
        with pytest.raises(StoreError, match=why):
            await run(tmp_path, playing, **agent)
    assert (await run(tmp_path, playing, **agent)).done == len(TASKS)
    present = replace(absent, programs=("sh",))
    for name, first, second, why in (
        (
            "gone",
            present,
            absent,
            r"with todo, which cannot .* \(not installed here: apt-get",
        ),
        ("came", absent, present, r"without todo, .* now \(its program is installed\)"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setitem(TOOLS, "todo", first)
        await run(folder, playing, **agent)
        monkeypatch.setitem(TOOLS, "todo", second)
        with pytest.raises(StoreError, match=why):
            await run(folder, playing, **agent)
        monkeypatch.setitem(TOOLS, "todo", first)
        assert (await run(folder, playing, **agent)).done == len(TASKS)


async def test_a_tool_whose_program_is_not_here_is_not_offered_without_an_image(
    tmp_path: Path, playing: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(TOOLS["todo"], programs=("no-such-program",), install="apt-get install it")
    monkeypatch.setitem(TOOLS, "todo", absent)
    why = "not installed here: apt-get install it"
    with pytest.raises(UserError, match=f"'todo' cannot be offered here .{why}"):
        await run(tmp_path, playing, toolsets=["todo"])
    config = kit.make_config(
        tmp_path,
        [{"prompt": "Do it.", "toolsets": ["terminal", "todo"]}],
        endpoint={"base_url": playing.base_url},
    )
    await arun_batch(config, progress=Silent())
    (row,) = kit.read_table(tmp_path / "run", "trajectories")
    names = [tool["function"]["name"] for tool in json.loads(row["tools"])]
    assert names == ["terminal", "process"]
    assert Catalogue().missing(["todo"]) == {"todo": why}
    assert Catalogue().missing(["todo"], here=False) == {}
    other = tmp_path / "other"
    other.mkdir()
    mine = {"mine": {"todo": 100, "terminal": 100}}
    agent = {"user_distributions": mine, "distribution": "mine", "toolsets": None}
    config = kit.make_config(other, TASKS, agent=agent, endpoint={"base_url": playing.base_url})
    assert f"not offered: todo ({why})" in (await dry_run(config)).lines()
