"""Roll out `guess_server.py` with the project's own Python; prints what the rows have, as JSON.

Argument: the server's address. An oracle plays: the second rollout guesses wrong twice and sends
something that is not an action.
"""

import asyncio
import json
import sys

from hermes_rl.rl import arun_trial

PLAYS = [["10"], ["99", "many", '{"number": 12}', '{"number": 11}']]


async def main(url: str) -> None:
    rows = await arun_trial(
        "hermes_rl.rl.openenv:OpenEnv",
        tasks=2,
        config={"base_url": url, "resets": [{"seed": 0}, {"seed": 1}]},
        solution=lambda task: json.dumps(PLAYS[task.metadata["reset"]["seed"]]),
    )
    found = [
        {
            "reward": row.reward,
            "error": row.error,
            "messages": [json.loads(m) for m in row.messages],
        }
        for row in rows
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
