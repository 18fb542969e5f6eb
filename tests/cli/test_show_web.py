"""`hermes-rl show --web`: pages for a browser; text of models and programs is escaped."""

from __future__ import annotations

import base64
import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli_runner import ORACLE, run_cli, run_process

from batch_runner import wrapped
from hermes_rl.cli import visible
from hermes_rl.text import scrub

RUN = "runs/smoke-oracle"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="
)
HOSTILE = "</pre><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(1)> \x1b[2J"


class Page(HTMLParser):
    """The texts of a page, its tags, event handlers and external references."""

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


def test_show_web_writes_pages_without_external_references(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    table = Page(run_cli("show", RUN, "--web", cwd=finished).out)
    rows = [
        json.loads(line)
        for line in run_cli("show", RUN, "--json", cwd=finished).out.split("\n")
        if line
    ]
    assert len(rows) == 10
    assert all(row["unit_id"][:8] in table.text for row in rows)
    assert all(row["task_id"] in table.text for row in rows)
    assert "10 of 10 solved" in table.text

    row = rows[0]
    result = run_cli("show", RUN, row["unit_id"], "--web", cwd=finished)
    page = Page(result.out)
    assert Path(result.out.strip()).is_relative_to(tmp_path)
    for message in row["messages"]:
        for call in message.get("tool_calls") or ():
            assert call["function"]["arguments"]["command"] in page.text
        if message["role"] != "tool" and message.get("content"):
            assert message["content"] in page.text
    assert page.places == table.places == []


def test_pages_escape_hostile_text_and_show_embedded_images(
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
    assert run_cli("run", "t.jsonl", *ORACLE, cwd=tmp_path).code == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (unit,) = run_cli("show", "runs/t-oracle", "--json", cwd=tmp_path).out.splitlines()
    for arguments in ([], [json.loads(unit)["unit_id"][:12]]):
        page = Page(run_cli("show", "runs/t-oracle", *arguments, "--web", cwd=tmp_path).out)
        assert "script" not in page.tags
        assert page.handlers == []
        assert page.places == ([url] if arguments else [])
        assert "alert(1)" in page.text
        assert "\x1b" not in page.text
    assert "http://127.0.0.1:9/far.png" in page.text


def test_show_web_opens_the_browser(finished: Path, tmp_path: Path) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" >{opened}\n')
    browser.chmod(0o755)
    result = run_process(
        "show", RUN, "--web", cwd=finished, env={"BROWSER": str(browser), "TMPDIR": str(tmp_path)}
    )
    assert result.code == 0
    assert opened.read_text() == Path(result.out.strip()).as_uri()


def test_web_and_json_exclude_each_other(finished: Path) -> None:
    result = run_cli("show", RUN, "--web", "--json", cwd=finished)
    assert (result.code, result.error) == (2, "error: --web and --json: choose one")


def test_control_characters_are_escaped_on_the_terminal() -> None:
    assert visible("a\x1b[2J\x9b0m\x07\tb\n\u202ec") == "a\\x1b[2J\\x9b0m\\x07\tb\n\\u202ec"
    assert visible("plain Ünïcödé 漢字\n") == "plain Ünïcödé 漢字\n"
    assert scrub("500: \x1b]0;evil\x07 no") == "500: ]0;evil no"


def test_progress_line_wraps_between_its_parts() -> None:
    speed, spent = "24/min  0:15 left", "41 tok/s  unpriced  429: 0 %"
    line = f"14/20 units  11 solved  0 failed  4 running | {speed} | {spent}"
    assert wrapped(line, 200) == line
    assert wrapped(line, 60).split("\n") == [
        "14/20 units  11 solved  0 failed  4 running",
        f"{speed} | {spent}",
    ]
