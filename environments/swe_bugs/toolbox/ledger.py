"""Books in cents: entries are (account, cents), in the order in which they were made."""

from __future__ import annotations


def balances(entries: list[tuple[str, int]], empty: bool = False) -> dict[str, int]:
    """The sum of each account; accounts of 0 only with `empty`."""
    sums: dict[str, int] = {}
    for account, cents in entries:
        sums[account] = sums.get(account, 0) + cents
    return {name: cents for name, cents in sums.items() if cents != 0 or empty}


def transfer(
    entries: list[tuple[str, int]], source: str, target: str, cents: int, credit: int = 0
) -> list[tuple[str, int]]:
    """The books with a transfer at their end. The source may fall to -credit, not below.

    Raises ValueError for an amount below 1, a transfer to itself, or too little money.
    """
    if cents < 1:
        raise ValueError("the amount must be positive")
    if source == target:
        raise ValueError("source and target are the same")
    have = sum(amount for account, amount in entries if account == source)
    if have - cents < -credit:
        raise ValueError(f"{source} has only {have}")
    return [*entries, (source, -cents), (target, cents)]


def split(cents: int, weights: list[int]) -> list[int]:
    """An amount in whole cents by weights; the cents that are left over go to the first ones.

    Raises ValueError without a positive weight.
    """
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise ValueError("weights must be positive")
    shares = [cents * weight // whole for weight in weights]
    left = cents - sum(shares)
    for number, weight in enumerate(weights):
        if left > 0 and weight > 0:
            shares[number] += 1
            left -= 1
    return shares


def statement(entries: list[tuple[str, int]], account: str, opening: int = 0) -> list[str]:
    """A line per entry of an account: number, amount with sign, balance after it, in euros."""
    lines: list[str] = []
    balance = opening
    for name, cents in entries:
        if name != account:
            continue
        balance += cents
        sign = "-" if cents < 0 else "+"
        lines.append(f"{len(lines) + 1}. {sign}{money(abs(cents))} = {money(balance)}")
    return lines


def money(cents: int) -> str:
    """Cents as euros with thousands apart: `-1,234.05`."""
    whole, rest = divmod(abs(cents), 100)
    sign = "-" if cents < 0 else ""
    return f"{sign}{whole:,}.{rest:02d}"


def settle(entries: list[tuple[str, int]]) -> list[tuple[str, str, int]]:
    """Payments (from, to, cents) after which every balance is 0: the deepest debtor pays the
    richest creditor as much as it can, again and again; equal ones by name.

    Raises ValueError when the balances do not sum to 0.
    """
    sums = balances(entries)
    if sum(sums.values()) != 0:
        raise ValueError("the books are not even")
    payments = []
    while sums:
        debtor = min(sums, key=lambda name: (sums[name], name))
        creditor = max(sorted(sums), key=lambda name: sums[name])
        cents = min(-sums[debtor], sums[creditor])
        payments.append((debtor, creditor, cents))
        sums[debtor] += cents
        sums[creditor] -= cents
        sums = {name: value for name, value in sums.items() if value != 0}
    return payments
