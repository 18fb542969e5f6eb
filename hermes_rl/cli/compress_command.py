"""`hermes-rl compress`: the trajectories of a run within a token budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from hermes_rl.config import ModelConfig
    from hermes_rl.export import CompressReport

_Model = Annotated[
    str | None, typer.Option(help="model that writes the summaries; default: the run's model")
]
_NoModel = Annotated[
    bool, typer.Option("--no-model", help="call no model: digests take the place of summaries")
]
_Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="folder with tokenizer.json, a name on the hub, or `bytes` (four are a token);"
        " default: the run's tokenizer, else bytes"
    ),
]


def command(
    run: Annotated[str, typer.Argument(help="run directory", metavar="RUN")],
    out: Annotated[str | None, typer.Option(help="run directory; default RUN-compressed")] = None,
    target_tokens: Annotated[int, typer.Option(min=1, help="tokens of a trajectory")] = 15_250,
    summary_tokens: Annotated[int, typer.Option(min=16, help="tokens of a summary")] = 750,
    keep_last: Annotated[int, typer.Option(min=0, help="last turns that stay as they are")] = 4,
    tokenizer: _Tokenizer = None,
    model: _Model = None,
    base_url: Annotated[str | None, typer.Option(help="endpoint of --model")] = None,
    provider: Annotated[str | None, typer.Option(help="known provider of --model")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable that holds its key")] = None,
    api_mode: Annotated[str | None, typer.Option(help="API of --model")] = None,
    no_model: _NoModel = False,
    concurrency: Annotated[int, typer.Option(min=1, help="summaries written at once")] = 16,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="count, and forecast the cost; write nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the report as one JSON object")] = False,
) -> int:
    """Fit long trajectories into a token budget.

    The beginning and the last turns stay; turns between them are replaced by a summary. The same
    command resumes. The run itself is not changed.

    \b
    hermes-rl compress runs/my-run --dry-run
    hermes-rl compress runs/my-run --model small-model --base-url http://localhost:8000/v1
    hermes-rl compress runs/my-run --no-model --target-tokens 8000 --out runs/short
    """
    from hermes_rl.export import CompressOptions, compress_run
    from hermes_rl.store import load_run

    if model is not None and no_model:
        raise UserError("--no-model calls no model. Remove --model, or --no-model")
    load_run(run)  # refuses what is not a run before its configuration is asked for a model
    place = {
        "base_url": base_url,
        "provider": provider,
        "api_key_env": api_key_env,
        "api_mode": api_mode,
    }
    options = {name: value for name, value in place.items() if value is not None}
    of_run = _of_run(Path(run))
    report = compress_run(
        run,
        out,
        CompressOptions(
            target_tokens=target_tokens,
            summary_tokens=summary_tokens,
            keep_last=keep_last,
            concurrency=concurrency,
        ),
        model=None if no_model else _model(model, options, of_run, run),
        tokenizer=tokenizer or _tokenizer(of_run, run),
        dry_run=dry_run,
    )
    print(msgspec.json.encode(report).decode() if as_json else _text(report, no_model))
    return ExitCode.DONE


def _of_run(run: Path) -> dict[str, Any]:
    """The configuration of a run; empty for one without, such as an import."""
    from hermes_rl.config import load_config

    path = run / "run.yaml"
    return load_config(path) if path.exists() else {}


def _tokenizer(of_run: dict[str, Any], run: str) -> str | None:
    """The tokenizer of a run. Raises: UserError when it is not there any more."""
    from hermes_rl.models.tokens import load_tokenizer

    found = of_run.get("endpoint", {}).get("tokenizer")
    if found is None:
        return None
    try:
        load_tokenizer(found)
    except UserError as error:
        raise UserError(
            f"{run} was made with endpoint.tokenizer {found!r}: {error}. Name one with --tokenizer,"
            " or --tokenizer bytes"
        ) from error
    return str(found)


def _model(
    name: str | None, options: dict[str, Any], of_run: dict[str, Any], run: str
) -> ModelConfig:
    """The model that writes summaries. Raises: UserError."""
    from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS, ModelConfig

    if name is not None:
        return ModelConfig(name=name, **options)
    section, endpoint = of_run.get("model", {}), of_run.get("endpoint", {})
    found = section.get("name")
    if found is None or section.get("mix") or found in (*PLAYED_MODELS, *LOCAL_MODELS):
        raise UserError(
            f"{run} names no model that can write summaries. Add --model NAME, or --no-model"
        )
    if options:
        raise UserError(
            f"--{next(iter(options)).replace('_', '-')} needs --model. Add --model NAME"
        )
    names = ("base_url", "provider", "api_key_env", "api_mode", "headers", "proxy", "ca_file")
    reached = {key: endpoint[key] for key in names if endpoint.get(key)}
    return ModelConfig(name=found, **reached)


def _text(report: CompressReport, no_model: bool) -> str:
    lines = [
        f"{report.run}: {report.rows:,} trajectories, {report.compressed:,} longer than the target"
        f" and compressed, {report.over_target:,} still longer",
        f"  tokens {report.tokens_before:,} -> {report.tokens_after:,} (counted by"
        f" {report.tokens_by})",
    ]
    if report.out is None:
        usage = report.usage
        if not no_model and usage is not None:
            cost = "not known" if report.cost_usd is None else f"${report.cost_usd:.2f}"
            lines.append(
                f"  forecast: {report.compressed:,} calls, about {usage.input_tokens or 0:,} tokens"
                f" in, {usage.output_tokens or 0:,} out, cost {cost}"
            )
        lines.append("  nothing was written (--dry-run)")
    else:
        lines.append(f"  {report.static_digests:,} summaries are digests that no model wrote")
        lines.append(f"  written to {report.out}")
    return "\n".join(lines)
