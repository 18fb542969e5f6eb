"""`hermes-rl api` in its safe profile: bounds, refusals, order, repeats, kills, access."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import itertools
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from api_kit import Api
from atropos_requests import Call, call, environment, trainer

from hermes_rl.cli import main
from hermes_rl.rl import NewGroup, TrajectoryQueue


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def ready(api: Api, batch_size: int = 4, **env: Any) -> int:
    """Register a trainer and an environment with groups of 2; returns the environment's id."""
    assert api.post("/register", trainer(batch_size=batch_size))[0] == 200
    api.get("/batch")
    return join(api, **env)


def join(api: Api, **env: Any) -> int:
    wanted = {"weight": 1.0, "max_token_length": 100, "min_batch_allocation": None} | env
    _, reply = api.post("/register-env", environment(**({"group_size": 2} | wanted)))
    assert reply["status"] == "success"
    return int(reply["env_id"])


def numbered(number: int, env: int, size: int = 2, **changed: Any) -> dict[str, Any]:
    """A group that is known by its first token."""
    lists = {"tokens": [[number, 1]] * size, "masks": [[-100, 1]] * size, "scores": [1.0] * size}
    return {**lists, "env_id": env, **changed}


def numbers(batch: list[dict[str, Any]] | None) -> list[int]:
    return [member["tokens"][0][0] for member in batch or ()]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with Api(tmp_path) as api:
        yield api


def test_batches_come_one_per_request_in_the_order_of_the_queue(api: Api) -> None:
    env = ready(api)
    for number in range(5):
        assert api.post("/scored_data", numbered(number, env))[1] == {"status": "received"}
    assert numbers(api.get("/batch")["batch"]) == [0, 1]
    assert api.get("/status") == {"current_step": 1, "queue_size": 3}
    assert numbers(api.get("/batch")["batch"]) == [2, 3]
    assert api.get("/batch") == {"batch": None}


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"masks": [[1, 1]]}, "masks has 1 entries, tokens 2"),
    ({"masks": [[1], [1, 1]]}, "masks[0] has 1 values, its tokens 2"),
    ({"tokens": [[-1], [1, 2]]}, "tokens[0] has ids below 0"),
    ({"tokens": [[1], [1, 1 << 31]]}, "tokens[1] has ids below 0 or of more than 31 bits"),
    ({"scores": [1.0]}, "scores has 1 entries"),
    ({"advantages": [[1.0], [1.0, 2.0]]}, "advantages[0] has 1 values"),
    ({"inference_logprobs": [[1.0, 1.0]]}, "inference_logprobs has 1 entries"),
    ({"messages": [[]]}, "messages has 1 entries"),
    ({"scores": [float("nan"), 1.0]}, "not valid JSON"),
    ({"scores": [1.0, float("inf")]}, "not valid JSON"),
    ({"generation_params": {"a": float("nan")}}, "not valid JSON"),
    ({"group_overrides": {"a": "\ud800"}}, "not valid JSON"),
    ({"env_id": 7}, "no environment 7"),
    ({"env_id": -1}, "no environment -1"),
    ({"tokens": [], "masks": [], "scores": []}, "a group of 0 sequences"),
    (
        {"tokens": [[1]] * 3, "masks": [[1]] * 3, "scores": [1.0] * 3},
        "a group of 3 sequences; 1 to 2",
    ),
)


def test_groups_that_no_trainer_could_use_are_refused(api: Api) -> None:
    env = ready(api)
    for changed, message in WRONG:
        wrong = numbered(1, env) | changed
        for path, sent in (
            ("/scored_data", wrong),
            ("/scored_data_list", [numbered(0, env), wrong]),
        ):
            status, reply = api.post(path, sent)
            assert status == 422
            assert message in reply["detail"]
    assert api.get("/status")["queue_size"] == 0
    names = ("advantages", "ref_logprobs", "messages", "overrides", "images")
    empty: dict[str, Any] = {name: [] for name in names}  # as BaseEnv sends what is absent
    assert api.post("/scored_data", numbered(1, env, **empty))[0] == 200


def test_a_full_queue_answers_503_and_lets_starved_environments_in(tmp_path: Path) -> None:
    with Api(tmp_path, "--max-batches", "2") as api:
        first = ready(api)
        second = join(api)
        for number in range(4):
            assert api.post("/scored_data", numbered(number, first))[0] == 200
        with api.connection() as connection:
            connection.request(
                "POST",
                "/scored_data",
                json.dumps(numbered(9, first)),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
        assert api.post("/scored_data", numbered(4, second))[0] == 200
        assert numbers(api.get("/batch")["batch"]) == [0, 1]
        api.get("/batch")
        assert api.post("/scored_data", numbered(9, first))[0] == 200


def test_groups_before_a_trainer_wait(api: Api) -> None:
    assert api.post("/scored_data", numbered(1, 0))[0] == 503
    assert api.post("/register-env", environment())[1]["status"] == "wait for trainer to start"


def test_a_silent_environment_does_not_block_the_others_and_comes_back(tmp_path: Path) -> None:
    with Api(tmp_path, "--env-timeout", "2") as api:
        silent = ready(api, min_batch_allocation=0.5)
        env = join(api)
        for number in range(2):
            api.post("/scored_data", numbered(number, env))
        assert api.get("/batch") == {"batch": None}  # its half of the batch is missing
        batch: list[Any] = []

        def delivered() -> bool:
            batch.extend(api.get("/batch")["batch"] or ())
            return bool(batch)

        eventually(delivered)
        assert numbers(batch) == [0, 1]
        assert api.get("/status-env", {"env_id": silent})["unallocated_fraction"] == 0.5


def test_an_environment_that_left_and_registers_again_counts_again() -> None:
    """As `env serve` does when it is stopped and started again: with the same key."""
    queue = TrajectoryQueue(None, "safe")
    queue.register(trainer(batch_size=4))
    queue.take(None)
    shares = environment(group_size=2, min_batch_allocation=0.5)
    env = queue.register_env(shares, "a")["env_id"]
    assert queue.disconnect_env(-1)["status"] == "failure"
    assert queue.status_env(env)["unallocated_fraction"] == 0.5
    queue.disconnect_env(env)
    assert queue.status_env(env)["unallocated_fraction"] == 1.0
    assert queue.register_env(shares, "a")["env_id"] == env
    assert queue.status_env(env)["unallocated_fraction"] == 0.5


def test_a_second_trainer_replaces_the_first(api: Api) -> None:
    env = ready(api)
    api.post("/scored_data", numbered(1, env))
    api.post("/register", trainer(batch_size=2, starting_step=40))
    assert api.get("/info")["batch_size"] == 2
    assert numbers(api.get("/batch")["batch"]) == [1]
    assert api.get("/status")["current_step"] == 41
    assert api.get("/status-env", {"env_id": env})["current_step"] == 41


def test_a_batch_that_is_taken_back_after_another_trainer_came_is_handed_out_once() -> None:
    """A trainer closes its connection, and another registers before the server has noticed."""
    queue = TrajectoryQueue(None, "safe")
    wanted = trainer(batch_size=2)
    queue.register(wanted)
    queue.take(None)
    queue.submit([NewGroup(None, 2, b"{}")], single=True)
    batch = queue.take(None).batch
    assert batch is not None
    queue.register(wanted)
    queue.put_back(batch)
    assert [queue.take(None).batch for _ in range(2)] == [batch, None]
    queue.reset()
    queue.put_back(batch)
    queue.register(wanted)
    assert queue.take(None).batch is None


def test_a_key_makes_repeats_harmless(api: Api) -> None:
    env = ready(api)
    for _ in range(3):
        assert api.post("/scored_data", numbered(1, env), Idempotency_Key="a")[0] == 200
    assert api.get("/status")["queue_size"] == 1
    assert api.post("/scored_data", numbered(2, env), Idempotency_Key="a")[0] == 422
    api.post("/scored_data", numbered(2, env), Idempotency_Key="b")
    took = [api.get("/batch", Idempotency_Key="one") for _ in range(3)]
    assert [numbers(reply["batch"]) for reply in took] == [[1, 2]] * 3
    assert api.get("/batch", Idempotency_Key="two") == {"batch": None}
    joined = [api.post("/register-env", environment(), Idempotency_Key="env") for _ in range(2)]
    assert joined[0] == joined[1]


def test_everything_survives_a_kill(api: Api) -> None:
    env = ready(api)
    for number in range(3):
        api.post("/scored_data", numbered(number, env))
    api.post("/scored_data", numbered(7, env, size=1))  # waits for its other half
    before = [api.get(path) for path in ("/status", "/info", "/wandb_info", "/latest_example")]
    api.kill()
    api.start()
    after = [api.get(path) for path in ("/status", "/info", "/wandb_info", "/latest_example")]
    assert after == before
    api.post("/scored_data", numbered(8, env, size=1))
    assert numbers(api.get("/batch")["batch"]) == [0, 1]
    assert api.stop() == 0
    api.start()
    api.post("/scored_data", numbered(9, env))
    assert numbers(api.get("/batch")["batch"]) == [2, 7, 8]


class Clients:
    """Clients that repeat each request until it is answered."""

    def __init__(self, api: Api, env: int) -> None:
        self.api, self.env = api, env
        self.taken: list[int] = []

    def send(self, request: Call, **headers: str) -> Any:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, body = self.api.send(request, **headers)
                assert status == 200
                return json.loads(body)
            time.sleep(0.02)  # it is starting, and needs the CPU

    def produce(self, numbers: range, keyed: bool) -> None:
        for number in numbers:
            key = {"Idempotency_Key": str(number)} if keyed else {}
            self.send(call("POST", "/scored_data", numbered(number, self.env)), **key)

    def train(self, wanted: int) -> None:
        for attempt in itertools.count():
            reply = self.send(call("GET", "/batch"), Idempotency_Key=str(attempt))
            self.taken += numbers(reply["batch"])
            if len(self.taken) >= wanted:
                return
            time.sleep(0.01)


@pytest.mark.slow
def test_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    kills, each = 5, 50  # 20 and 150 as well
    with Api(tmp_path, "--max-batches", "1000") as api:
        clients = Clients(api, ready(api))
        threads = [
            threading.Thread(target=clients.produce, args=(range(each), True), daemon=True),
            threading.Thread(
                target=clients.produce, args=(range(each, 2 * each), False), daemon=True
            ),
            threading.Thread(target=clients.train, args=(2 * each,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for kill in range(1, kills + 1):
            wanted = kill * 2 * each * 0.9 / kills
            eventually(lambda wanted=wanted: len(clients.taken) >= wanted)
            api.kill()
            api.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert sorted(clients.taken) == list(range(2 * each))
        assert api.get("/batch") == {"batch": None}


def test_delivered_batches_do_not_fill_the_disk(api: Api) -> None:
    env = ready(api, batch_size=2)
    for number in range(40):
        api.post("/scored_data", numbered(number, env))
        assert numbers(api.get("/batch")["batch"]) == [number]
    eventually(
        lambda: "batches_delivered_total 40" in api.send(call("GET", "/metrics"))[1].decode()
    )
    assert numbers([api.get("/latest_example")]) == [39]
    api.stop()
    with contextlib.closing(sqlite3.connect(api.folder / "runs" / "api.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM groups").fetchone()[0] <= 10
    api.start()


def test_a_token_is_needed_once_there_is_one(tmp_path: Path) -> None:
    env = {**os.environ, "API_TOKEN": "secret"}
    with Api(tmp_path, "--token-env", "API_TOKEN", env=env) as api:
        url = base64.b64encode(b"anyone:secret").decode()  # what http://anyone:secret@host sends
        wrong = base64.b64encode(b"anyone:guess").decode()
        tried = {"Bearer secret": 200, f"Basic {url}": 200, "Bearer guess": 401, "Basic !": 401}
        tried |= {f"Basic {wrong}": 401, "": 401, "Bearer": 401}
        for value, expected in tried.items():
            assert api.send(call("GET", "/info"), Authorization=value)[0] == expected
        assert api.send(call("GET", "/metrics"))[0] == 401


def test_web_pages_cannot_use_the_server(api: Api) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
        assert api.send(call("GET", "/reset_data"), **headers)[0] == 403
    assert api.send(call("GET", "/status"), Sec_Fetch_Site="none")[0] == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example"])
def test_a_foreign_name_that_resolves_to_this_machine_is_refused(api: Api, host: str) -> None:
    """A browser sends no Origin and no Sec-Fetch-Site with it."""
    ready(api)
    assert api.send(call("GET", "/reset_data"), Host=host)[0] == 403
    for name in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert api.send(call("GET", "/status"), Host=name)[0] == 200


def test_bodies_are_bounded_also_when_inflated(tmp_path: Path) -> None:
    with Api(tmp_path, "--max-body-mb", "1") as api:
        bomb = gzip.compress(b" " * (1 << 26))
        json_type = ("Content-Type", "application/json")
        for body, headers, expected in (
            (b" " * (2 << 20), (json_type,), 413),
            (bomb, (json_type, ("Content-Encoding", "gzip")), 413),
            (bomb[:100], (json_type, ("Content-Encoding", "gzip")), 400),
            (b"text", (json_type, ("Content-Encoding", "gzip")), 400),
            (b"[" * 200_000, (json_type,), 400),
            (b"{}", (json_type,), 422),
        ):
            got = api.send(Call("POST", "/scored_data", body, headers))[0]
            assert got == expected
        assert api.get("/status")["queue_size"] == 0


def refused(folder: Path, *options: str) -> str:
    code, _, errors = forks.call(["api", *options], folder)
    assert code == 2
    assert errors.count("\n") == 1
    return errors


QUICK = """
from hermes_rl.rl import ApiOptions, run_api
run_api(ApiOptions(port=0, head_s=0.5, body_s=0.2), lambda url: print(url, flush=True))
"""
HEAD = b"POST /register HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LATE = b"the head of the request is too slow\n"


@pytest.fixture(scope="module")
def quick() -> Iterator[int]:
    """The port of a server with little time for heads and bodies."""
    command = [sys.executable, "-c", QUICK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(":")[2])
        process.kill()


def answers_to(port: int, *parts: bytes) -> tuple[list[int], bytes]:
    """The statuses and the text of what answers a request that is sent in parts and not ended.
    A head that a busy machine sends too late is sent again."""
    while True:
        answer = b""
        client = socket.create_connection(("127.0.0.1", port), timeout=60)
        with client, contextlib.suppress(ConnectionError):
            for number, part in enumerate(parts):
                time.sleep(0.4 if number else 0.0)
                client.sendall(part)
            while received := client.recv(1 << 16):
                answer += received
        statuses = [int(text[:3]) for text in answer.split(b"HTTP/1.1 ")[1:]]
        if statuses and (statuses != [408] or LATE not in answer or b"\r\n\r\n" not in parts[0]):
            return statuses, answer


@pytest.mark.parametrize(
    ("sent", "statuses", "text"),
    [
        (b"", [408], LATE),
        (HEAD, [408], LATE),
        (HEAD + b"content-length: 9\r\n\r\n{", [408], b"the body is too slow: 1 bytes"),
        (HEAD + b"content-length: 2\r\n\r\n{}" + HEAD, [422, 408], LATE),
        (HEAD + b"origin: x\r\ncontent-length: 9\r\n\r\n{", [403, 408], LATE),
    ],
)
def test_a_request_that_trickles_ends_with_408(
    quick: int, sent: bytes, statuses: list[int], text: bytes
) -> None:
    found, answer = answers_to(quick, sent)
    assert found == statuses
    assert text in answer


def test_an_upload_that_is_slow_and_moves_is_taken(quick: int) -> None:
    """The first half takes more time than a small body has, and gives it a minute."""
    half = b" " * (1 << 20)
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % (2 * len(half) + 2)
    assert answers_to(quick, head + half, half + b"{}")[0] == [422]


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "hermes_rl.rl.atropos.server", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hermes-rl\[rl\]'"):
        exec("from hermes_rl.rl import *", {})
    assert main(["api"]) == 2
    errors = capsys.readouterr().err
    assert "pip install 'hermes-rl[rl]'" in errors
    assert errors.count("\n") == 1


def test_what_cannot_be_served_is_one_line(tmp_path: Path, api: Api) -> None:
    assert "--token-env" in refused(tmp_path, "--host", "0.0.0.0")
    assert "API_TOKEN is not set" in refused(tmp_path, "--token-env", "API_TOKEN")
    assert "another server uses it" in refused(tmp_path, "--port", "0")
    assert "Choose another --host or --port" in refused(tmp_path, "--port", str(api.port))
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE things (id)")
    assert "another program's" in refused(tmp_path, "--port", "0", "--state", "other.db")
    (tmp_path / "text.db").write_text("not a database, but a text of some length" * 100)
    assert "not a database" in refused(tmp_path, "--port", "0", "--state", "text.db")
