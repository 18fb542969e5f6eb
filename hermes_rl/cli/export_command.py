"""`hermes-rl export`: a run in another format, with a loss report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from hermes_rl.cli.render import visible
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.text import many

if TYPE_CHECKING:
    from hermes_rl.export import Report


_Source = Annotated[
    str, typer.Argument(help="run directory; for harbor-tasks a dataset", metavar="RUN")
]
_AllowRetokenized = Annotated[
    bool,
    typer.Option(
        "--allow-retokenized",
        help="RL formats: also tokens that were made again from text; they are not what the"
        " model sampled",
    ),
]
_AllowSecrets = Annotated[
    bool, typer.Option("--allow-secrets", help="write rollouts whose texts look like a key, too")
]
_Image = Annotated[
    str | None, typer.Option(help="harbor-tasks: image of tasks that name none [ubuntu:24.04]")
]


def command(
    run: _Source,
    to: Annotated[str, typer.Option(help="format; `--to list` says which", metavar="FORMAT")],
    out: Annotated[str | None, typer.Option(help="file; default RUN/exports/FORMAT")] = None,
    min_reward: Annotated[float | None, typer.Option(help="only rollouts with this reward")] = None,
    end_reason: Annotated[
        list[str] | None, typer.Option(help="only these endings: answered,max_turns")
    ] = None,
    dedupe: Annotated[bool, typer.Option("--dedupe", help="of equal samples only one")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="at most this many rollouts")] = None,
    min_group: Annotated[
        int, typer.Option(min=1, help="RL formats: valid members that a group must have")
    ] = 2,
    advantage: Annotated[str, typer.Option(help="grpo, rloo or dr_grpo")] = "grpo",
    allow_retokenized: _AllowRetokenized = False,
    image: _Image = None,
    allow_secrets: _AllowSecrets = False,
    as_json: Annotated[bool, typer.Option("--json", help="the report as one JSON object")] = False,
) -> int:
    """Write a run in the format of a trainer or another program.

    Prints what was left out, and what the format cannot represent.

    \b
    hermes-rl export runs/my-run --to trl --min-reward 1
    hermes-rl export runs/my-run --to axolotl-tokens --out train.parquet
    hermes-rl export tasks.jsonl --to harbor-tasks --out tasks/
    hermes-rl export . --to list              the formats
    """
    from hermes_rl.export import FORMATS, AdvantageKind, ExportOptions, export_run, harbor_tasks

    if to == "list":
        formats = [(name, form.about) for name, form in FORMATS.items()]
        _print_formats([*formats, (harbor_tasks.NAME, harbor_tasks.ABOUT)])
        return ExitCode.DONE
    if to == harbor_tasks.NAME:
        return _export_tasks(run, out, image)
    kinds: tuple[AdvantageKind, ...] = ("grpo", "rloo", "dr_grpo")
    kind = next((k for k in kinds if k == advantage), None)
    if kind is None:
        raise UserError(f"no advantage {advantage!r}; choose one of {', '.join(kinds)}")
    options = ExportOptions(
        min_reward=min_reward,
        end_reasons=_endings(end_reason or []),
        dedupe=dedupe,
        limit=limit,
        allow_retokenized=allow_retokenized,
        allow_secrets=allow_secrets,
        min_group=min_group,
        advantage=kind,
    )
    report = export_run(run, to, out, options)
    print(msgspec.json.encode(report).decode() if as_json else _format_report(report))
    return ExitCode.DONE


def _export_tasks(dataset: str, out: str | None, image: str | None) -> int:
    from hermes_rl.export import harbor_tasks
    from hermes_rl.sources import dataset_name

    folder = Path(out or f"{dataset_name(dataset)}-tasks")
    report = harbor_tasks.export_tasks(dataset, folder, image or harbor_tasks.IMAGE)
    print(f"{report.out}: {many(report.written, 'task')}, {len(report.left_out):,} left out")
    for line in report.left_out:
        print(f"  {visible(line)}")
    return ExitCode.DONE


def _endings(values: list[str]) -> frozenset[str]:
    from hermes_rl.errors import ENDINGS

    names = frozenset(name for part in values for name in part.split(",") if name)
    for name in sorted(names - ENDINGS.keys()):
        known = ", ".join(sorted(ENDINGS))
        raise UserError(f"--end-reason: no ending {name!r}; choose from {known}")
    return names


def _print_formats(formats: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in formats)
    for name, about in formats:
        print(f"{name.ljust(width)}  {about}")


def _format_report(report: Report) -> str:
    from hermes_rl.export import LEFT_OUT, LOST

    lines = [
        f"{report.out}: {many(report.samples, 'sample')} of {many(report.rollouts, 'rollout')},"
        f" {report.trained:,} {report.unit} to train on"
    ]
    lines += [f"  left out {n:>8,}  {LEFT_OUT[key]}" for key, n in report.left_out.items()]
    lines += [f"  lost     {n:>8,}  {LOST[key]}" for key, n in report.lost.items()]
    return "\n".join(lines)
