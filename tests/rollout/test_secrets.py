"""A key in the driver's environment reaches no sandbox and no file of the run directory."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest

from batch_runner import run_batch
from hermes_rl import RunConfig
from hermes_rl.errors import UserError
from hermes_rl.leaks import find_leaks
from hermes_rl.store import AppendFile, CrashHook

CANARY = "sk-canary-51b0c7d9e2f4"
HERMES = [sys.executable, "-c", "import sys; from hermes_rl.cli import main; sys.exit(main())"]
SPY = "env; set; cat /proc/[0-9]*/environ; cat /proc/[0-9]*/cmdline; ls -laR /workspace /tmp /hx"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server that knows only the canary's key."""
    texts = ["-m", "hermes_rl.testing.fake_server", "--port", "0", "--key", CANARY, "--until-eof"]
    process = subprocess.Popen(
        [sys.executable, *texts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["base_url"]
    finally:
        process.terminate()
        process.wait(60)


def found_in(folder: Path, secret: str) -> list[str]:
    """Files that hold the secret, raw, in base64 at any offset, or inside Parquet's pages."""
    import pyarrow.parquet as pq

    coded = [base64.b64encode(b"x" * n + secret.encode())[4:-4] for n in range(3)]
    needles = [secret.encode(), *coded]
    hits = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".parquet":
                data += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
            hits += [str(path)] if any(needle in data for needle in needles) else []
    return hits


@pytest.mark.parametrize("good_key", [True, False])
def test_no_file_contains_the_key(server: str, tmp_path: Path, good_key: bool) -> None:
    dataset = tmp_path / "spy.jsonl"
    script = json.dumps([{"run": SPY}, "ok"])
    dataset.write_text(json.dumps({"prompt": f"Look.\nSCRIPT: {script}", "verify": SPY}) + "\n")
    key = CANARY if good_key else CANARY + "-wrong"
    out = tmp_path / "run"
    texts = ["run", str(dataset), "--model", "m", "--base-url", server, "--api-key-env", "SPY_KEY"]
    done = subprocess.run(
        [*HERMES, *texts, "--workers", "0", "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "SPY_KEY": key},
        timeout=120,
    )
    assert done.returncode == (0 if good_key else 3), done.stderr
    assert list((out / ("trajectories" if good_key else "failures")).glob("*.parquet"))
    assert found_in(out, key) == []
    assert key not in done.stdout + done.stderr
    (tmp_path / "injected").mkdir()
    (tmp_path / "injected" / "x").write_bytes(base64.b64encode(b"ab" + key.encode() + b"cd"))
    assert found_in(tmp_path / "injected", key)  # the search itself works


PRINTS = (
    ". ./.key; env",
    "echo $KEY | base64",
    "printf %s x$KEY | base64 -w 10",
    "printf '%s\\n%s\\n' ${KEY:0:9} ${KEY:9}",
    "printf %s $KEY | od -An -tx1",
    "printf %s $KEY | sed 's/-/%2D/g'",
    'printf \'"%s" "%s"\' ${KEY:0:7} ${KEY:7}; exit 3',
)


def run_that_prints_its_key(server: str, folder: Path, workers: int) -> Path:
    """A run whose task holds the driver's key in a file, which its agent prints in many forms."""
    steps: list[Any] = [{"text": f"My key is {CANARY}.", "run": command} for command in PRINTS]
    script = json.dumps([*steps, f"It is {CANARY[:8]}\n{CANARY[8:]}"])
    row = {
        "id": "prints",
        "prompt": f"Print.\nSCRIPT: {script}",
        "files": {".key": f"export KEY={CANARY}"},
        "verify": f"echo {CANARY}",
    }
    dataset, out = folder / "prints.jsonl", folder / f"run-{workers}"
    dataset.write_text(json.dumps(row) + "\n")
    options = ["--model", "m", "--base-url", server, "--api-key-env", "SPY_KEY", "--out", str(out)]
    done = hermes("run", str(dataset), *options, "--workers", str(workers))
    assert done.returncode == 0, done.stderr
    return out


def hermes(*arguments: str, key: str = CANARY) -> subprocess.CompletedProcess[str]:
    found = forks.call(arguments, Path.cwd(), {**os.environ, "SPY_KEY": key})
    return subprocess.CompletedProcess(arguments, *found)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_printed_key_is_in_no_file_of_the_run(
    server: str,
    tmp_path: Path,
    workers: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pyarrow.parquet as pq

    if workers:
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("cluster")["RAY_ADDRESS"])
    out = run_that_prints_its_key(server, tmp_path, workers)
    assert found_in(out, CANARY) == []
    [part] = (out / "trajectories").glob("*.parquet")
    [row] = pq.read_table(part).to_pylist()
    messages = [json.loads(message) for message in row["messages"]]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    assert len(results) == len(PRINTS)
    assert all("[secret SPY_KEY]" in result for result in results)
    assert row["final_response"] == "It is [secret SPY_KEY]"
    assert {"name": "redacted", "value": 1.0} in row["metrics"]
    compact = "".join("".join(json.dumps(row, default=str).split()).replace("\\n", "").split('"'))
    assert CANARY.encode().hex() not in compact
    checked = hermes("check", str(out), "--secrets")
    assert checked.returncode == 0, checked.stderr
    assert hermes("check", str(out)).returncode == 0
    exported = hermes("export", str(out), "--to", "trl")
    assert exported.returncode == 0, exported.stderr
    assert found_in(out, CANARY) == []


def test_rows_of_a_program_that_contain_a_key_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS_TOKEN", "qW7-rows-of-a-program")
    rows = [{"prompt": "Use qW7-rows-of-a-program."}]
    config = {"dataset": {"path": rows}, "model": {"name": "noop"}}
    run = {"out": str(tmp_path / "run"), "workers": 0}
    with pytest.raises(UserError, match="contain the value of ROWS_TOKEN"):
        run_batch(RunConfig.model_validate({**config, "run": run}))
    assert found_in(tmp_path, "qW7-rows-of-a-program") == []


def test_unknown_keys_are_reported_and_stop_an_export(server: str, tmp_path: Path) -> None:
    token = "ghp_" + "aB3d" * 9
    script = json.dumps([{"run": f"echo {token}"}, "ok"])
    dataset, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    rows = [{"id": "a", "prompt": f"Go.\nSCRIPT: {script}"}, {"id": "b", "prompt": "Go."}]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", "m", "--base-url", server, "--api-key-env", "SPY_KEY", "--workers", "0"]
    assert hermes("run", str(dataset), *options, "--out", str(out)).returncode == 0
    left = out / "journal" / "1-7" / "live-0.jsonl"  # by a worker that was killed
    left.parent.mkdir()
    AppendFile(left, CrashHook(), "attempt-2-live").append(
        json.dumps({"text": f"{'Long lines are compressed. ' * 90} {token}"}).encode()
    )
    assert token.encode() not in left.read_bytes()
    checked = hermes("check", str(out), "--secrets")
    assert checked.returncode == 2
    assert f"{left} line 1: GitHub token: ghp_... (40 characters)" in checked.stderr
    assert "(a #0) column messages: GitHub token: ghp_... (40 characters)" in checked.stderr
    assert token not in checked.stdout + checked.stderr
    refused = hermes("export", str(out), "--to", "trl")
    assert refused.returncode == 2
    assert "a #0 (messages: GitHub token)" in refused.stderr
    assert "--allow-secrets" in refused.stderr
    assert "b #0" not in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not list(out.glob("exports/*"))
    assert hermes("export", str(out), "--to", "trl", "--allow-secrets").returncode == 0
    assert list(out.glob("exports/*"))


def test_bundled_tasks_and_their_runs_contain_no_secret(tmp_path: Path) -> None:
    folder, out = Path(__file__).parents[2] / "datasets", tmp_path / "run"
    found = {p.name: find_leaks(p.read_text()) for p in sorted(folder.glob("*.jsonl"))}
    assert found == {"smoke.jsonl": [], "terminal_tasks.jsonl": [], "tool_tasks.jsonl": []}
    options = ["--model", "oracle", "--limit", "5", "--workers", "0", "--out", str(out)]
    assert hermes("run", "smoke", *options).returncode == 0
    checked = hermes("check", str(out), "--secrets")
    assert checked.returncode == 0, checked.stderr
    assert hermes("export", str(out), "--to", "trl").returncode == 0
