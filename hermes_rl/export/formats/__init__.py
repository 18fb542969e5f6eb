"""The formats, one file for each reader. A format is listed only if a test runs its reader."""

from __future__ import annotations

from hermes_rl.export.base import Format
from hermes_rl.export.formats import (
    atif,
    atropos,
    axolotl,
    openai,
    prime_rl,
    sharegpt,
    trl,
    verl,
)

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        trl.CONVERSATIONS,
        trl.TOKENS,
        trl.GRPO,
        axolotl.CONVERSATIONS,
        axolotl.TOKENS,
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
