"""The run directory: written exactly once, readable at every moment.

| file | what |
|---|---|
| `driver` | `open_run`: lock, epoch, recovery; dispatches and receipts |
| `journal` `derived` | what is appended while a run is in progress, and when it is published |
| `commit` `parts` | sealed batches become Parquet parts and commits |
| `recovery` | what a killed run left |
| `integrity` | checks of every file, and repair |
| `ledger` `summary` `stats` | what is done, given up and open; sums; stats.json, report.html |
| `reader` | `load_run`: frames and Arrow; who drives a run, and what is in flight |
| `rows` `schema` | the content of journal lines; the Arrow schemas of the tables |
| `rundir` `files` `processes` `crash` | names, durable files, lock holders, the tests' crash hook |

Import from these files: this one loads nothing.
"""
