"""Which groups form a batch, by the rules of Atropos 0.4.0's trajectory API.

A group is never split. The largest queued group sets the pack size: `k` groups of one size form a
pack when they have as many sequences as the largest group, and only whole packs are taken. A batch
has exactly `batch_size` sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple


class Packable(NamedTuple):
    """A queued group, as far as packing is concerned."""

    size: int
    """Its sequences."""
    env: int | None
    """Its environment."""


def fill_group(sizes: Sequence[int], target: int) -> list[int]:
    """Return indices of groups with exactly `target` sequences together, ascending; [] if none.

    The first groups that fit are preferred. If they do not reach the target, any subset is taken.
    """
    total, taken = 0, []
    for index, size in enumerate(sizes):
        if total + size <= target:
            taken.append(index)
            total += size
            if total == target:
                return taken
    return _subset(sizes, target) if target >= 0 else []


def _subset(sizes: Sequence[int], target: int) -> list[int]:
    """Subset sum: bit `s` of `reachable[i]` says that some of the first `i` sizes sum to `s`."""
    reachable = [1]
    for size in sizes:
        reachable.append((reachable[-1] | reachable[-1] << size) & ((1 << target + 1) - 1))
    if not reachable[-1] >> target & 1:
        return []
    taken, missing = [], target
    for index in reversed(range(len(sizes))):
        if missing >= sizes[index] and reachable[index] >> missing - sizes[index] & 1:
            taken.append(index)
            missing -= sizes[index]
    return taken[::-1]


def form_batch(
    queue: Sequence[Packable], batch_size: int, minimums: Mapping[int, float] | None = None
) -> list[int] | None:
    """Return the indices of a batch, in its order; None if none can be formed.

    Args:
        minimums: least share of the batch (0 to 1) of each environment that has one. The batch is
            None while one of them has no whole pack.
    """
    if not queue or batch_size < 1:
        return None
    if not minimums:
        return _in_order(queue, _packed(queue, by_env=False), batch_size)
    sizes = [group.size for group in queue]
    ready: dict[int | None, list[int]] = {}
    for index in _packed(queue, by_env=True):
        ready.setdefault(queue[index].env, []).append(index)
    wanted = _minimums(sizes, ready, batch_size, minimums)
    return None if wanted is None else _with_minimums(sizes, ready, batch_size, wanted)


def _packed(queue: Sequence[Packable], *, by_env: bool) -> list[int]:
    """Return the indices in whole packs, in the order in which packs become whole.

    Args:
        by_env: a pack has groups of one environment; those without one are in no pack.
    """
    pack = max(group.size for group in queue)
    open_packs: dict[Hashable, list[int]] = {}
    whole: list[int] = []
    for index, group in enumerate(queue):
        if by_env and group.env is None:
            continue
        indices = open_packs.setdefault(group if by_env else group.size, [])
        indices.append(index)
        if len(indices) * group.size == pack:
            whole += indices
            indices.clear()
    return whole


def _in_order(queue: Sequence[Packable], whole: list[int], batch_size: int) -> list[int] | None:
    total = 0
    for count, index in enumerate(whole, 1):
        total += queue[index].size
        if total == batch_size:
            return whole[:count]
    return None


def _minimums(
    sizes: Sequence[int],
    ready: Mapping[int | None, list[int]],
    batch_size: int,
    minimums: Mapping[int, float],
) -> dict[int, int] | None:
    """Return the least sequences of each environment; None if one has no whole pack."""
    wanted = {env: int(batch_size * share) for env, share in minimums.items()}
    wanted = {env: count for env, count in wanted.items() if count > 0}
    if any(env not in ready for env in wanted):
        return None
    total = sum(wanted.values())
    if total > batch_size:
        scale = batch_size / total
        smallest = {env: min(sizes[index] for index in ready[env]) for env in wanted}
        wanted = {env: max(smallest[env], int(count * scale)) for env, count in wanted.items()}
    return wanted


def _with_minimums(
    sizes: Sequence[int],
    ready: Mapping[int | None, list[int]],
    batch_size: int,
    wanted: Mapping[int, int],
) -> list[int] | None:
    batch: list[int] = []
    total = 0
    for env, least in wanted.items():
        taken = 0
        for index in ready[env]:
            if taken >= least:
                break
            if total + sizes[index] <= batch_size:
                batch.append(index)
                taken += sizes[index]
                total += sizes[index]
    left = {index for indices in ready.values() for index in indices}.difference(batch)
    for index in sorted(left):
        if total == batch_size:
            break
        if total + sizes[index] <= batch_size:
            batch.append(index)
            total += sizes[index]
    return batch if total == batch_size else None
