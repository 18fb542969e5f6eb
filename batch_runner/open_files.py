"""Room for the connections, pipes and files of many rollouts at once."""

from __future__ import annotations

import resource

from hermes_rl.errors import UserError
from hermes_rl.sandboxes.recipe import OPEN_FILES

EACH = 12
"""Open files of one rollout: measured were 8 without a sandbox, and 10 with one."""
OTHERS = 256
"""All else that a worker has open: its journal, the parts that it writes, libraries."""


def make_room(rollouts: int) -> None:
    """Raise this process's limit of open files (`ulimit -Sn`) to what so many rollouts need; many
    systems begin with 1,024. Sandboxes have one of their own, `OPEN_FILES`.

    Raises: UserError when it may not be raised so far: rollouts would fail in the middle.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(OTHERS + EACH * rollouts, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        most = (hard - OTHERS) // EACH
        fewer = f", use --concurrency {most}, or more --workers" if hard >= OPEN_FILES else ""
        raise UserError(
            f"{rollouts} rollouts in one process need {wanted:,} open files, and the limit is "
            f"{hard:,} (ulimit -Hn). Raise it{fewer}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
