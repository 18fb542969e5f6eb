"""The formats. A format is listed only if a test runs its reader."""

from __future__ import annotations

from hermes_rl.export.formats import atif, atropos, columns, openai, prime_rl, sharegpt, verl
from hermes_rl.export.source import Format

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        columns.TRL,
        columns.TRL_TOKENS,
        columns.TRL_GRPO,
        columns.AXOLOTL,
        columns.AXOLOTL_TOKENS,
        verl.CONVERSATIONS,
        verl.RL,
        prime_rl.EPISODES,
        atropos.GROUPS,
        openai.FINE_TUNING,
        sharegpt.TURNS,
        atif.DOCUMENTS,
    )
}
"""Name -> format."""
