"""The run directory: written exactly once, readable at every moment.

| file | what |
|---|---|
| `driver` | `open_run`: lock, epoch, recovery; dispatches and receipts |
| `journal` `dispatch` `lines` | what is appended while a run goes on |
| `publisher` `commit` `parts` | sealed batches become Parquet parts and commits |
| `recovery` `replay` `fence` `repair` | what a killed run left |
| `ledger` `summary` `stats` | what is done, given up and open; the sums |
| `reader` | `load_run`: frames and Arrow |
| `schema` `rows` `version` | the tables |
| `rundir` `disk` `processes` `crash` | names, durable verbs, locks, the crash hook of the tests |

Import from these files: this one loads nothing.
"""
