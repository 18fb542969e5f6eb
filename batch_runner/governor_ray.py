"""The governor on Ray: the driver's end, which keeps one alive, and the workers' way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import msgspec

from batch_runner.governor_actor import GovernorActor
from batch_runner.wire import NAMESPACE
from hermes_rl.models.limits.governor_wire import (
    Charter,
    Grant,
    Report,
    Summary,
    decode_grant,
    decode_summary,
    encode_charter,
    encode_report,
)
from hermes_rl.models.limits.share import LineDown

AGAIN_S = 0.2
"""Between a governor's death and the next one, and between tries to make that."""

SUMMARY_S = 10.0


class RayGovernor:
    """See `batch_runner.governing.GovernorHost`. Entered on the driver's loop, Ray being up.

    Args:
        name: of the actor; workers find it by this.
        watch: called with the process of each governor.
        lost: called when one died, with the reason.
    """

    def __init__(
        self,
        charter: Charter,
        name: str,
        *,
        watch: Callable[[int], None] = lambda pid: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._charter, self._name = charter, name
        self._watch, self._lost = watch, lost
        self._actor: Any = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._actor = self._make(self._charter)  # it starts while the workers do
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *error: object) -> None:
        import ray

        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait((self._keeper,))
        ray.kill(self._actor, no_restart=True)

    def forget(self, worker: str) -> None:
        """See `GovernorHost`."""
        self._actor.forget.remote(worker)

    async def summary(self) -> Summary:
        """See `GovernorHost`."""
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(SUMMARY_S):
                return decode_summary(await self._actor.summary.remote())
        except (RayError, TimeoutError):
            return Summary()

    async def _keep(self) -> None:
        """Make a new governor whenever one died."""
        import ray
        from ray.exceptions import RayError

        successor = msgspec.structs.replace(self._charter, successor=True)
        while True:
            try:
                self._watch(await self._actor.pid.remote())
                await self._actor.stay.remote()
            except RayError:
                self._lost()
                ray.kill(self._actor, no_restart=True)  # Ray keeps a dead actor's name otherwise
                self._actor = await self._succeed(successor)

    async def _succeed(self, charter: Charter) -> Any:
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                return self._make(charter)
            except ValueError:
                pass  # the name is still the dead one's

    def _make(self, charter: Charter) -> Any:
        import ray

        options: dict[str, Any] = {
            "name": self._name,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return ray.remote(GovernorActor).options(**options).remote(encode_charter(charter))


class RayLine:
    """A worker's way to the governor (`hermes_rl.models.limits.share.Line`)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = None

    async def exchange(self, report: Report) -> Grant:
        """Raises: LineDown."""
        from ray.exceptions import RayError

        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._find)
            return decode_grant(await self._actor.exchange.remote(encode_report(report)))
        except (RayError, ValueError):  # ValueError: there is no actor of that name, yet or again
            self._actor = None
            raise LineDown from None

    def _find(self) -> Any:
        import ray

        return ray.get_actor(self._name, namespace=NAMESPACE)
