"""Seeded requests to a trajectory API, and the replies of Atropos 0.4.0's server to them.

    .venv-atropos/bin/python tests/rl/atropos_requests.py tests/data/atropos-replies.json.xz

records the replies (`make bench-atropos` makes that environment). The requests are made again from
their seeds, so only replies are stored.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

EPISODES = 6
"""Each has a server of its own."""
REQUESTS = 500
"""In each episode."""


class Call(NamedTuple):
    """One request."""

    method: str
    path: str
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


def call(method: str, path: str, body: Any = None, compress: str | None = None) -> Call:
    """A request with a JSON body. `compress` is gzip, or broken for a body that claims to be."""
    if body is None:
        return Call(method, path)
    data = json.dumps(body).encode()
    headers = [("Content-Type", "application/json")]
    if compress is not None:
        data = gzip.compress(data, mtime=0) if compress == "gzip" else b"no gzip" + data
        headers.append(("Content-Encoding", "gzip"))
    return Call(method, path, data, tuple(headers))


def trainer(draw: random.Random | None = None, **changed: Any) -> dict[str, Any]:
    """The body of a trainer's registration."""
    draw = draw or random.Random(0)
    body = {
        "wandb_group": draw.choice(["g", "h"]),
        "wandb_project": "p",
        "batch_size": draw.choice([2, 4, 4, 8, 8, 12, 16]),
        "max_token_len": draw.choice([64, 512, -1]),
        "checkpoint_dir": "/tmp/x",
        "save_checkpoint_interval": draw.choice([0, 10]),
        "starting_step": draw.choice([0, 0, 7]),
        "num_steps": 100,
    }
    return body | changed


def environment(draw: random.Random | None = None, **changed: Any) -> dict[str, Any]:
    """The body of an environment's registration."""
    draw = draw or random.Random(0)
    body: dict[str, Any] = {
        "max_token_length": draw.choice([0, 100, 2048]),
        "desired_name": draw.choice(["a", "a", "b"]),
        "weight": draw.choice([1.0, 1, 0.5, 0.0, -1.0, 3.0]),
        "group_size": draw.choice([1, 2, 4, 4, 4, 8, 0]),
    }
    if draw.random() < 0.3:
        body["min_batch_allocation"] = draw.choice([None, 0.0, 0.1, 0.25, 0.5, 0.9])
    return body | changed


def group(draw: random.Random | None = None, size: int | None = None, **changed: Any) -> Any:
    """The body of a submission."""
    draw = draw or random.Random(0)
    size = draw.choice([1, 2, 4, 4, 4, 4, 8, 3, 0]) if size is None else size
    tokens = [[draw.randrange(100) for _ in range(draw.randint(1, 3))] for _ in range(size)]
    body: dict[str, Any] = {
        "tokens": tokens,
        "masks": [[-100] * len(t) for t in tokens],
        "scores": [draw.choice([0, 1, 0.5, -2.25]) for _ in tokens],
    }
    extras: dict[str, Any] = {
        "advantages": draw.choice([None, [], [[0.5]] * size]),
        "inference_logprobs": [[-0.5] * len(t) for t in tokens],
        "messages": [[{"role": "user", "content": draw.choice([None, "é", ["x"]]), "k": 1}]] * size,
        "generation_params": {"temperature": 1.0, "deep": {"a": [1, None]}},
        "overrides": [{"set_advantage_to_zero": True}] * size,
        "group_overrides": {"group_size": size},
        "images": draw.choice([None, "data:", {"a": 1}]),
        "distill_token_ids": [[[1, 2]]] * size,
        "unknown": 1,
    }
    body |= {name: extras[name] for name in extras if draw.random() < 0.2}
    if draw.random() < 0.8:
        body["env_id"] = draw.choice([None, 0, 0, 0, 0, 1, 1, 2, 9, -1])
    return body | changed


STARTED = [
    call("GET", "/reset_data"),
    call("POST", "/register", trainer()),
    call("GET", "/batch"),
    call("POST", "/register-env", environment(weight=1.0, group_size=4, max_token_length=9)),
]
POLLED, POLLED_1 = (call("GET", "/status-env", {"env_id": number}) for number in (0, 1))
SENT_1 = call("POST", "/scored_data", group(env_id=1, size=1))
GZIPPED = (("Content-Type", "application/json"), ("Content-Encoding", "gzip"))
SIZES = ((4,), (1, 2, 4), (4, 4, 4, 2), (4, 8), (1, 2, 4, 8), (1, 2, 3, 4, 8, 0))
"""Of the groups in an episode."""
WRONG: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/register", {"wandb_group": "g"}),
    ("POST", "/register-env", {"weight": "heavy"}),
    ("POST", "/disconnect-env", {"env_id": 1.5}),
    ("POST", "/scored_data", {"tokens": [[1]], "masks": [[1]]}),
    ("POST", "/scored_data", {"tokens": [1], "masks": [[1]], "scores": [1]}),
    ("POST", "/scored_data", {"tokens": [[1.5]], "masks": [[1]], "scores": [1]}),
    ("POST", "/scored_data", {"tokens": [[1]], "masks": [[1]], "scores": [1], "env_id": "x"}),
    (
        "POST",
        "/scored_data",
        {"tokens": [[1]], "masks": [[1]], "scores": [1], "messages": [[{"role": "user"}]]},
    ),
    ("POST", "/scored_data_list", {"tokens": [[1]], "masks": [[1]], "scores": [1]}),
    ("GET", "/status-env", {}),
    ("GET", "/nowhere", None),
    ("GET", "/scored_data", None),
)
"""Requests that are refused whatever the state is."""
DIFFERENCES: tuple[tuple[list[Call], Call, int, int], ...] = (
    # (before, request, the status of the original, the status here); docs/atropos.md lists them.
    ([], call("POST", "/scored_data", group(scores=[float("nan")], size=1)), 200, 422),
    ([], call("POST", "/scored_data", group(images="\ud800", size=1)), 200, 422),
    ([], call("POST", "/scored_data", group(messages=[[5]], size=1)), 500, 422),
    ([], call("POST", "/scored_data", group(env_id=-1, size=1)), 500, 422),
    ([], Call("POST", "/scored_data", gzip.compress(b"{}")[:9], GZIPPED), 500, 400),
    ([], call("POST", "/register", trainer(num_steps=10**30)), 200, 422),
    ([], call("POST", "/register", trainer(wandb_group="\ud800")), 200, 422),
    ([], call("POST", "/register-env", environment(weight=float("nan"))), 200, 422),
    ([], call("GET", "/status-env", {"env_id": 0}), 500, 404),
    ([], call("GET", "/reset_data"), 200, 200),
    ([call("GET", "/reset_data")], call("GET", "/batch"), 500, 200),
    ([*STARTED, call("POST", "/disconnect-env", {"env_id": 0})], POLLED, 500, 200),
    ([*STARTED, call("POST", "/register-env", environment(group_size=0))], POLLED_1, 500, 200),
    ([*STARTED, call("POST", "/register-env", environment(group_size=-1))], SENT_1, 500, 200),
)
LAX = ({"tokens": [["7"]], "masks": [[True]], "scores": ["1e2"]},)
"""Values of other types that are converted."""


def episode(number: int) -> Iterator[Call]:
    """The requests of an episode, from a state without a trainer on."""
    draw = random.Random(number)
    sizes = SIZES[number % len(SIZES)]
    if number % 3:  # otherwise, what comes first is drawn too
        yield call("POST", "/register", trainer(draw))
        yield call("GET", "/batch")
    kinds = {
        "submit": 55, "list": 8, "batch": 20, "status_env": 12, "status": 4, "register_env": 5,
        "latest": 3, "info": 2, "wandb": 2, "register": 1, "reset": 0.4, "restart": 1,
        "disconnect": 1, "wrong": 3, "root": 1, "lax": 0.3,
    }  # fmt: skip
    for kind in draw.choices(list(kinds), list(kinds.values()), k=REQUESTS):
        if kind == "restart":
            yield call("GET", "/reset_data")
            yield call("POST", "/register", trainer(draw))
            yield call("GET", "/batch")
            yield call("POST", "/register-env", environment(draw, group_size=max(sizes)))
        else:
            yield _drawn(draw, kind, sizes)


def _drawn(draw: random.Random, kind: str, sizes: tuple[int, ...]) -> Call:
    compress = draw.choice([None, None, None, "gzip"])
    if kind == "submit":
        data = group(draw, draw.choice(sizes))
        return call("POST", "/scored_data", data, draw.choice([compress] * 20 + ["broken"]))
    if kind == "list":
        listed = [
            group(draw, draw.choice(sizes), env_id=draw.choice([0, 1, None]))
            for _ in range(draw.randint(0, 4))
        ]
        return call("POST", "/scored_data_list", listed, compress)
    if kind == "register":
        return call("POST", "/register", trainer(draw))
    if kind == "register_env":
        return call("POST", "/register-env", environment(draw))
    if kind == "status_env":
        return call("GET", "/status-env", {"env_id": draw.choice([0, 0, 0, 1, 1, 2, 5, -1])})
    if kind == "disconnect":
        return call("POST", "/disconnect-env", {"env_id": draw.choice([0, 1, 2, 9, -1])})
    if kind == "wrong":
        return call(*draw.choice(WRONG))
    if kind == "lax":
        return call("POST", "/scored_data", draw.choice(LAX))
    path = {"latest": "latest_example", "wandb": "wandb_info", "reset": "reset_data", "root": ""}
    return call("GET", f"/{path.get(kind, kind)}")


def record() -> list[list[tuple[int, Any]]]:
    """Status and body of each reply of Atropos' server."""
    from atroposlib.api.server import app
    from fastapi.testclient import TestClient

    client = TestClient(app, raise_server_exceptions=False)

    def send(request: Call) -> Any:
        headers = dict(request.headers)
        return client.request(request.method, request.path, content=request.body, headers=headers)

    for before, request, status, _ in DIFFERENCES:
        for earlier in before:
            send(earlier)
        assert send(request).status_code == status, (request, send(request).status_code)
    replies = []
    for number in range(EPISODES):
        app.state._state.clear()
        replies.append([])
        for request in episode(number):
            answer = send(request)
            replies[-1].append((answer.status_code, shown(answer.status_code, answer.content)))
    return replies


def shown(status: int, body: bytes) -> Any:
    """What is compared of a body: all but random numbers and the words of refusals."""
    if status >= 400:
        return None
    try:
        value = json.loads(body)
    except ValueError:
        return body.decode()
    if isinstance(value, dict) and "uuid" in value:
        assert isinstance(value["uuid"], int)
        return "uuid"
    return value


if __name__ == "__main__":
    with lzma.open(sys.argv[1], "wt", preset=9) as file:
        json.dump(record(), file, separators=(",", ":"))
