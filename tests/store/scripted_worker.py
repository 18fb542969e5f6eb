"""A worker process: makes the named attempts, and prints each that is durable.

Arguments: run directory, epoch, worker, then NUMBER:ATTEMPT of each attempt. With `hold` as the
last argument it then keeps its journal until it is killed. It prints each batch for its driver to
commit, and reads a line with the outcome. With HERMES_TEST_SUSPEND it is suspended at its crash
point instead of killed.
"""

import asyncio
import os
import signal
import sys
from contextlib import nullcontext
from unittest.mock import patch

import msgspec
import scripted_rows

from hermes_rl.errors import StoreError
from hermes_rl.store import CrashHook, JournalWriter, Prepared, Publisher, RunDir


async def pass_on(prepared: Prepared) -> None:
    """Let the driver commit a batch."""
    print("commit", msgspec.json.encode(prepared).hex(), flush=True)
    if outcome := (await asyncio.to_thread(sys.stdin.readline)).strip():
        raise StoreError(outcome)


async def main(path: str, epoch: int, worker: str, *attempts: str) -> None:
    hold = attempts[-1:] == ("hold",)
    async with JournalWriter(RunDir(path), epoch, worker) as journal:
        publisher = Publisher(journal, commit=pass_on)
        for count, name in enumerate(a for a in attempts if a != "hold"):
            number, attempt = map(int, name.split(":"))
            made = scripted_rows.make_finished(number, attempt, epoch)
            recorder = journal.recorder(made.key)
            for event in scripted_rows.make_events(number, attempt, epoch):
                recorder.record(event)
            await journal.finish(made)
            print(f"{number}:{attempt}", flush=True)
            if count == 2:
                await publisher.drain()
        if hold:
            recorder = journal.recorder(scripted_rows.attempt_key(99, 0, epoch))
            recorder.record(scripted_rows.make_begun(99, 0, epoch))
            print("holding", flush=True)
            await asyncio.sleep(600)
        await publisher.drain()


if __name__ == "__main__":
    suspended = bool(os.environ.get("HERMES_TEST_SUSPEND"))
    stop = patch.object(CrashHook, "die", lambda hook: os.kill(os.getpid(), signal.SIGSTOP))
    with stop if suspended else nullcontext():
        asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
