"""The batch runner: a dataset and a configuration in, exactly-once Parquet out.

    from batch_runner import run_batch
    report = run_batch(config)

`await arun_batch(config)` is the same where a loop runs. Ray is imported by `pool` and `actor`
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_runner.report import Report
    from batch_runner.runner import arun_batch, run_batch

__all__ = ["Report", "arun_batch", "run_batch"]

_HOMES = {
    "Report": "batch_runner.report",
    "arun_batch": "batch_runner.runner",
    "run_batch": "batch_runner.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batch_runner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
