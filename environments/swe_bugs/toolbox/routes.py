"""Ways through a network: {place: {neighbour: distance}}, one way each."""

from __future__ import annotations

import heapq


def distances(
    network: dict[str, dict[str, int]], start: str, most: int | None = None
) -> dict[str, int]:
    """The shortest distance to each place that can be reached; with `most` only up to there.

    Raises KeyError for a start that is no key of the network.
    """
    if start not in network:
        raise KeyError(start)
    found: dict[str, int] = {}
    waiting = [(0, start)]
    while waiting:
        distance, place = heapq.heappop(waiting)
        if place in found:
            continue
        found[place] = distance
        for neighbour, length in network.get(place, {}).items():
            further = distance + length
            if most is not None and further > most:
                continue
            if neighbour not in found:
                heapq.heappush(waiting, (further, neighbour))
    return found


def path(network: dict[str, dict[str, int]], start: str, end: str) -> list[str] | None:
    """The places of a shortest way, both ends included; of equal ones the first by name. None when
    there is no way."""
    best: dict[str, tuple[int, list[str]]] = {}
    waiting = [(0, [start])]
    while waiting:
        distance, way = heapq.heappop(waiting)
        place = way[-1]
        if place == end:
            return way
        if place in best:
            continue
        best[place] = (distance, way)
        for neighbour in sorted(network.get(place, {})):
            if neighbour not in best:
                heapq.heappush(waiting, (distance + network[place][neighbour], [*way, neighbour]))
    return None


def length(network: dict[str, dict[str, int]], way: list[str]) -> int:
    """The distance along a way. Raises ValueError where two places are not joined."""
    total = 0
    for here, there in zip(way, way[1:]):
        if there not in network.get(here, {}):
            raise ValueError(f"no way from {here} to {there}")
        total += network[here][there]
    return total


def order(network: dict[str, dict[str, int]]) -> list[str] | None:
    """All places so that each way leads forward, by name where there is a choice; None when some
    way leads in a circle."""
    incoming = {place: 0 for place in network}
    for ways in network.values():
        for place in ways:
            incoming[place] = incoming.get(place, 0) + 1
    ready = sorted(place for place, count in incoming.items() if count == 0)
    done: list[str] = []
    while ready:
        place = ready.pop(0)
        done.append(place)
        for neighbour in network.get(place, {}):
            incoming[neighbour] -= 1
            if incoming[neighbour] == 0:
                ready.append(neighbour)
        ready.sort()
    return done if len(done) == len(incoming) else None


def reverse(network: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The network with all ways turned round; every place is a key."""
    turned: dict[str, dict[str, int]] = {place: {} for place in network}
    for place, ways in network.items():
        for neighbour, distance in ways.items():
            turned.setdefault(neighbour, {})[place] = distance
    return turned
