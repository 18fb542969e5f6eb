"""The run's books: one driver's journal and ledger, as dispatcher and source need them."""

from __future__ import annotations

from batch_runner.wire import TEXT_CHARS
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
    """A receipt for an attempt whose own was lost. Where its row is no longer at hand, because the
    worker had published it, its figures are in the table alone."""
    failed = "cancelled" if outcome.end_reason == outcome.cause else "failed"
    known = outcome.figures
    return Receipt(
        unit_id=outcome.key.unit_id,
        epoch=outcome.key.epoch,
        attempt=outcome.key.attempt,
        writer=writer,
        task_id=known.task_id[:TEXT_CHARS] if known else "",
        repeat=known.repeat if known else 0,
        status="ok" if outcome.done else failed,
        end_reason=outcome.end_reason,
        cause=outcome.cause,
        reward=known.reward if known else None,
        turns=known.turns if known else 0,
        usage=known.usage if known else UsageTotal(),
        cost_usd=known.cost_usd if known else None,
        unpriced_calls=known.unpriced_calls if known else 0,
        seconds=known.timing.total_s if known else 0.0,
        error=known.error[:TEXT_CHARS] if known and known.error else None,
        fatal_command=outcome.fatal_command,
    )
