"""The run directory: each row is written exactly once and readable at every moment.

| file | what |
|---|---|
| `driver` | `open_run`: lock, epoch, recovery; dispatches and receipts; `append_attempts` |
| `journal` `derived` | what is appended while a run is in progress, and when it is published |
| `relay` | the journal of a worker that does not see the run directory |
| `commit` `parts` | sealed batches become Parquet parts and commits |
| `recovery` | what a killed run left |
| `snapshots` `compaction` | small parts replaced by merged ones, in one step per table |
| `integrity` `repair` | checks of every file, and repair |
| `ledger` `checkpoint` | what is done, given up and open, and its sorted file |
| `summary` `stats` | sums; stats.json, report.html |
| `reader` | `load_run`: frames and Arrow; who drives a run, and what is in flight |
| `rows` `schema` | the content of journal lines; the Arrow schemas of the tables |
| `remote` `mirror` | a run at a URL: its log and copies; the driver that mirrors into it |
| `rundir` `files` `processes` `crash` | names, durable files, lock holders, the tests' crash hook |

Import names from the package; they are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.store.checkpoint import open_checkpoint
    from hermes_rl.store.commit import (
        BatchSummary,
        Commit,
        Keys,
        Prepared,
        prepare_batch,
        publish_batch,
        read_commit,
        read_commits,
        rows_of,
        size_fault,
        write_commit,
    )
    from hermes_rl.store.compaction import Compacted, merge_batches
    from hermes_rl.store.crash import (
        COMPACTION_POINTS,
        CRASH_POINTS,
        CRASH_VARIABLE,
        ONCE_VARIABLE,
        CrashHook,
    )
    from hermes_rl.store.derived import DerivedWriter, PendingRow, open_derived_writer
    from hermes_rl.store.driver import (
        SMALL_FILE,
        Driver,
        OpenOptions,
        append_attempts,
        begin_epoch,
        open_run,
        refuse_changes,
    )
    from hermes_rl.store.files import (
        AppendFile,
        Storage,
        decode_line,
        disk_errors,
        encode_line,
        file_sha256,
        read_payloads,
    )
    from hermes_rl.store.integrity import FOREIGN, file_faults, special_files
    from hermes_rl.store.journal import (
        Batch,
        CommitBatch,
        JournalWriter,
        Publisher,
        SealPolicy,
        encode,
    )
    from hermes_rl.store.ledger import (
        LOST_WORKERS_MAX,
        Disposition,
        Ledger,
        load_ledger,
        write_checkpoint,
    )
    from hermes_rl.store.mirror import Mirror, changed_run, open_mirror
    from hermes_rl.store.parts import STEP_BYTES, PartWriter, array_of, table_of, to_arrow
    from hermes_rl.store.processes import ProcessId
    from hermes_rl.store.reader import (
        Run,
        decode_metrics,
        decode_row,
        find_driver,
        in_flight,
        load_run,
    )
    from hermes_rl.store.relay import RelayedWriter, RelayJournal
    from hermes_rl.store.remote import fetch_run, local_run, working_copy
    from hermes_rl.store.repair import compact_run, repair_run
    from hermes_rl.store.rows import (
        Delivery,
        Derived,
        Finished,
        Grade,
        Group,
        Metric,
        Place,
        RelayedLine,
        receipt_of,
    )
    from hermes_rl.store.rundir import (
        TABLES,
        Epoch,
        NotFenced,
        RunDir,
        is_run,
        order_of,
        stem_of,
        url_of,
    )
    from hermes_rl.store.schema import (
        GRADES,
        GROUPS,
        LATER,
        SEGMENTS,
        TRAJECTORIES,
        VERSION_KEY,
        empty_table,
        schema_of,
        storage_schema,
    )
    from hermes_rl.store.snapshots import OLD_FILES_S, file_of, snapshot_of
    from hermes_rl.store.stats import MANY_FORKS, compute_stats, document, page, write_stats
    from hermes_rl.store.summary import Summary, cache_counts, cache_shares
else:
    __getattr__, __dir__ = attach(__name__)
