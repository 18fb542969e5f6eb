"""The batch runner: a dataset and a configuration in, exactly-once Parquet out.

    from batch_runner import run_batch
    report = run_batch(config)

`await arun_batch(config)` is the same where a loop runs. Ray is imported by `pool` and `actor`
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from batch_runner import settings
    from batch_runner.budgets import (
        Prices,
        budgets_of,
        earlier_cost,
        requested_name,
        sum_earlier_spending,
    )
    from batch_runner.control import CONTROL_COMMANDS, send_command
    from batch_runner.dataset_index import DatasetIndex
    from batch_runner.dispatcher import ISOLATED_SLOTS, START_TRIES, Dispatcher, Fleet, WorkerLost
    from batch_runner.dryrun import dry_run, forecast_costs, pilot_run, predict
    from batch_runner.groups import run_concurrently
    from batch_runner.interrupts import catch_signals
    from batch_runner.live_stream import open_live
    from batch_runner.manifest import capabilities, read_manifest, write_manifest
    from batch_runner.plan import (
        OccurrenceCounter,
        Pilot,
        Plan,
        RunSource,
        UnitReader,
        open_indexed,
        open_reader,
    )
    from batch_runner.pool import RayWorker, SharedRay, connect_ray, decode_reply
    from batch_runner.progress import (
        JsonEvents,
        Progress,
        Rates,
        Silent,
        Sink,
        Tally,
        Trouble,
        View,
        default_progress,
        troubles,
        wrapped,
    )
    from batch_runner.regrade import regrade_run
    from batch_runner.replay import replay_attempt
    from batch_runner.report import Report, exact_lines
    from batch_runner.runner import arun_batch, arun_jointly, run_batch
    from batch_runner.settings import as_config, open_hosts, resolve_settings
    from batch_runner.worker import Reply
else:
    __getattr__, __dir__ = attach(__name__)
