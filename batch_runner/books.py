"""The run's books: one driver's journal and ledger, as dispatcher and source need them."""

from __future__ import annotations

from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.store.driver import Driver
from hermes_rl.store.ledger import Disposition
from hermes_rl.store.recovery import Outcome
from hermes_rl.usage import UsageTotal


class Books:
    """Dispatches, receipts and recoveries of one driver; see `hermes_rl.store.driver`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def dispatch(self, item: WorkItem, writer: str) -> None:
        """Note an attempt before it is sent. Raises: DiskFull."""
        self._driver.dispatch(item, writer)

    def settle(self, receipt: Receipt) -> Disposition:
        """Take a receipt into the ledger; says what became of the unit."""
        return self._driver.receive(receipt)

    async def recover(self, writer: str, cause: str) -> list[Receipt]:
        """Take over from a dead worker. Raises: DiskFull, StoreError."""
        return [_receipt(o, writer) for o in await self._driver.recover_worker(writer, cause)]


def _receipt(outcome: Outcome, writer: str) -> Receipt:
    """A receipt for an attempt whose own was lost: its row is published, its figures are there."""
    failed = "cancelled" if outcome.end_reason == outcome.cause else "failed"
    return Receipt(
        unit_id=outcome.key.unit_id,
        epoch=outcome.key.epoch,
        attempt=outcome.key.attempt,
        writer=writer,
        task_id="",
        repeat=0,
        status="ok" if outcome.done else failed,
        end_reason=outcome.end_reason,
        cause=outcome.cause,
        reward=None,
        turns=0,
        usage=UsageTotal(),
        cost_usd=None,
        unpriced_calls=0,
        seconds=0.0,
    )
