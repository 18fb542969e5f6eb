"""`hermes-rl show --web`: pages that a browser is given, whatever models and programs wrote."""

from __future__ import annotations

import base64
import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from doors_kit import PLAYED, hermes, process

from batch_runner import wrapped
from hermes_rl.cli import visible
from hermes_rl.text import scrub

RUN = "runs/smoke-oracle"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="
)
HOSTILE = "</pre><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(1)> \x1b[2J"


class Page(HTMLParser):
    """The texts of a page by element, and every attribute that names something elsewhere."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.places: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(Path(path.strip()).read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.places += [value for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def test_the_table_and_a_trajectory_as_pages(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    table = Page(hermes("show", RUN, "--web", cwd=finished).out)
    rows = [
        json.loads(line)
        for line in hermes("show", RUN, "--json", cwd=finished).out.split("\n")
        if line
    ]
    assert len(rows) == 10
    assert all(row["unit_id"][:8] in table.text for row in rows)
    assert all(row["task_id"] in table.text for row in rows)
    assert "10 of 10 solved" in table.text

    row = rows[0]
    said = hermes("show", RUN, row["unit_id"], "--web", cwd=finished)
    page = Page(said.out)
    assert Path(said.out.strip()).is_relative_to(tmp_path)
    for message in row["messages"]:
        for call in message.get("tool_calls") or ():
            assert call["function"]["arguments"]["command"] in page.text
        if message["role"] != "tool" and message.get("content"):
            assert message["content"] in page.text
    assert page.places == table.places == []


def test_what_was_written_is_text_and_images_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    content = [
        {"type": "text", "text": HOSTILE},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/far.png"}},
    ]
    task = {
        "id": HOSTILE,
        "prompt": [{"role": "user", "content": content}],
        "verify": f"echo '{HOSTILE}'; true",
        "oracle": f"echo '{HOSTILE}'",
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(task) + "\n")
    assert hermes("run", "t.jsonl", *PLAYED, cwd=tmp_path).code == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (unit,) = hermes("show", "runs/t-oracle", "--json", cwd=tmp_path).out.splitlines()
    for words in ([], [json.loads(unit)["unit_id"][:12]]):
        page = Page(hermes("show", "runs/t-oracle", *words, "--web", cwd=tmp_path).out)
        assert "script" not in page.tags
        assert page.handlers == []
        assert page.places == ([url] if words else [])
        assert "alert(1)" in page.text
        assert "\x1b" not in page.text
    assert "http://127.0.0.1:9/far.png" in page.text


def test_a_browser_is_given_the_page(finished: Path, tmp_path: Path) -> None:
    told, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" >{told}\n')
    browser.chmod(0o755)
    said = process(
        "show", RUN, "--web", cwd=finished, env={"BROWSER": str(browser), "TMPDIR": str(tmp_path)}
    )
    assert said.code == 0
    assert told.read_text() == Path(said.out.strip()).as_uri()


def test_a_page_or_json(finished: Path) -> None:
    said = hermes("show", RUN, "--web", "--json", cwd=finished)
    assert (said.code, said.error) == (2, "error: --web and --json: choose one")


def test_nothing_that_was_written_commands_the_terminal() -> None:
    assert visible("a\x1b[2J\x9b0m\x07\tb\n\u202ec") == "a\\x1b[2J\\x9b0m\\x07\tb\n\\u202ec"
    assert visible("plain Ünïcödé 漢字\n") == "plain Ünïcödé 漢字\n"
    assert scrub("500: \x1b]0;evil\x07 no") == "500: ]0;evil no"


def test_a_narrow_terminal_shows_cost_and_throttling() -> None:
    speed, spent = "24/min  0:15 left", "41 tok/s  unpriced  429: 0 %"
    line = f"14/20 units  11 solved  0 failed  4 running | {speed} | {spent}"
    assert wrapped(line, 200) == line
    assert wrapped(line, 60).split("\n") == [
        "14/20 units  11 solved  0 failed  4 running",
        f"{speed} | {spent}",
    ]
