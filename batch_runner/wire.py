"""What passes between driver and worker."""

from __future__ import annotations

import msgspec

from hermes_rl.models.tokens.plan import TokenPlan
from hermes_rl.ports import Receipt, WorkItem

NAMESPACE = "hermes_rl"
"""Of our actors in a Ray cluster."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its start."""

    run_path: str
    """Absolute path of the run directory."""
    run_id: str
    epoch: int
    worker: int
    """Unique within the epoch; 0 is the driver's own process."""
    capacity: int
    """Rollouts in flight at most."""
    lease_s: float
    """How long it lives without hearing from its driver."""
    publish_every_s: float
    config: bytes
    """The run's configuration as JSON."""
    config_hash: str
    """As the driver found it: an image's digest may differ on another machine."""
    tokens: TokenPlan | None = None
    """How token ids are had, as it was found at the start."""

    @property
    def writer(self) -> str:
        """The worker's name in the journal: EPOCH-WORKER."""
        return f"{self.epoch}-{self.worker}"


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to one poll."""

    receipts: tuple[Receipt, ...] = ()
    requests: int = 0
    """Model requests of the attempts that finished since the last poll."""
    throttled: int = 0
    """Of those, how many were refused with 429."""
    fault: str | None = None
    """Why the worker can go on no longer; it has stopped then."""
    cause: str | None = None
    """The fault's cause, a key of `errors.CAUSES`."""


encode_item = msgspec.msgpack.Encoder().encode
decode_item = msgspec.msgpack.Decoder(WorkItem).decode
encode_reply = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
encode_spec = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(WorkerSpec).decode
