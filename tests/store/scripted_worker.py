"""A worker process: makes the attempts it is given, tells of each that is durable.

Arguments: run directory, epoch, worker, then NUMBER:ATTEMPT of each attempt. With `hold` as the
last argument it then keeps its journal until it is killed.
"""

import asyncio
import sys

import made_up

from hermes_rl.store import JournalWriter, Publisher, RunDir


async def main(path: str, epoch: int, worker: str, *attempts: str) -> None:
    hold = attempts[-1:] == ("hold",)
    async with JournalWriter(RunDir(path), epoch, worker) as journal:
        publisher = Publisher(journal)
        for count, given in enumerate(a for a in attempts if a != "hold"):
            number, attempt = map(int, given.split(":"))
            made = made_up.finished(number, attempt, epoch)
            recorder = journal.recorder(made.key)
            for event in made_up.story(number, attempt, epoch):
                recorder.record(event)
            await journal.finish(made)
            print(f"{number}:{attempt}", flush=True)
            if count == 2:
                await publisher.drain()
        if hold:
            recorder = journal.recorder(made_up.key(99, 0, epoch))
            recorder.record(made_up.begun(99, 0, epoch))
            print("holding", flush=True)
            await asyncio.sleep(600)
        await publisher.drain()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
