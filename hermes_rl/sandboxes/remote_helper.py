"""Runs sandboxes where it stands, for a worker elsewhere that calls it over one channel.

It is the far end of every remote backend (`remote`): the sandboxes are those of bubblewrap, or
plain processes, of the machine that it runs on. So commands, timeouts and grading need no round
trip, and the watchdog of that machine ends what a lost connection leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import sys
from asyncio.streams import FlowControlMixin
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hermes_rl.errors import SandboxDied, SandboxStartError
from hermes_rl.sandboxes import limits, probe
from hermes_rl.sandboxes.base import (
    Connection,
    GradingSpec,
    Process,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxSnapshot,
    SandboxSpec,
)
from hermes_rl.sandboxes.bubblewrap import Bubblewrap
from hermes_rl.sandboxes.none import Subprocess
from hermes_rl.sandboxes.recipe import WORKSPACE
from hermes_rl.sandboxes.remote_frames import (
    BINARIES,
    CHUNK,
    SILENCE_S,
    Garbled,
    Header,
    NoPlace,
    describe,
    pack,
    pieces,
    receive,
)
from hermes_rl.sandboxes.slots import Home, default_state_dir, lock, workers
from hermes_rl.sandboxes.watchdog import remove_tree

Result = Header | tuple[Header, bytes | Path] | None
"""What a call returns, and data that goes with it; a file is removed when it was sent."""


def choose_backend(state: Path, settings: Mapping[str, Any]) -> tuple[SandboxBackend, str]:
    """bubblewrap where it works, else plain processes if those are allowed; and its name.

    Raises: SandboxStartError.
    """
    if settings["plain"] != "always":
        found = probe.probe_machine()
        if found.works:
            return Bubblewrap(state_dir=state), "bubblewrap"
        if settings["plain"] != "allowed":
            raise SandboxStartError(
                f"{found.message}. Or add --allow-unsandboxed: commands then run as the user that "
                "you log in as, with all that this user can read"
            )
    return Subprocess(state_dir=state), "none"


class Leased:
    """One sandbox, with what belongs to it here."""

    def __init__(self, sandbox: Sandbox, place: int | None) -> None:
        self.sandbox = sandbox
        self.processes: dict[int, Process] = {}
        self._place = place

    async def aclose(self) -> None:
        """Close it, and free its place. Idempotent."""
        try:
            await self.sandbox.aclose()
        finally:
            if self._place is not None:
                os.close(self._place)
                self._place = None


class Helper:
    """Takes calls and answers them.

    Args:
        root: the state folder.
        writer: the channel to the worker.
    """

    def __init__(self, root: Path, writer: asyncio.StreamWriter) -> None:
        self._root, self._writer = root, writer
        self._home = Home(root)
        self._files = self._home.new_box()
        self._named = 0
        self._backend: SandboxBackend | None = None
        self._places = 0
        self._alone = False
        """The machine has this one sandbox: its workspace is at /workspace too."""
        self.silence_s = SILENCE_S
        self._leased: dict[int, Leased] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._arriving: dict[int, Arriving] = {}

    def take(self, header: Header, data: bytes) -> None:
        """Take a frame: a part of a call's data, a call, its cancellation, or a sign of life."""
        number = header.get("id")
        if number is None:
            self._writer.write(pack({"alive": True}))
        elif "part" in header:
            arriving = self._arriving.get(number)
            if arriving is None:
                arriving = self._arriving[number] = Arriving(self._new_file())
            arriving.feed(data)
        elif "cancel" in header:
            if (task := self._calls.get(number)) is not None:
                task.cancel()
        else:
            self._calls[number] = asyncio.create_task(self._answer(number, header, data))

    def _new_file(self) -> Path:
        self._named += 1
        return self._files / f"f{self._named}"

    async def _answer(self, number: int, header: Header, data: bytes) -> None:
        arriving = self._arriving.pop(number, None)
        try:
            if arriving is not None:
                arriving.close()
            payload = Payload(data, arriving.path if arriving is not None else None, self._new_file)
            found = await self._verbs[header["call"]](self, header["args"], payload)
            result, more = found if isinstance(found, tuple) else (found, b"")
            await self._send(number, result or {}, more)
        except asyncio.CancelledError:
            self._writer.write(pack({"id": number, "cancelled": True}))
        except Exception as error:  # the worker raises it
            self._writer.write(pack({"id": number, "error": describe(error)}))
        finally:
            self._calls.pop(number, None)
            if arriving is not None:
                arriving.path.unlink(missing_ok=True)

    async def _send(self, number: int, result: Header, data: bytes | Path) -> None:
        try:
            if isinstance(data, bytes) and len(data) <= CHUNK:
                self._writer.write(pack({"id": number, "ok": result}, data))
                return
            for piece in pieces(data):
                self._writer.write(pack({"id": number, "part": True}, piece))
                await self._writer.drain()
            self._writer.write(pack({"id": number, "ok": result}))
        finally:
            if isinstance(data, Path):
                data.unlink(missing_ok=True)

    def _sandbox(self, args: Header) -> Sandbox:
        leased = self._leased.get(args["sandbox"])
        if leased is None:
            raise SandboxDied("the sandbox is closed")
        return leased.sandbox

    async def open(self, args: Header, payload: Payload) -> Result:
        """Clean up after workers that are gone, and choose the backend. Returns its name."""
        await asyncio.to_thread(self._home.guard)
        backend, isolation = await asyncio.to_thread(choose_backend, self._root, args)
        self._backend, self._places = backend, int(args["slots"])
        self._alone = args["plain"] == "always"
        self.silence_s = float(args["silence_s"])
        return {"isolation": isolation}

    def _take_place(self) -> int | None:
        """Lock a place of this machine, which all workers share. Raises: NoPlace."""
        if not self._places:
            return None
        folder = self._root / "places"
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(self._places):
            if (held := lock(folder / str(number))) is not None:
                return held
        raise NoPlace(f"all {self._places} places are taken")

    async def lease(self, args: Header, payload: Payload) -> Result:
        """Start a sandbox. Returns its number and what it provides."""
        assert self._backend is not None, "opened before"
        number, spec = int(args["sandbox"]), dict(args["spec"])
        saved = spec.pop("snapshot")
        snapshot = None
        if saved is not None:
            snapshot = SandboxSnapshot(self._files / saved["name"], saved["shared"])
        bounds = SandboxLimits(**spec.pop("limits"))
        network = spec.pop("network")

        def connected(connection: Connection) -> None:
            self._writer.write(pack({"sandbox": number, "connection": asdict(connection)}))

        place = self._take_place()
        try:
            sandbox = await self._backend.lease(
                SandboxSpec(
                    **spec,
                    limits=bounds,
                    network=network if isinstance(network, bool) else tuple(network),
                    snapshot=snapshot,
                    on_connection=connected,
                )
            )
        except BaseException:
            if place is not None:
                os.close(place)
            raise
        self._leased[number] = Leased(sandbox, place)
        info = sandbox.info
        workspace = getattr(sandbox, "workspace", WORKSPACE)
        if self._alone and not os.path.lexists(WORKSPACE):
            with contextlib.suppress(OSError):  # not root
                os.symlink(workspace, WORKSPACE)
        return {
            "image": info.image,
            "limits": info.limits,
            "folders": {"workspace": workspace, "scratch": sandbox.scratch},
        }

    async def run(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.run`."""
        result = await self._sandbox(args).run(
            args["command"],
            timeout_s=args["timeout_s"],
            cwd=args["cwd"],
            stdin=payload.data if args["stdin"] else None,
            max_output_bytes=args["most"],
        )
        return {k: v for k, v in asdict(result).items() if k != "raw"}, result.raw

    async def new_session(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.new_session`."""
        session = await self._sandbox(args).new_session()
        self._leased[args["session"]] = Leased(session, None)
        return None

    async def start_process(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.start_process`."""
        process = await self._sandbox(args).start_process(
            args["command"], cwd=args["cwd"], lossless=args["lossless"]
        )
        processes = self._leased[args["sandbox"]].processes
        number = len(processes)
        processes[number] = process
        return {"pid": process.pid, "process": number}

    async def process(self, args: Header, payload: Payload) -> Result:
        """A verb of a background process."""
        self._sandbox(args)
        process = self._leased[args["sandbox"]].processes[args["process"]]
        match args["verb"]:
            case "poll":
                return {"code": await process.poll()}
            case "wait":
                code = await process.wait(args["timeout_s"], output=args["output"])
                return {"code": code}
            case "write":
                await process.write(payload.data)
            case "close":
                await process.close_input()
            case "read":
                return {}, await process.read()
            case "kill":
                await process.kill()
        return None

    async def read_file(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.read_file`."""
        return {}, await self._sandbox(args).read_file(args["path"])

    async def write_file(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.write_file`."""
        await self._sandbox(args).write_file(args["path"], payload.data)
        return None

    async def upload(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.upload`."""
        await self._sandbox(args).upload(payload.file(), args["path"])
        return None

    async def download(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.download`."""
        local = self._new_file()
        await self._sandbox(args).download(args["path"], local)
        return {}, local

    async def grade(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.grade`."""
        data, files, at = payload.data, {}, 0
        for name, size in args["files"]:
            files[name] = data[at : at + size]
            at += size
        spec = GradingSpec(files=files, **args["spec"])
        result = asdict(await self._sandbox(args).grade(spec))
        report: bytes = result.pop("report")
        return result, report

    async def read_left(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.read_left`."""
        return {}, await self._sandbox(args).read_left(args["path"])

    async def pack_left(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.pack_left`."""
        local = self._new_file()
        await self._sandbox(args).pack_left(local)
        return ({"kept": True}, local) if local.exists() else {"kept": False}

    async def unpack(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.unpack`."""
        await self._sandbox(args).unpack(payload.file())
        return None

    async def snapshot(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.snapshot`: returns the names of its files, to be fetched."""
        folder = self._new_file()
        if not await self._sandbox(args).snapshot(folder):
            return {"saved": False}
        return {"saved": True, "name": folder.name, "files": sorted(os.listdir(folder))}

    async def fetch(self, args: Header, payload: Payload) -> Result:
        """Send a file of a snapshot, and forget it."""
        return {}, self._files / args["name"] / args["file"]

    async def keep(self, args: Header, payload: Payload) -> Result:
        """Take a file of a snapshot that sandboxes will start from."""
        folder = self._files / args["name"]
        folder.mkdir(exist_ok=True)
        await asyncio.to_thread(shutil.move, payload.file(), folder / args["file"])
        return None

    async def drop(self, args: Header, payload: Payload) -> Result:
        """Remove a snapshot."""
        await asyncio.to_thread(remove_tree, self._files / args["name"])
        return None

    async def close(self, args: Header, payload: Payload) -> Result:
        """See `Sandbox.aclose`."""
        if (leased := self._leased.pop(args["sandbox"], None)) is not None:
            await leased.aclose()
        return None

    async def listed(self, args: Header, payload: Payload) -> Result:
        """Workers of this machine and their sandboxes, our own aside."""
        found = await asyncio.to_thread(workers, self._root)
        return {"workers": [asdict(w) for w in found if w.name != self._home.owner]}

    async def reap(self, args: Header, payload: Payload) -> Result:
        """Remove what dead workers left. Returns how much, and who is left."""
        return await asyncio.to_thread(limits.reap_counted, self._root)

    _verbs: Mapping[str, Callable[[Helper, Header, Payload], Awaitable[Result]]] = {
        verb.__name__: verb
        for verb in (
            *(open, lease, run, start_process, process, read_file, write_file, upload, download),
            *(grade, read_left, pack_left, unpack, snapshot, fetch, keep, drop, close, listed),
            *(reap, new_session),
        )
    }

    async def aclose(self) -> None:
        """End everything."""
        for task in [*self._calls.values()]:
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        closing = [leased.aclose() for leased in self._leased.values()]
        await asyncio.gather(*closing, return_exceptions=True)
        if self._backend is not None:
            await self._backend.aclose()
        await asyncio.to_thread(self._home.close)


class Arriving:
    """The data of a call, in parts, on its way into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._error: OSError | None = None

    def feed(self, data: bytes) -> None:
        """Write a part; what fails is raised by `close`: the other parts come all the same."""
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error

    def close(self) -> None:
        """Raises: OSError, as of a full disk."""
        self._file.close()
        if self._error is not None:
            raise OSError(f"the data cannot be kept there: {self._error}") from self._error


class Payload:
    """The data that came with a call."""

    def __init__(self, data: bytes, path: Path | None, new_file: Callable[[], Path]) -> None:
        self._data, self._path, self._new_file = data, path, new_file

    @property
    def data(self) -> bytes:
        """All of it."""
        return self._data if self._path is None else self._path.read_bytes()

    def file(self) -> Path:
        """A file with it, which may be moved away."""
        if self._path is None:
            self._path = self._new_file()
            self._path.write_bytes(self._data)
        return self._path


async def serve(root: Path, nonce: str) -> None:
    """Answer calls until the channel ends, or is silent for too long."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=4 * CHUNK)
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else writes to it
    source = os.fdopen(0, "rb", buffering=0)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, protocol = await loop.connect_write_pipe(FlowControlMixin, channel)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    helper = await asyncio.to_thread(Helper, root, writer)
    writer.write(f"{nonce}\n".encode())
    try:
        while True:
            async with asyncio.timeout(helper.silence_s):
                header, data = await receive(reader.readexactly)
            helper.take(header, data)
    except (asyncio.IncompleteReadError, TimeoutError, Garbled, OSError):
        pass
    finally:
        await helper.aclose()


def main(nonce: str, base: str) -> None:
    """Run until the channel ends.

    Args:
        nonce: written when the helper is ready, after whatever the login printed.
        base: a folder for all that is kept here; empty takes the machine's temporary folder.
    """
    os.umask(0o022)
    sys.path.append(str(Path(__file__).parents[2] / BINARIES / platform.machine()))
    root = Path(base) / default_state_dir().name if base else default_state_dir()
    try:
        asyncio.run(serve(root, nonce))
    except SandboxStartError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"its files cannot be kept there: {error}")
    finally:
        with contextlib.suppress(OSError):
            os.close(0)
