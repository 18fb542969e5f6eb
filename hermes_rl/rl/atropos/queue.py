"""The state of a trajectory API server: trainer, environments, queued groups, batches.

All of it is one SQLite database with a mirror in memory. Each request is one transaction, so that a
kill leaves either all of it or nothing; after a failed one the mirror is read again.

Two profiles. `exact` does what Atropos 0.4.0's server does, also where that surprises. The safe
profile bounds the queue, refuses groups that no trainer could use, hands batches out in the order
of the queue, and lets silent environments time out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from hermes_rl.errors import HermesError, UserError
from hermes_rl.rl.atropos.packing import Packable, fill_group, form_batch

Reply = dict[str, Any]
Profile = Literal["safe", "exact"]

KEPT_REPLIES = 10_000
"""Replies that are kept for requests that come again."""
KEPT_BATCHES = 8
"""Delivered batches that are kept for a trainer that asks again with the same key."""
REPEAT_S = 120.0
"""How long the body of a request whose reply may be lost is recognised."""
LEAST_WEIGHT = 0.01
EXAMPLE = "tokens masks scores advantages ref_logprobs generation_params inference_logprobs"
_APPLICATION = 0x41545250
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY CHECK (id = 0), value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, sent INTEGER NOT NULL DEFAULT 0
);
-- In a batch: batch and rank. In the queue: rank only. Neither: waits until groups of its
-- environment add up to the group size.
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT, env TEXT, size INTEGER NOT NULL, rank INTEGER,
    batch INTEGER, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS of_batch ON groups (batch);
CREATE TABLE IF NOT EXISTS replies (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, digest BLOB NOT NULL,
    reply TEXT NOT NULL, at REAL NOT NULL
);
"""
_WAITING, _HANDED_OUT, _DELIVERED = 0, 1, 2
"""Values of `batches.sent`."""


class Refusal(HermesError):
    """A request that is refused; nothing was changed.

    Args:
        status: of the HTTP reply.
        retry_after: seconds after which it may succeed.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class ApiLimits:
    """Bounds of the safe profile."""

    max_batches: int = 16
    """Batches of sequences that may be queued."""
    env_timeout: float = 120.0
    """Seconds of silence after which an environment does not count as connected."""


class Registration(msgspec.Struct):
    """What an environment registered."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None
    wandb_name: str = ""
    connected: bool = True


class State(msgspec.Struct):
    """All but the groups. `started` is None until a trainer registers or the data are reset."""

    open: bool = False
    """There is a queue: made by a trainer, or by a group that came before it."""
    started: bool | None = None
    group: str | None = None
    project: str | None = None
    batch_size: int = -1
    max_token_len: int | None = None
    step: int = 0
    checkpoint_dir: str = ""
    save_checkpoint_interval: int | None = None
    num_steps: int = -1
    envs: list[Registration] = []
    latest: int | None = None
    """Id of the last queued group."""
    policy_version: int | None = None
    """Of the weights, as the trainer says."""


@dataclass(frozen=True)
class NewGroup:
    """A submitted group."""

    env: int | None
    size: int
    body: bytes
    """Its JSON, as it is handed out."""


class Queued(NamedTuple):
    """A group of the queue or of a buffer."""

    id: int
    group: Packable


class Sent(NamedTuple):
    """The reply to a submission, and what identifies the submission."""

    reply: Reply
    digest: bytes


class Handout(NamedTuple):
    """A reply to a trainer that asks for a batch."""

    batch: int | None
    """Id, to confirm that it was sent."""
    body: bytes


class TrajectoryQueue:
    """The server's state. Methods may be called from any thread; each is one transaction.

    Args:
        path: of the database; None keeps it in memory.

    Raises: UserError when the file is not such a database, or is in use.
    """

    def __init__(
        self, path: Path | None, profile: Profile, limits: ApiLimits = ApiLimits()
    ) -> None:
        self.exact, self.limits = profile == "exact", limits
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._db = _open(path)
        self._seen: dict[int, float] = {}
        self._began = time.monotonic()
        self._unsent: dict[bytes, tuple[Reply, float]] = {}
        self._saved = b""
        self._queue: list[Queued] = []
        self._buffers: dict[int | None, list[Queued]] = {}
        self._waiting: list[int] = []
        with self._translated(path):
            self._recover()
            self._load()

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    # The trainer.

    def register(self, wanted: dict[str, Any]) -> None:
        """Register a trainer. In the exact profile only the first one counts until a reset."""
        with self._transaction() as state:
            if not self.exact and wanted["batch_size"] < 1:
                raise Refusal(422, "batch_size must be at least 1")
            if self.exact and state.open:
                return
            state.open, state.policy_version = True, None
            state.started = state.started is True and not self.exact
            state.group, state.project = wanted["wandb_group"], wanted["wandb_project"]
            state.step = wanted["starting_step"]
            for name in ["batch_size", "max_token_len", "checkpoint_dir", "num_steps"]:
                setattr(state, name, wanted[name])
            state.save_checkpoint_interval = wanted["save_checkpoint_interval"]
            if self.exact:
                state.envs = []
            else:  # what an earlier trainer may not have received
                self._db.execute(
                    "UPDATE batches SET sent = ?, key = NULL WHERE sent = ?",
                    (_WAITING, _HANDED_OUT),
                )
                self._waiting = self._waiting_batches()

    def set_policy_version(self, version: int) -> None:
        """Note the version of the weights that the trainer has loaded."""
        with self._transaction() as state:
            state.policy_version = version

    def reset(self) -> None:
        """Forget the trainer, all groups and, in the exact profile, the environments."""
        with self._transaction() as state:
            if not state.open:
                return
            state.open, state.started = False, False
            state.group = state.project = None
            state.batch_size = state.num_steps = -1
            state.step = 0
            if self.exact:
                state.envs = []
                self._db.execute("DELETE FROM replies WHERE reply LIKE '%env_id%'")
            self._db.execute("DELETE FROM batches")
            self._db.execute("DELETE FROM groups WHERE id IS NOT ?", (state.latest,))
            self._db.execute("UPDATE groups SET batch = 0, rank = 0")
            self._queue, self._buffers, self._waiting = [], {}, []
            self._unsent.clear()

    def take(self, key: str | None) -> Handout:
        """Hand out a batch. The same key gets the same batch again, while it is kept."""
        with self._transaction() as state:
            if state.started is None:
                message = "Trainer not registered. Call /register first."
                return Handout(None, _json({"status": "error", "message": message, "batch": []}))
            known = key and self._db.execute("SELECT id FROM batches WHERE key = ?", (key,))
            if known and (row := known.fetchone()):
                self.counts["batches_repeated"] += 1
                return self._handout(row[0])
            state.started = True
            if not self._waiting:
                self._form_batches(state)
            if not self._waiting:
                return Handout(None, _json({"batch": None}))
            batch = self._waiting.pop(-1 if self.exact else 0)
            self._db.execute(
                "UPDATE batches SET sent = ?, key = ? WHERE id = ?", (_HANDED_OUT, key, batch)
            )
            return self._handout(batch)

    def confirm(self, batch: int) -> None:
        """Note that a batch was sent; of those, the last few are kept."""
        with self._transaction() as state:
            self.counts["batches_delivered"] += 1
            self._db.execute("UPDATE batches SET sent = ? WHERE id = ?", (_DELIVERED, batch))
            self._db.execute(
                "DELETE FROM batches WHERE id <= ? AND (sent = ? OR sent = ? AND key IS NOT NULL)",
                (batch - KEPT_BATCHES, _DELIVERED, _HANDED_OUT),
            )
            self._db.execute(
                "DELETE FROM groups WHERE batch IS NOT NULL AND id IS NOT ?"
                " AND batch NOT IN (SELECT id FROM batches)",
                (state.latest,),
            )

    def put_back(self, batch: int) -> None:
        """Take back a batch that could not be sent: it is the next one."""
        with self._transaction():
            taken = self._db.execute(
                "UPDATE batches SET sent = ? WHERE id = ? AND sent = ?",
                (_WAITING, batch, _HANDED_OUT),
            )
            if taken.rowcount:  # else a reset or another trainer came in between
                self._waiting.insert(len(self._waiting) if self.exact else 0, batch)

    # The environments.

    def register_env(self, wanted: dict[str, Any], key: str | None = None) -> Reply:
        """Register an environment, once a trainer has asked for its first batch."""

        def work(state: State) -> Reply:
            if not state.started or (not self.exact and state.batch_size < 1):
                return {"status": "wait for trainer to start"}
            if not self.exact:
                _check_env(wanted)
            name = wanted["desired_name"]
            same = sum(env.desired_name == name for env in state.envs)
            env = Registration(**wanted, wandb_name=f"{name}_{same}")
            state.envs.append(env)
            if state.save_checkpoint_interval is None:  # a reset, and never a trainer
                return {}
            return {
                "status": "success",
                "env_id": len(state.envs) - 1,
                "wandb_name": env.wandb_name,
                "checkpoint_dir": state.checkpoint_dir,
                "starting_step": state.step,
                "checkpoint_interval": state.save_checkpoint_interval,
                "num_steps": state.num_steps,
            }

        with self._transaction() as state:
            reply = self._once(key, _digest(_json(["register-env", wanted])), work, state)
            if not reply:
                # After the commit, as there: the environment is in the list.
                self.counts["refused"] += 1
            elif reply["status"] == "success":
                self._seen[reply["env_id"]] = time.monotonic()
                state.envs[reply["env_id"]].connected = True  # again, with the key of before
        return reply

    def disconnect_env(self, env_id: int) -> Reply:
        """Leave an environment out of the weights and minimums."""
        with self._transaction() as state:
            if state.started is None:
                return {"status": "failure", "error": "'State' object has no attribute 'envs'"}
            try:
                if env_id < 0 and not self.exact:
                    raise IndexError("list index out of range")
                state.envs[env_id].connected = False
            except IndexError as error:
                return {"status": "failure", "error": str(error)}
            return {"status": "success"}

    def submit(self, groups: Sequence[NewGroup], *, single: bool, key: str | None = None) -> Sent:
        """Queue groups, all or none. The same key gets the same reply again.

        Raises: Refusal.
        """

        def work(state: State) -> Reply:
            state.open = True  # in the original, a refused group makes the queue too
            self._admit(state, groups)
            replies = [self._place(state, group) for group in groups]
            self.counts["groups_received"] += len(groups)
            return replies[0] if single else _summary(replies)

        digest = _digest(*(group.body for group in groups), str(single).encode())
        with self._transaction() as state:
            for group in groups:
                if group.env is not None:
                    self._seen[group.env] = time.monotonic()
            if key is None and (reply := self._repeated(digest)) is not None:
                self.counts["groups_repeated"] += len(groups)
                return Sent(reply, digest)
            return Sent(self._once(key, digest, work, state, keep=True), digest)

    def note_unsent(self, sent: Sent) -> None:
        """Note that a reply was lost: the next submission of the same body is a repeat."""
        with self._lock:
            now = time.monotonic()
            self._unsent = {key: one for key, one in self._unsent.items() if one[1] > now}
            self._unsent[sent.digest] = (sent.reply, now + REPEAT_S)

    # What both ask.

    def info(self) -> Reply:
        """`/info`."""
        with self._lock:
            state = self._state
            if state.max_token_len is None:
                return {"batch_size": -1, "max_token_len": -1}
            return {"batch_size": state.batch_size, "max_token_len": state.max_token_len}

    def wandb_info(self) -> Reply:
        """`/wandb_info`."""
        with self._lock:
            return {"group": self._state.group, "project": self._state.project}

    def policy_version(self) -> Reply:
        """The version of the trainer's weights."""
        with self._lock:
            return {"version": self._state.policy_version}

    def status(self) -> Reply:
        """`/status`."""
        with self._lock:
            state = self._state
            if not state.open or state.started is None:
                return {"current_step": 0, "queue_size": 0}
            return {"current_step": state.step, "queue_size": len(self._queue)}

    def status_env(self, env_id: int) -> Reply:
        """`/status-env`. Raises: Refusal for an unknown environment."""
        with self._transaction() as state:
            count = len(state.envs)
            if not (-count if self.exact else 0) <= env_id < count:
                raise Refusal(404, f"no environment {env_id} is registered")
            self._seen[env_id] = time.monotonic()
            return self._status_env(state, env_id)

    def latest(self) -> bytes:
        """`/latest_example`: the last queued group."""
        with self._lock:
            rows = self._db.execute("SELECT body FROM groups WHERE id = ?", (self._state.latest,))
            row = rows.fetchone()
            if row is None:
                return _json({name: [] for name in (*EXAMPLE.split(), "messages", "images")})
            return bytes(row[0])

    def metrics(self) -> str:
        """Return gauges and counters in the text format of Prometheus."""
        with self._lock:
            state = self._state
            envs = sum(self._connected(state, env) for env in range(len(state.envs)))
            buffered = [item.group.size for items in self._buffers.values() for item in items]
            gauges = {
                "step": state.step,
                "queued_groups": len(self._queue),
                "queued_sequences": sum(item.group.size for item in self._queue),
                "buffered_sequences": sum(buffered),
                "batches_waiting": len(self._waiting),
                "environments_connected": envs,
                "trainer_started": int(state.started is True),
            }
            counters = "groups_received groups_repeated refused batches_delivered batches_repeated"
            lines = [
                f"# TYPE hermes_rl_api_{n} gauge\nhermes_rl_api_{n} {gauges[n]}" for n in gauges
            ]
            for name in counters.split():
                full = f"hermes_rl_api_{name}_total"
                lines.append(f"# TYPE {full} counter\n{full} {self.counts[name]}")
            return "\n".join(lines) + "\n"

    # Inside of a transaction.

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[State]:
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield self._state
                self._save()
                self._db.execute("COMMIT")
            except Refusal:  # nothing was changed
                self.counts["refused"] += 1
                self._db.execute("ROLLBACK")
                raise
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._load()
                raise

    def _save(self) -> None:
        value = msgspec.json.encode(self._state)
        if value != self._saved:
            self._db.execute("REPLACE INTO state VALUES (0, ?)", (value,))
            self._saved = value

    def _load(self) -> None:
        """Read the mirror from the database."""
        row = self._db.execute("SELECT value FROM state").fetchone()
        self._saved = row[0] if row else b""
        self._state = msgspec.json.decode(row[0], type=State) if row else State()
        rows = self._db.execute(
            "SELECT id, size, env, rank FROM groups WHERE batch IS NULL ORDER BY rank, id"
        ).fetchall()
        self._queue, self._buffers = [], {}
        for group_id, size, env, rank in rows:
            item = Queued(group_id, Packable(size, None if env is None else int(env)))
            into = self._queue if rank is not None else self._buffers.setdefault(item.group.env, [])
            into.append(item)
        self._rank = max((rank for *_, rank in rows if rank is not None), default=0)
        self._waiting = self._waiting_batches()

    def _waiting_batches(self) -> list[int]:
        rows = self._db.execute("SELECT id FROM batches WHERE sent = ? ORDER BY id", (_WAITING,))
        return [row[0] for row in rows]

    def _recover(self) -> None:
        """After a start: batches whose sending was cut are given again, and the last submissions
        may come again, since their replies may have been lost."""
        self._db.execute(
            "UPDATE batches SET sent = ? WHERE sent = ? AND key IS NULL", (_WAITING, _HANDED_OUT)
        )
        rows = self._db.execute(
            "SELECT digest, reply FROM replies WHERE key IS NULL AND id > (SELECT max(id)"
            " FROM replies) - 256 AND at > (SELECT max(at) FROM replies) - 60"
        )
        until = time.monotonic() + REPEAT_S
        self._unsent |= {bytes(digest): (json.loads(reply), until) for digest, reply in rows}

    def _once(
        self,
        key: str | None,
        digest: bytes,
        work: Callable[[State], Reply],
        state: State,
        *,
        keep: bool = False,
    ) -> Reply:
        """Do the work of a request, or return the stored reply of its key.

        Args:
            keep: store the reply also without a key.
        """
        if key is not None:
            found = self._db.execute("SELECT digest, reply FROM replies WHERE key = ?", (key,))
            if (row := found.fetchone()) is not None:
                if row[0] != digest:
                    raise Refusal(422, "this Idempotency-Key was used for another request")
                self.counts["groups_repeated"] += 1
                reply: Reply = json.loads(row[1])
                return reply
        reply = work(state)
        if (key is not None or keep) and reply.get("status") in ("received", "buffered", "success"):
            made = self._db.execute(
                "INSERT INTO replies (key, digest, reply, at) VALUES (?, ?, ?, ?)",
                (key, digest, json.dumps(reply), time.time()),
            )
            oldest = (made.lastrowid or 0) - KEPT_REPLIES
            self._db.execute("DELETE FROM replies WHERE id <= ?", (oldest,))
        return reply

    def _repeated(self, digest: bytes) -> Reply | None:
        reply, until = self._unsent.pop(digest, (None, 0.0))
        return reply if time.monotonic() < until else None

    def _admit(self, state: State, groups: Sequence[NewGroup]) -> None:
        """Raises: Refusal for groups that cannot be queued."""
        count = len(state.envs)
        for group in groups:
            if group.env is not None and group.env < (-count if self.exact else 0):
                raise Refusal(422, f"no environment {group.env} is registered")
        if self.exact:
            return
        if state.batch_size < 1:
            raise Refusal(503, "no trainer is registered", retry_after=5)
        for group in groups:
            if group.env is not None and group.env >= count:
                raise Refusal(422, f"no environment {group.env} is registered")
            most = state.batch_size if group.env is None else state.envs[group.env].group_size
            if not 1 <= group.size <= most:
                raise Refusal(
                    422, f"a group of {group.size} sequences; 1 to {most} can be delivered"
                )
        sizes: Counter[int | None] = Counter()
        for item in (*self._queue, *(i for items in self._buffers.values() for i in items)):
            sizes[item.group.env] += item.group.size
        # An environment may always have one batch queued: others may wait for it.
        full = sizes.total() >= self.limits.max_batches * state.batch_size
        if full and any(sizes[group.env] >= state.batch_size for group in groups):
            raise Refusal(503, f"{sizes.total()} sequences are queued", retry_after=2)

    def _place(self, state: State, group: NewGroup) -> Reply:
        """Queue a group, or hold it until groups of its environment make one of full size."""
        made = self._db.execute(
            "INSERT INTO groups (env, size, body) VALUES (?, ?, ?)",
            (None if group.env is None else str(group.env), group.size, group.body),
        )
        assert made.lastrowid is not None
        item = Queued(made.lastrowid, Packable(group.size, group.env))
        if group.env is None or group.env >= len(state.envs):
            self._enqueue(state, item)
            return {"status": "received"}
        wanted = state.envs[group.env].group_size
        if group.size == wanted:
            self._enqueue(state, item)
            return {"status": "received"}
        buffer = self._buffers.setdefault(group.env, [])
        buffer.append(item)
        together = fill_group([item.group.size for item in buffer], wanted)
        for index in together:
            self._enqueue(state, buffer[index])
        left = [item for index, item in enumerate(buffer) if index not in set(together)]
        self._buffers[group.env] = left
        return {"status": "buffered", "buffer_size": sum(item.group.size for item in left)}

    def _enqueue(self, state: State, item: Queued) -> None:
        self._rank += 1
        self._db.execute("UPDATE groups SET rank = ? WHERE id = ?", (self._rank, item.id))
        self._queue.append(item)
        state.latest = item.id

    def _form_batches(self, state: State) -> None:
        """Form a batch, or in the exact profile all that can be formed."""
        minimums = {
            index: env.min_batch_allocation
            for index, env in enumerate(state.envs)
            if env.min_batch_allocation is not None and self._connected(state, index)
        }
        while chosen := form_batch([i.group for i in self._queue], state.batch_size, minimums):
            made = self._db.execute("INSERT INTO batches DEFAULT VALUES")
            assert made.lastrowid is not None
            ranked = [(made.lastrowid, n, self._queue[i].id) for n, i in enumerate(chosen)]
            self._db.executemany("UPDATE groups SET batch = ?, rank = ? WHERE id = ?", ranked)
            gone = set(chosen)
            self._queue = [item for n, item in enumerate(self._queue) if n not in gone]
            self._waiting.append(made.lastrowid)
            state.step += 1
            if not self.exact:
                return

    def _handout(self, batch: int) -> Handout:
        rows = self._db.execute("SELECT body FROM groups WHERE batch = ? ORDER BY rank", (batch,))
        return Handout(batch, b'{"batch":[' + b",".join(row[0] for row in rows) + b"]}")

    def _connected(self, state: State, env: int) -> bool:
        silent = time.monotonic() - self._seen.get(env, self._began)
        timely = self.exact or silent < self.limits.env_timeout
        return state.envs[env].connected and timely

    def _status_env(self, state: State, env_id: int) -> Reply:
        asking = state.envs[env_id]
        connected = [e for n, e in enumerate(state.envs) if self._connected(state, n)]
        total = sum(env.max_token_length * max(0.0, env.weight) for env in connected)
        weight = (
            max(LEAST_WEIGHT, asking.max_token_length * asking.weight / total) if total else None
        )
        shares = [e.min_batch_allocation for e in connected if e.min_batch_allocation is not None]
        sequences: Counter[int | None] = Counter()
        largest, its_largest = 1, asking.group_size
        for item in self._queue:
            sequences[item.group.env] += item.group.size
            largest = max(largest, item.group.size)
            if item.group.env == env_id:
                its_largest = max(its_largest, item.group.size)
        if weight is not None:  # there, the division by zero comes before
            asking.group_size = its_largest
        its_count = sequences.pop(env_id, 0)
        others = 0
        for env, count in sequences.items() if largest > 1 else ():
            known = env is not None and 0 <= env < len(state.envs) and self._connected(state, env)
            share = state.envs[env].min_batch_allocation if known and env is not None else None
            packed = -(-count // largest) * largest
            others += max(0, packed - int(state.batch_size * (share or 0.0)))
        return {
            "current_step": state.step,
            "queue_size": (its_count + others) // (its_largest or 1),
            "unallocated_fraction": 1.0 - min(sum(shares, 0.0), 1.0),
            "self_queue_size": its_count // (its_largest or 1),
            "max_group_size": largest,
            "env_weight": LEAST_WEIGHT if weight is None else weight,
        }

    @contextlib.contextmanager
    def _translated(self, path: Path | None) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error


def _open(path: Path | None) -> sqlite3.Connection:
    """Open or create a database. Raises: UserError."""
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it contains rollouts
        db = sqlite3.connect(
            path or ":memory:", isolation_level=None, check_same_thread=False, timeout=1
        )
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise UserError(f"{path}: is another program's database. Name another --state")
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.executescript(_SCHEMA)
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            message = f"{path}: another server uses it. Stop that one, or name another --state"
            raise UserError(message) from error
        raise UserError(f"{path}: {error}") from error
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: {error}") from error
    return db


def _check_env(wanted: dict[str, Any]) -> None:
    """Raises: Refusal."""
    share = wanted["min_batch_allocation"]
    if wanted["group_size"] < 1:
        raise Refusal(422, "group_size must be at least 1")
    if share is not None and not 0 <= share <= 1:
        raise Refusal(422, "min_batch_allocation must be from 0 to 1")


def _summary(replies: Sequence[Reply]) -> Reply:
    buffered = [reply["buffer_size"] for reply in replies if reply["status"] == "buffered"]
    summary: Reply = {"status": "received", "groups_processed": len(replies)}
    if buffered:
        summary |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return summary


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _digest(*parts: bytes) -> bytes:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()
