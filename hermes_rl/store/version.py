"""The version of everything that a run directory holds."""

from __future__ import annotations

SCHEMA_VERSION = 1
"""Of the tables and the journal. A run directory of a higher version is refused."""

TABLES = ("segments", "subagents", "failures", "trajectories", "grades", "groups")
"""All tables, in the order in which a batch publishes them: what is made from other rows comes
after the rows that say `done`."""
