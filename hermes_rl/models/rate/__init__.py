"""Rates and budgets of model calls: one limiter and one ledger for all workers of a run.

The package answers three questions:

- When may this request be sent? `limiter` keeps the queue; `adaptive` and `buckets` decide.
- May this call be paid for? `budgets` reserves its worst case; `ledger` keeps the accounts.
- Which part does each worker get? The driver's `coordinator` answers the reports of `share`.

`headers` reads what providers say of their limits, `traffic` notes how an endpoint behaves.
`adaptive`, `buckets`, `headers`, `ledger` and `traffic` are pure: callers pass the time.
"""
