"""Who may read what `hermes-rl view` serves."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import forks
import pytest
from served import COMMAND, Served, serving

DATA = ("/api/runs", "/api/units?run=small-model", "/", "/app.js")


def test_nothing_is_served_without_the_token(served: Served) -> None:
    wrong = [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}, {"Cookie": "a=b"}]
    for path in DATA:
        for headers in wrong:
            answer = served.ask(path, headers)
            assert (answer.status, b"hermes-rl view" in answer.body) == (401, True)
    assert served.ask("/?token=").status == 401
    assert served.ask(f"/?token={served.token}x").status == 401
    assert served.ask(f"/api/runs?token={served.token}").status == 401


def test_the_printed_address_leaves_a_cookie_that_scripts_and_other_sites_cannot_use(
    served: Served,
) -> None:
    first = served.ask(f"/?token={served.token}")
    cookie = first.headers["set-cookie"]
    assert (first.status, first.headers["location"]) == (303, "/")
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    pair = cookie.split(";")[0]
    assert served.ask("/api/runs", {"Cookie": f"other=1; {pair}"}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_host_name_is_refused_even_with_the_token(served: Served, host: str) -> None:
    headers = {"Host": host, "Authorization": f"Bearer {served.token}"}
    assert served.ask("/api/runs", headers).status == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:7470"])
def test_names_of_this_machine_are_served(served: Served, host: str) -> None:
    headers = {"Host": host, "Authorization": f"Bearer {served.token}"}
    assert served.ask("/api/runs", headers).status == 200


def test_the_policy_allows_no_inline_script_and_no_other_host(served: Served) -> None:
    headers = served.ask("/", {"Authorization": f"Bearer {served.token}"}).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_only_get_is_served(served: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        headers = {"Authorization": f"Bearer {served.token}"}
        assert served.ask("/api/runs", headers, method).status == 405


@pytest.mark.parametrize(
    "run", ["..", "../runs/small-model", "/etc", "notes", "small-model/..", ""]
)
def test_only_runs_of_the_folder_are_read(served: Served, run: str) -> None:
    headers = {"Authorization": f"Bearer {served.token}"}
    answer = served.ask(f"/api/units?run={run}", headers)
    assert answer.status == 400
    assert "no run" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/../app.py", "/static/app.js", "/%2e%2e/app.py", "/api/no"])
def test_no_other_file_is_served(served: Served, path: str) -> None:
    assert served.ask(path, {"Authorization": f"Bearer {served.token}"}).status == 404


def test_it_listens_on_this_machine_only(served: Served) -> None:
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", served.port))


def test_wrong_arguments_are_one_line(tmp_path: Path, runs: Path) -> None:
    def fail(*arguments: str) -> str:
        code, _, errors = forks.call(["view", *arguments, "--no-browser"], tmp_path)
        assert code == 2
        assert "Traceback" not in errors
        return errors

    assert "runs is not a folder" in fail()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = fail(str(runs), "--port", str(taken.getsockname()[1]))
    assert "Address already in use. Choose another --host or --port" in text
    assert "no.such.invalid" in fail(str(runs), "--host", "no.such.invalid")


def test_it_opens_the_browser(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, program = tmp_path / "opened", tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" >{opened}.part && mv {opened}.part {opened}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "BROWSER": str(program)}
    with subprocess.Popen(
        [COMMAND, "view", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdout
        address = process.stdout.readline().strip()
        while not opened.exists():
            assert process.poll() is None
        process.terminate()
    assert opened.read_text() == address


def test_one_run_is_a_folder_too(runs: Path) -> None:
    with serving(runs / "small-model") as one:
        assert [row["run"] for row in one.get("runs")["runs"]] == ["small-model"]
