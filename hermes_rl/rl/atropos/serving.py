"""`hermes-rl env serve`: groups of `rollouts()` for a trajectory API.

The outbox is the run itself: a complete group is durable before it is sent, and acknowledged after
the API has taken it. A restart sends again what was not acknowledged, with the same
`Idempotency-Key`, so that `hermes-rl api` queues it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from hermes_rl.config import RunConfig
from hermes_rl.errors import UserError
from hermes_rl.rl.atropos.delivery import CHOICES, CannotSend, Forks, Wire, scored_groups
from hermes_rl.rl.live import LiveOptions, Policy, RolloutStream
from hermes_rl.rl.loading import settle_env
from hermes_rl.rl.selection import Selection
from hermes_rl.rl.staleness import Staleness

POLL_S = 1.0
"""Between two requests for the status."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Between two attempts at an API that does not answer."""
LONGEST_HINT_S = 60.0
"""Longest Retry-After to obey."""
_OTHER = "This server is not a trajectory API (hermes-rl api). Check the address"


@dataclass(frozen=True)
class ServeOptions:
    """How an environment is registered and delivered."""

    url: str
    """Of the API; may contain user and password."""
    token: str | None = None
    forks: Forks = "refuse"
    weight: float = 1.0
    min_batch_allocation: float | None = None
    max_batches_ahead: int = 3
    """Batches that may wait at the API before this environment pauses."""
    max_token_length: int = 2048
    """That the API weighs the environment by; it bounds nothing."""
    messages: bool = False
    keep_equal: bool = False
    """Send groups of equal rewards, whose advantages are all 0."""
    staleness: Staleness | None = None
    """Of groups that are older than the version that the trainer notes."""

    def __post_init__(self) -> None:
        least = self.min_batch_allocation
        if not 0 < self.weight < math.inf:
            raise UserError(f"--weight {self.weight:g} is not a number above 0")
        if least is not None and not 0 <= least <= 1:
            raise UserError(f"--min-batch-allocation {least:g} is not a number from 0 to 1")


@dataclass(frozen=True)
class Served:
    """An environment as it is registered."""

    name: str
    group_size: int
    run_id: str


class _Gone(Exception):
    """The API does not know this environment (any more)."""


class _Arrived(Exception):
    """The API has a group of this key, sent under another id or with other options: its reply was
    lost in a kill of this program."""


class ApiClient:
    """An environment's connection to a trajectory API. It waits for an API that is not there.

    Args:
        served: the environment; a restarted run gets its registration again.
        notify: called with what a user should know.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        served: Served,
        options: ServeOptions,
        notify: Callable[[str], None],
    ) -> None:
        self.options, self._session, self._notify = options, session, notify
        self._served = served
        self._url = options.url.rstrip("/")
        self._shown = _without_password(self._url)
        self.env_id: int | None = None
        self.batch_size, self.max_token_len, self.num_steps, self.step = -1, -1, -1, 0
        self._lock, self._versions = asyncio.Lock(), True

    async def register(self) -> dict[str, Any]:
        """Wait for a trainer, then register; returns the reply. Raises: UserError when the API
        refuses."""
        body = {
            "max_token_length": self.options.max_token_length,
            "desired_name": self._served.name,
            "weight": self.options.weight,
            "group_size": self._served.group_size,
            "min_batch_allocation": self.options.min_batch_allocation,
        }
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:8]
        key, reported = f"env-{self._served.run_id}-{digest}", False
        while (reply := await self.request("POST", "/register-env", body, key)).get(
            "status"
        ) != "success":
            if "status" not in reply:
                raise UserError(f"{self._shown}: {_OTHER}")
            if not reported:
                self._notify(f"{self._shown}: waiting for a trainer to start")
            reported = True
            await asyncio.sleep(POLL_S)
        self.env_id, self.num_steps = reply["env_id"], reply["num_steps"]
        info = await self.request("GET", "/info")
        self.batch_size, self.max_token_len = info["batch_size"], info["max_token_len"]
        size = self._served.group_size
        if self.batch_size > 0 and self.batch_size % size:
            raise UserError(
                f"{self._shown}: a batch has {self.batch_size} sequences, which groups of {size} do"
                " not fill. Change --repeats, or the trainer's batch_size"
            )
        self._notify(f"{self._shown}: registered as {reply['wandb_name']} (id {self.env_id})")
        return reply

    async def has_capacity(self) -> bool:
        """Whether fewer groups wait than this environment may have ahead of the trainer."""
        while True:
            asking = self.env_id
            with contextlib.suppress(_Gone):
                status = await self.request("GET", "/status-env", {"env_id": asking})
                if status["current_step"] >= self.step:
                    break
            # Unknown, or an earlier step: a reset or a restart may have given its id to another.
            await self.register_again(asking)
        self.step = status["current_step"]
        ahead, size = self.options.max_batches_ahead, self._served.group_size
        if self.batch_size < 1 or ahead < 1:
            return True
        minimum = self.options.min_batch_allocation or 0.0
        share = status["unallocated_fraction"] + minimum
        wanted = int(self.batch_size * share) * ahead // size - status["queue_size"]
        least = math.ceil(minimum * self.batch_size * ahead / size) - status["self_queue_size"]
        return wanted > 0 or (minimum > 0 and least > 0)

    async def policy_version(self) -> int | None:
        """Return the version of the weights that the trainer noted; None if it notes none, or the
        API is that of Atropos."""
        if not self._versions:
            return None
        try:
            version: int | None = (await self.request("GET", "/policy_version"))["version"]
        except UserError:
            self._versions, version = False, None
        return version

    async def wait_for_capacity(self) -> None:
        """Return once a group may be sent."""
        while True:
            if await self.has_capacity():
                return
            await asyncio.sleep(POLL_S)

    async def send(self, groups: list[dict[str, Any]], key: str) -> None:
        """Deliver groups, all or none. Raises: UserError when the API refuses them."""
        while True:
            try:
                listed = [{**group, "env_id": self.env_id} for group in groups]
                if len(listed) == 1:
                    await self.request("POST", "/scored_data", listed[0], key)
                else:
                    await self.request("POST", "/scored_data_list", listed, key)
                return
            except _Arrived:
                return
            except _Gone:
                await self.register_again(listed[0]["env_id"])

    async def register_again(self, lost: int | None) -> None:
        """Register with an API that has lost its state, and environment `lost` with it."""
        async with self._lock:
            if self.env_id == lost:
                self.step = 0
                self._notify(f"{self._shown}: has lost environment {lost}; registering again")
                await self.register()

    async def disconnect(self) -> None:
        """Leave, so that the API does not wait for this environment."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, UserError, _Gone):
            async with asyncio.timeout(5):
                await self.request("POST", "/disconnect-env", {"env_id": self.env_id})

    async def request(
        self, method: str, path: str, body: Any = None, key: str | None = None
    ) -> dict[str, Any]:
        """Return the JSON of the reply; waits while the API is away, busy or failing.

        Raises: UserError when it refuses; _Gone when it does not know the environment.
        """
        headers = {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        if data is not None and len(data) >= 1024:
            data = await asyncio.to_thread(gzip.compress, data, 1)
            headers["Content-Encoding"] = "gzip"
        if key is not None:
            headers["Idempotency-Key"] = key
        if self.options.token is not None:
            headers["Authorization"] = f"Bearer {self.options.token}"
        wait, reported = FIRST_WAIT_S, False
        while True:
            try:
                reply = self._session.request(method, self._url + path, data=data, headers=headers)
                async with reply as answer:
                    text = await answer.text()
                    if answer.status == 200 and isinstance(found := json.loads(text), dict):
                        return found
                    status, after = answer.status, answer.headers.get("Retry-After", "")
            except aiohttp.InvalidURL:
                raise UserError(
                    f"{self._shown}: no URL of a trajectory API, such as http://127.0.0.1:8000"
                ) from None
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                status, after, text = 0, "", str(error) or type(error).__name__
            self._check(path, status, text)
            if not reported and status != 503:
                self._notify(f"{self._shown}: {text[:200].strip()}; trying again until it answers")
                reported = True
            hint = min(float(after), LONGEST_HINT_S) if after.isdecimal() else wait
            await asyncio.sleep(hint)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _check(self, path: str, status: int, text: str) -> None:
        """Raises: UserError, _Gone, _Arrived."""
        if path == "/status-env" and status in (404, 500):  # the original answers 500
            raise _Gone
        if status == 422 and "no environment" in text:
            raise _Gone
        if status == 422 and path.startswith("/scored_data") and "Idempotency-Key was used" in text:
            raise _Arrived
        if status in (401, 403):
            refused = "It refuses the token" if self.options.token else "Name its token"
            raise UserError(f"{self._shown}: {status}. {refused} (--api-token-env)")
        if path == "/register-env" and status in (404, 405, 501):
            raise UserError(f"{self._shown}: {status}. {_OTHER}")
        if 400 <= status < 500 and status not in (408, 429):
            raise UserError(f"{self._shown}{path}: {status} {text[:500].strip()}")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


async def serve_groups(
    config: RunConfig, options: ServeOptions, notify: Callable[[str], None]
) -> Mapping[str, int]:
    """Deliver the groups of a live run until it ends, or the trainer has made its last step.

    Returns: counts of complete `groups`, `sent`, `rejected` (and `rejected REASON`, for what the
        stream itself rejects), and of `tokens` to train and those `not_sent`.

    Raises: UserError when the API refuses, when rollouts fork and that is refused, or without
        exact tokens; RolloutsStopped.
    """
    counts: Counter[str] = Counter(groups=0, sent=0, rejected=0, tokens=0, not_sent=0)
    settled, opened = settle_env(config)
    assert opened is not None
    size = settled.dataset.repeats
    Wire(size, options.forks)  # refuses what cannot work, before anything is paid
    whole = 2 if options.forks == "rescale" else size
    selection = Selection(min_valid=whole, refill=size, drop_equal=not options.keep_equal)
    policy = Policy(model=config.model.name)
    ahead = max(2, 2 * -(-(config.run.concurrency or 64) // size))
    stream = RolloutStream(
        config,
        LiveOptions(policy, selection, "grpo", ahead, None, options.staleness or Staleness("none")),
    )
    timeout = aiohttp.ClientTimeout(total=300, sock_connect=10)
    async with stream, aiohttp.ClientSession(timeout=timeout) as session:
        _check_tokens(stream, options.forks)
        served = Served(opened.env.name, size, stream.run.run_id)
        client = ApiClient(session, served, options, notify)
        await client.register()
        wire = Wire(size, options.forks, client.max_token_len, options.messages)
        pacing = asyncio.create_task(_pace(client, policy))
        work = asyncio.create_task(_deliver_all(stream, client, wire, counts))
        try:
            await asyncio.wait((pacing, work), return_when=asyncio.FIRST_COMPLETED)
            if pacing.done():
                pacing.result()
                notify(f"the trainer has made its {client.num_steps} steps")
            else:
                work.result()
        finally:
            for task in (pacing, work):
                task.cancel()
            await asyncio.gather(pacing, work, return_exceptions=True)
            await client.disconnect()
    for fate, many in stream.counts().items():
        if fate.startswith("rejected "):  # before the stream yields them, with the reason
            counts[fate] = many
            counts["groups"] += many
            counts["rejected"] += many
    return counts


def _check_tokens(stream: RolloutStream, forks: Forks) -> None:
    """Raises: UserError."""
    forking = [line for line in stream.require_ids().template if ": forks: " in line]
    if forking and forks == "refuse":
        raise UserError(
            f"the chat template makes conversations fork ({forking[0]}). A forked rollout has"
            f" several sequences, and the trainer compares sequences. To send them, {CHOICES}"
        )


async def _deliver_all(
    stream: RolloutStream, client: ApiClient, wire: Wire, counts: Counter[str]
) -> None:
    async for group in stream:
        counts["groups"] += 1
        try:
            scored = scored_groups(group, wire, counts)
        except CannotSend as error:
            counts["rejected"] += 1
            await group.reject(str(error))
            continue
        await client.wait_for_capacity()
        await client.send(scored, f"{stream.run.run_id}-{group.group_id}")
        await group.ack(step=client.step)
        counts["sent"] += 1


async def _pace(client: ApiClient, policy: Policy) -> None:
    """Start no rollouts while enough groups wait for the trainer; returns after its last step."""
    while True:
        free = await client.has_capacity()
        if free == policy.paused:
            await (policy.resume() if free else policy.pause())
        version = await client.policy_version()
        if version is not None and version != policy.version:
            await policy.set_version(version, in_pause=False)
        if 0 < client.num_steps <= client.step:
            return
        await asyncio.sleep(POLL_S)
