"""Receipts stay small, whatever the row holds."""

from hypothesis import given
from hypothesis import strategies as st

from batch_runner.pool import decode_reply
from batch_runner.worker import Reply
from hermes_rl.events import AttemptKey, Begun, Ended
from hermes_rl.models.rate.share import encode
from hermes_rl.store.rows import Finished, receipt_of
from hermes_rl.trajectory import fold

KEY = AttemptKey(unit_id="f" * 32, epoch=2**31, attempt=2**31)


def finished(task_id: str, error: str) -> Finished:
    begun = Begun(
        key=KEY, started_at=1e9, run_id="r", group_id="g", member=2**31, repeat=2**31, row_index=0,
        task_id=task_id, task_hash="h", config_hash="c", seed=0, prompt="p", model="m",
        api_mode="chat_completions", endpoint="e",
    )  # fmt: skip
    end = Ended(finished_at=2e9, end_reason="error", cause="model_protocol", error=error)
    return Finished(key=KEY, row=fold([begun, end]), fatal_command="f" * 32)


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_receipt_is_under_4_kb(task_id: str, error: str) -> None:
    made = finished(task_id * 200 + "\U0001f600" * 5000, error * 200 + "\U0001f600" * 5000)
    sent = encode(Reply(receipts=(receipt_of(made, f"{2**31}-{2**31}"),)))
    assert len(sent) < 4096
    (got,) = decode_reply(sent).receipts
    assert made.row.task_id.startswith(got.task_id)
    assert got.fatal_command == made.fatal_command
