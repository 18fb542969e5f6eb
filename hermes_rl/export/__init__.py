"""Runs in the formats of other programs, and their files as runs.

from hermes_rl.export import ExportOptions, export_run

report = export_run("runs/my-run", "trl", options=ExportOptions(min_reward=1.0))
"""

from __future__ import annotations

from hermes_rl.export.exporter import export_run
from hermes_rl.export.formats import FORMATS
from hermes_rl.export.imports import ORIGINS, ImportReport, import_file
from hermes_rl.export.losses import LEFT_OUT, LOST, Report
from hermes_rl.export.source import ExportOptions

__all__ = [
    "FORMATS",
    "LEFT_OUT",
    "LOST",
    "ORIGINS",
    "ExportOptions",
    "ImportReport",
    "Report",
    "export_run",
    "import_file",
]
