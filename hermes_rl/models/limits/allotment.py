"""Dividing a limit among workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fair_shares(limit: int, demands: Mapping[str, int], turn: int = 0) -> dict[str, int]:
    """Whole shares that sum to the limit or less: nobody gets more than it asks for while another
    gets less than it and asks for more (max-min fairness).

    Args:
        turn: where the last units begin to go round: where there are fewer slots than workers,
            each has its turn.
    """
    shares = dict.fromkeys(demands, 0)
    names = rotated(sorted(demands), turn)
    left = max(0, limit)
    hungry = [n for n in names if demands[n] > 0]
    while left and hungry:
        each = left // len(hungry)
        if each == 0:
            for name in hungry[:left]:
                shares[name] += 1
            break
        for name in hungry:
            more = min(each, demands[name] - shares[name])
            shares[name] += more
            left -= more
        hungry = [n for n in hungry if shares[n] < demands[n]]
    return shares


def with_headroom(limit: int, shares: Mapping[str, int]) -> dict[str, int]:
    """Shares with a part of what nobody asked for: a worker that starts more calls need not wait
    for its next grant. One part stays back, for who asks first."""
    left = max(0, limit - sum(shares.values()))
    parts = len(shares) + (len(shares) > 1)
    return {name: share + left // parts for name, share in shares.items()} if shares else {}


def alone_share(limit: int, names: Sequence[str], name: str) -> int:
    """One worker's part of a limit that nobody divides any more. All parts sum to the limit."""
    order = sorted(names)
    base, more = divmod(max(0, limit), len(order))
    return base + (order.index(name) < more)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, beginning elsewhere at each turn."""
    begin = turn % len(names) if names else 0
    return [*names[begin:], *names[:begin]]
