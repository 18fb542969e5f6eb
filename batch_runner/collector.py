"""The garbage collector, told what a worker's heap is like."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (20_000, 20, 20)
"""Allocations before a look at the youngest objects (Python's own 700 cost a tenth of a turn's CPU:
what a rollout makes is nearly all kept until it ends, or free of cycles)."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Modules that are loaded by now are never looked through; the rest seldom. Undone at the end,
    because a run without Ray lives in its caller's process."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
