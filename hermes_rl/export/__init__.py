"""Runs in the formats of other programs, and their files as runs.

from hermes_rl.export import ExportOptions, export_run

report = export_run("runs/my-run", "trl", options=ExportOptions(min_reward=1.0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.export import harbor_tasks
    from hermes_rl.export.compressor import CompressOptions, CompressReport, compress_run
    from hermes_rl.export.exporter import export_run, whole_file
    from hermes_rl.export.formats import FORMATS
    from hermes_rl.export.formats.sharegpt import conversation
    from hermes_rl.export.imports import (
        ORIGINS,
        ImportReport,
        Origin,
        import_file,
        rollouts_of,
        write_run,
    )
    from hermes_rl.export.imports.base import RolloutNamer
    from hermes_rl.export.imports.hermes import messages_of, tools_of
    from hermes_rl.export.losses import LEFT_OUT, LOST, Report
    from hermes_rl.export.samples import (
        Sample,
        before_untrained,
        fingerprint,
        pieces,
        samples_of,
        without_tail,
    )
    from hermes_rl.export.source import AdvantageKind, ExportOptions, Row
else:
    __getattr__, __dir__ = attach(__name__)
