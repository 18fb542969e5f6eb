"""Images for models: `vision_analyze` asks a model that sees, and `read_file` shows images."""

import base64
import io
import json
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit
import pytest
from PIL import Image

from batch_runner import Silent, arun_batch
from hermes_rl import AIAgent, load_run
from hermes_rl.cli import main
from hermes_rl.config import ModelConfig
from hermes_rl.errors import UserError
from hermes_rl.messages import AssistantMessage, UserMessage, text_of
from hermes_rl.models import DIALECTS
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest
from hermes_rl.tools import MAX_IMAGE_BYTES

PRICE = {"input": 2, "output": 8, "cache_read": 2}


def image(form: str = "PNG", size: tuple[int, int] = (3, 2)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, "red").save(out, form)
    return out.getvalue()


def head(width: int) -> bytes:
    """The beginning of a PNG of that width."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, 1)


def images_of(message: Any) -> list[bytes]:
    """The images that a request has in a message."""
    content = message.content if isinstance(message, UserMessage) else ""
    urls = [part["image_url"]["url"] for part in content if "image_url" in part]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


@dataclass
class Models:
    """An agent that makes its calls one turn each, and a model that sees."""

    turns: list[list[dict[str, Any]]] = field(default_factory=list)
    requests: list[ServedRequest] = field(default_factory=list)
    looks: list[ServedRequest] = field(default_factory=list)
    seen: Any = "A red field."

    def agent(self, request: ServedRequest) -> Any:
        self.requests.append(request)
        done = sum(isinstance(message, AssistantMessage) for message in request.messages)
        return {"calls": self.turns[done]} if done < len(self.turns) else "done"

    def eye(self, request: ServedRequest) -> Any:
        self.looks.append(request)
        return self.seen


def results_of(row: Mapping[str, Any]) -> list[Any]:
    """What the agent read of its calls."""
    messages = [json.loads(text) for text in row["messages"]]
    texts = [message["content"] for message in messages if message["role"] == "tool"]
    return [json.loads(text[text.index("{") : text.rindex("}") + 1]) for text in texts]


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
async def server(models: Models) -> AsyncIterator[FakeServer]:
    plays = {"fake": models.agent, "eye": models.eye}
    async with FakeServer(FakeConfig(plays=plays)) as server:
        yield server


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def look(path: str, question: str = "What is it?") -> dict[str, Any]:
    return call("vision_analyze", image_url=path, question=question)


def config(
    folder: Path, server: FakeServer, files: Mapping[str, bytes], **sections: dict[str, Any]
) -> Any:
    """A run of one task with these files."""
    written = {name: {"base64": base64.b64encode(data).decode()} for name, data in files.items()}
    agent = {"toolsets": ["file", "vision"], "vision": {"name": "eye"}}
    endpoint = {
        "base_url": server.base_url,
        "prices": {"fake": PRICE, "eye": PRICE},
        "tokens": "off",
    }
    rows = [{"prompt": "Look.", "files": written}]
    mine = {"agent": agent, "endpoint": endpoint}
    both = {name: mine.get(name, {}) | sections.get(name, {}) for name in {*mine, *sections}}
    return kit.make_config(folder, rows, **both)


async def row_of(config: Any) -> dict[str, Any]:
    await arun_batch(config, progress=Silent())
    (row,) = kit.read_table(Path(config.run.out), "trajectories")
    return dict(row)


async def test_another_model_answers_about_an_image(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    models.turns = [[look("a.png"), look("sub/b.jpg", "And this?")]]
    files = {"a.png": image(), "sub/b.jpg": image("JPEG")}
    made = config(tmp_path, server, files)
    row = await row_of(made)
    assert (await arun_batch(made, progress=Silent())).stopped is None, "it resumes"
    assert results_of(row) == [{"analysis": "A red field."}] * 2
    looked = {text_of(request.messages[-1]): request.messages for request in models.looks}
    assert images_of(looked["What is it?"][-1]) == [files["a.png"]]
    assert images_of(looked["And this?"][-1]) == [files["sub/b.jpg"]]
    looks = [one for one in row["calls"] if one["purpose"] == "vision"]
    assert [one["model"] for one in looks] == ["eye", "eye"]
    assert all(one["cost_usd"] and one["turn"] == 1 for one in looks)
    assert row["cost_usd"] == pytest.approx(sum(one["cost_usd"] for one in row["calls"]))
    assert row["usage"]["total_tokens"] == sum(
        one["input_tokens"] + one["output_tokens"] for one in row["calls"]
    )
    assert main(["check", str(tmp_path / "run")]) == 0


async def test_what_cannot_be_looked_at_is_one_result(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    files = {
        "a.txt": b"text",
        "cut.png": image()[:18] + b"\0",
        "wide.png": head(8_001),
        "large.png": image() + bytes(MAX_IMAGE_BYTES),
        "a.bmp": image("BMP"),
    }
    looks = [look(name) for name in (*files, "none.png", "http://127.0.0.1:9/a.png")]
    models.turns = [[*looks, look("a.txt", " ")]]
    row = await row_of(config(tmp_path, server, files))
    expected = (
        "not an image of a known format (text)",
        "damaged",
        "8,001 x 1 pixels",
        "3,900,000 is the limit",
        "(BMP image)",
        "file not found",
        "without web tools",
        "question must have",
    )
    errors = [result["error"] for result in results_of(row)]
    for error, text in zip(errors, expected, strict=True):
        assert text in error
    assert not models.looks


async def test_a_vision_model_that_fails_costs_one_result_and_a_refused_key_stops_the_run(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    models.turns = [[look("a.png")], [look("a.png")]]
    models.seen = ""
    made = config(tmp_path, server, {"a.png": image()})
    row = await row_of(made)
    assert ["empty answer" in one["error"] for one in results_of(row)] == [True, True]
    async with FakeServer(FakeConfig(key="right")) as closed:
        place = {"name": "eye", "base_url": closed.base_url}
        other = tmp_path / "other"
        other.mkdir()
        made = config(other, server, {"a.png": image()}, agent={"vision": place})
        report = await arun_batch(made, progress=Silent())
    assert report.stopped == "auth"
    assert "agent.vision" in str(report)


async def test_the_budget_of_a_unit_holds_for_the_vision_model(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    models.turns = [[look("a.png")]] * 6
    made = config(
        tmp_path,
        server,
        {"a.png": image()},
        model={"max_tokens": 100},
        agent={"vision": {"name": "eye", "max_tokens": 100}},
        endpoint={
            "prices": {
                "fake": PRICE,
                "eye": {"input": 1_000, "output": 100_000, "cache_read": 1_000},
            }
        },
        run={"unit_budget_usd": 16.0},
    )
    row = await row_of(made)
    assert 0 < len(models.looks) < len(models.turns)
    assert row["cost_usd"] <= 16.0
    assert "was not called" in results_of(row)[-1]["error"]


@pytest.mark.parametrize("api_mode", DIALECTS)
async def test_a_model_that_takes_images_sees_what_it_reads(
    tmp_path: Path, server: FakeServer, models: Models, api_mode: str
) -> None:
    files = {"a.png": image(), "b.webp": image("WEBP"), "wide.png": head(8_001)}
    reads = [call("read_file", path=name) for name in (*files, "c.txt")]
    models.turns = [reads, [reads[0]]]
    made = config(
        tmp_path,
        server,
        {**files, "c.txt": b"text"},
        model={"images": True},
        endpoint={"api_mode": api_mode},
        agent={"toolsets": ["file"]},
    )
    row = await row_of(made)
    first, second = (request.messages for request in models.requests[1:])
    assert images_of(first[-1]) == [files["a.png"], files["b.webp"]]
    names = [part["text"] for part in first[-1].content if part["type"] == "text"]
    assert [name.rpartition("/")[2] for name in names[1:]] == ["a.png", "b.webp"]
    assert images_of(second[-1]) == [files["a.png"]], "read again, it is shown again"
    hints = [result.get("hint") for result in results_of(row)]
    shown = "the image is in the next message"
    assert hints[:2] == [shown, shown]
    assert hints[2].startswith("not shown: the image has 8,001 x 1 pixels")
    assert [one["bytes"] for one in row["image_data"]] == [
        files[name] for name in ("a.png", "b.webp", "a.png")
    ]
    assert [info["synthetic"] for info in row["message_info"] if info["role"] == "user"] == [
        False,
        True,
        True,
    ]
    assert main(["check", str(tmp_path / "run")]) == 0
    for form in ("openai", "trl", "axolotl", "sharegpt", "atif"):
        assert main(["export", str(tmp_path / "run"), "--to", form]) == 0
    assert main(["show", str(tmp_path / "run")]) == 0


async def test_a_text_model_reads_what_an_image_is(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    models.turns = [[call("read_file", path="a.png")]]
    row = await row_of(config(tmp_path, server, {"a.png": image()}))
    assert results_of(row)[0]["hint"].startswith("read_file does not show images")
    assert not row["image_data"]


async def test_the_images_of_one_turn_are_bounded(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    large = image() + bytes(MAX_IMAGE_BYTES - 1_000)
    files = {f"{n}.png": large for n in range(4)}
    models.turns = [[call("read_file", path=name) for name in files]]
    row = await row_of(config(tmp_path, server, files, model={"images": True}))
    assert len(images_of(models.requests[1].messages[-1])) == 3
    assert ["too many images" in one.get("error", "") for one in results_of(row)] == [
        False,
        False,
        False,
        True,
    ]


async def test_an_agent_in_python_sees_images_and_asks_about_them(
    tmp_path: Path, server: FakeServer, models: Models
) -> None:
    (tmp_path / "a.png").write_bytes(image())
    path = str(tmp_path / "a.png")
    models.turns = [[look(path), call("read_file", path=path)]]
    model = ModelConfig(name="fake", base_url=server.base_url, images=True)
    settings: dict[str, Any] = {"sandbox": "none", "allow_unsandboxed": True}
    tools = ["file", "vision"]
    async with AIAgent(model, toolsets=tools, vision="eye", **settings) as agent:
        result = await agent.run("Look.")
        agent.save_trajectory(tmp_path / "rows")
    assert result["final_response"] == "done"
    assert images_of(models.requests[1].messages[-1]) == [image()]
    (row,) = load_run(tmp_path / "rows").arrow("trajectories").to_pylist()
    assert {one["purpose"] for one in row["calls"]} == {"agent", "vision"}
    async with AIAgent(model, toolsets=tools, **settings) as agent:
        models.turns = []
        await agent.run("Look.")
    offered = [tool["function"]["name"] for tool in models.requests[-1].tools]
    assert "vision_analyze" not in offered
    with pytest.raises(UserError, match="vision must be a model's name"):
        AIAgent(model, vision=3, **settings)


async def test_tools_of_a_toolset_that_lack_something_are_left_out_and_named(
    tmp_path: Path,
    server: FakeServer,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("TAVILY_API_KEY", "EXA_API_KEY", "BRAVE_API_KEY", "SEARXNG_URL"):
        monkeypatch.delenv(name, raising=False)
    notes: list[str] = []

    class Noted(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    made = config(tmp_path, server, {}, agent={"toolsets": ["web"]})
    await arun_batch(made, progress=Noted())
    names = [tool["function"]["name"] for tool in models.requests[0].tools]
    assert names == ["web_extract"]
    (line,) = [note for note in notes if note.startswith("not offered")]
    assert line.startswith("not offered: web_search (no search service: set TAVILY_API_KEY")
    blind = {"toolsets": ["vision"], "vision": None}
    with pytest.raises(UserError, match=r"'vision_analyze' cannot be offered here .*agent\.vision"):
        await arun_batch(config(tmp_path, server, {}, agent=blind), progress=Silent())
    assert main(["tools"]) == 0
    shown = capsys.readouterr().out
    assert "vision_analyze: no model that looks at images: set agent.vision" in shown
    assert "image_gen: the toolset has no tools" in shown
