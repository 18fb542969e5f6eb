"""`hermes-rl check RUN --tokens` and `--masks`: reading, counting, saying."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_rl.cli.check_masks import Masks, recorded, rendered
from hermes_rl.cli.check_tokens import Look, line_of, summary_of
from hermes_rl.cli.exact_rows import Renderers, rollouts
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.models.tokens.renderer import Renderer, load_renderer
from hermes_rl.store.rundir import RunDir
from hermes_rl.store.stats import MANY_FORKS

SHOWN = 50
"""Rows and faults that are printed one by one; `--json` has them all."""


def check_exact(
    path: Path, tokenizers: Sequence[str], *, tokens: bool, masks: bool, as_json: bool
) -> int:
    """Look at a run's exact tokens and at what would be trained.

    Args:
        tokenizers: folders or hub names: of the run's model, or of its models. Masks are looked
            at under each.

    Raises: UserError for a tokenizer that cannot be read, and for a run without what is asked for.
    """
    run_dir = RunDir(path)
    renderers = {name: load_renderer(name) for name in tokenizers}
    known = Renderers(tuple(renderers.values()))
    look = Look(known, keep=None if as_json else SHOWN)
    under = _masks(renderers)
    for rollout in rollouts(run_dir, texts=bool(renderers)):
        if tokens:
            look.add(rollout)
        if masks:
            recorded(rollout, under[0], known)
            for one in under[1:]:
                rendered(rollout, one)
    _require(path, look if tokens else None, under if masks else [])
    faults = [*look.all_faults(), *(fault for one in under for fault in one.verdict())]
    if as_json:
        print(json.dumps(_json(look if tokens else None, under if masks else [], faults)))
    else:
        _say(path, look if tokens else None, under if masks else [], faults)
    return ExitCode.BAD_INPUT if faults else ExitCode.DONE


def _masks(renderers: dict[str, Renderer]) -> list[Masks]:
    """Recorded ids first, then each template."""
    named = [
        Masks(name, renderer, "endgeneration" in "".join(renderer.template.sources.values()))
        for name, renderer in renderers.items()
    ]
    return [Masks("recorded ids"), *named]


def _require(path: Path, look: Look | None, masks: list[Masks]) -> None:
    """Raises: UserError when there is nothing to look at."""
    if look is not None and not look.counts["captured"] + look.counts["segments"]:
        raise UserError(
            f"{path}: no token ids were recorded. Ask for them: --preset rl, or a way to them with "
            "--set endpoint.tokens=WAY"
        )
    if masks and not any(one.spans for one in masks):
        raise UserError(
            f"{path}: no token ids were recorded. Name a model's template: --tokenizer FOLDER"
        )


def _json(look: Look | None, masks: list[Masks], faults: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"faults": faults}
    if look is not None:
        found["tokens"] = look.as_dict()
    if masks:
        found["masks"] = [one.as_dict() for one in masks]
    return found


def _say(path: Path, look: Look | None, masks: list[Masks], faults: list[str]) -> None:
    if look is not None:
        told = [*look.forks, *look.others][:SHOWN]
        for row in told:
            print(line_of(row))
        if look.counts["segments"] > len(told):
            print(f"... and {look.counts['segments'] - len(told):,} more (--json has them all)")
    for fault in faults[:SHOWN]:
        print(f"error: {fault}", file=sys.stderr)
    if len(faults) > SHOWN:
        print(f"... and {len(faults) - SHOWN} more faults", file=sys.stderr)
    if look is not None:
        print(f"{path}: {summary_of(look)}")
        if (look.fork_rate or 0.0) > MANY_FORKS:
            print(f"warning: more than {MANY_FORKS:.0%} of histories forked", file=sys.stderr)
    for one in masks:
        if one.spans:
            print(one.line())
