"""One episode that calls every tool in a real sandbox, compared with what was recorded once; what
comes after a run takes it."""

import base64
import json
import struct
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from batch_runner import Silent, arun_batch
from hermes_rl import load_run
from hermes_rl.cli import main
from hermes_rl.config import parse_config
from hermes_rl.messages import AssistantMessage, text_of
from hermes_rl.testing import (
    FakeConfig,
    FakeSearch,
    FakeServer,
    ServedRequest,
    write_tiny_tokenizer,
)
from hermes_rl.tools import ALLOW_PRIVATE, TOOLS, TOOLSETS, tool_names

GOLDEN = Path(__file__).parents[1] / "data" / "golden_tools.json"
PAGE = (
    "<title>Till</title><form><label>Name <input name=n></label><button>Pay</button></form>"
    "<img alt=logo src=data:,><script>console.log('ready')</script>"
)
SERVE = "python3 -m http.server 8000 --directory site >/dev/null 2>&1 & "
READY = "until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done"
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 1, 1, 8, 2, 0, 0, 0)
FORMATS = ("openai", "trl", "axolotl", "sharegpt", "atif")


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


TURNS = [
    [call("todo", todos=[{"id": "1", "content": "Open the till", "status": "in_progress"}])],
    [call("skills_list"), call("skill_view", name="tabular-report")],
    [
        call(
            "skill_manage",
            action="create",
            name="till",
            content="---\nname: till\ndescription: Use the till.\n---\n\nPay by name.\n",
        )
    ],
    [call("memory", action="add", list="notes", content="The till is at port 8000.")],
    [call("session_search", query="till"), call("clarify", question="Which till?")],
    [call("write_file", path="site/index.html", content=PAGE)],
    [call("search_files", pattern="Pay"), call("read_file", path="site/index.html")],
    [call("patch", path="site/index.html", old_string="Pay<", new_string="Pay now<")],
    [call("terminal", command=SERVE + READY), call("process", action="list")],
    [call("browser_navigate", url="http://127.0.0.1:8000/")],
    [call("browser_type", ref="e1", text="Ann"), call("browser_click", ref="e2")],
    [call("browser_snapshot", full=True), call("browser_console", expression="1 + 1")],
    [call("execute_code", code="import hermes_tools as t\nprint(t.read_file('site/index.html'))")],
    [call("browser_back"), call("browser_press", key="Tab"), call("browser_scroll")],
    [call("browser_get_images"), call("browser_screenshot", path="till.png", full=True)],
    [call("web_search", query="tills"), call("web_extract", urls=["SITE/page"])],
    [call("vision_analyze", image_url="till.png", question="Which button is there?")],
    [call("vision_analyze", image_url="SITE/logo.png", question="Which colour is it?")],
    [call("delegate_task", tasks=[{"goal": "Child: say hello."}])],
]


class Pages(BaseHTTPRequestHandler):
    """A page with text, and an image."""

    def do_GET(self) -> None:
        image = self.path == "/logo.png"
        body = PNG if image else b"<article><h1>Tills</h1><p>A till keeps money.</p>"
        self.send_response(200)
        self.send_header("Content-Type", "image/png" if image else "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    """The address of a server with the pages."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def play(site: str, request: ServedRequest) -> Any:
    """The next turn: it follows from how many answers there are."""
    first = text_of(request.messages[1])
    done = sum(isinstance(message, AssistantMessage) for message in request.messages)
    if first.startswith("Child") or done == len(TURNS):
        return "Hello." if first.startswith("Child") else "The till works."
    return json.loads(json.dumps({"calls": TURNS[done]}).replace("SITE", site))


def see(request: ServedRequest) -> str:
    """What the model beside it sees: the bytes of one PNG."""
    (image,) = [part for part in request.messages[-1].content if part["type"] == "image_url"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    return f"I see what answers: {text_of(request.messages[-1])}"


@pytest.mark.slow
async def test_an_episode_with_every_tool_is_recorded_exported_and_checked(
    tmp_path: Path,
    site: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To accept a change, copy the file that the message names to tests/data."""
    monkeypatch.setenv("OPENAI_API_KEY", "canary-8d1e")
    monkeypatch.setenv(ALLOW_PRIVATE, "1")
    out, task = tmp_path / "run", tmp_path / "task.jsonl"
    row = {"prompt": "Use every tool.", "verify": "grep -aq PNG /workspace/till.png"}
    task.write_text(json.dumps(row))
    plays = {"policy": partial(play, site), "seer": see}
    async with FakeServer(FakeConfig(plays=plays)) as server, FakeSearch("") as search:
        monkeypatch.setenv("SEARXNG_URL", f"{search.root_url}/searxng")
        config = {
            "dataset": {"path": str(task)},
            "model": {"name": "policy"},
            "endpoint": {"base_url": server.base_url, "tokens": "off"},
            "sandbox": {"backend": "bubblewrap"},
            "agent": {
                "toolsets": [name for name in TOOLSETS if tool_names([name])],
                "vision": {"name": "seer"},
            },
            "run": {"out": str(out), "workers": 0},
        }
        await arun_batch(parse_config(config), progress=Silent())
    (done,) = load_run(out).arrow("trajectories").to_pylist()
    assert (done["end_reason"], done["reward"]) == ("answered", 1.0)
    assert {stat["tool"] for stat in done["tool_stats"]} == set(TOOLS)
    assert [call["model"] for call in done["calls"] if call["purpose"] == "vision"] == ["seer"] * 2
    found = {
        "messages": [message.replace(site, "SITE")[:600] for message in done["messages"]],
        "tools": {stat["tool"]: [stat["calls"], stat["ok"]] for stat in done["tool_stats"]},
    }
    now = tmp_path / GOLDEN.name
    now.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for to in FORMATS:
        assert main(["export", str(out), "--to", to]) == 0, to
    assert main(["check", str(out)]) == 0
    write_tiny_tokenizer(tmp_path / "tokenizer")
    masks = ["--masks", "--tokenizer", str(tmp_path / "tokenizer"), "--json"]
    capsys.readouterr()
    assert main(["check", str(out), *masks]) == 0
    masked = json.loads(capsys.readouterr().out)["masks"][1]
    assert (masked["found"], masked["faults"]) == (len(TURNS) + 1, [])
    assert main(["check", str(out), "--secrets"]) == 0
    files = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert not any(b"canary-8d1e" in data for data in files)
    assert found == json.loads(GOLDEN.read_text()), f"compare {now} with {GOLDEN}"
