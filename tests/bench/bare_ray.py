"""Ray alone: `ray.init` as our runs do it, and two actors that answer once."""

from __future__ import annotations

import logging
from typing import Any

import ray


class Actor:
    """Does nothing."""

    async def answer(self) -> int:
        return 1


def main() -> None:
    """See the module."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, **quiet)
    actors = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(2)]
    assert ray.get([actor.answer.remote() for actor in actors]) == [1, 1]
    ray.shutdown()


if __name__ == "__main__":
    main()
