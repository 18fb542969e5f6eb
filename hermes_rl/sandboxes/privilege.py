"""What root means here: the machine's root, a container's, or only a name in a user namespace."""

from __future__ import annotations

import os
from pathlib import Path

FIRST_SLOT_UIDS = (1_900_000_000, 200_000)
"""Sandboxes of root run as the first of these user ids that exists, and those above it. The lower
ones are for containers with fewer ids: on a machine they may be a user's, who got them for
containers of his own (/etc/subuid) and could open the files of sandboxes."""

_UID_MAP = Path("/proc/self/uid_map")


def has_slots() -> bool:
    """Whether sandboxes can have user ids of their own: root, where those ids exist.

    A rootless container maps some tens of thousands of ids, and `unshare -r` only one: there root
    is an ordinary user of the machine, and all sandboxes share its id.
    """
    return first_slot() is not None


def first_slot() -> int | None:
    """The lowest user id of sandboxes; None when they cannot have ids of their own."""
    if os.geteuid() != 0:
        return None
    ranges = _ranges()
    for uid in FIRST_SLOT_UIDS:
        if any(inside <= uid < inside + count for inside, _, count in ranges):
            return uid
    return None


def is_host_root() -> bool:
    """Whether the kernel takes us for the machine's root: no sandbox may start as we are."""
    return os.geteuid() == 0 and any(
        inside == 0 and outside == 0 for inside, outside, _ in _ranges()
    )


def account() -> str:
    """Who we are, as a part of a folder's name: root of a user namespace is not the machine's."""
    euid = os.geteuid()
    for inside, outside, count in _ranges():
        if inside <= euid < inside + count and outside != inside:
            return f"{euid}-{outside + euid - inside}"
    return str(euid)


def _ranges() -> list[tuple[int, int, int]]:
    """(first id inside, first id outside, how many), as user_namespaces(7) has them."""
    try:
        lines = _UID_MAP.read_text().splitlines()
    except OSError:
        return [(0, 0, 1 << 32)]
    return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in lines)]
