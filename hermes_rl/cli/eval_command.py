"""`hermes-rl eval`: models on a dataset, an environment or a known benchmark, with intervals.

Each model has a run directory. All models run the first tasks (the pilot) at the same time, then
the next ones, and share the limits of their endpoints, so that what changes at a provider during
the evaluation changes it for all of them. Growing `dataset.limit` resumes a run, so an evaluation
that was stopped resumes with the same command.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase as fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hermes_rl.cli import run_command as run
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.text import many

if TYPE_CHECKING:
    from batch_runner import Report, SharedRay
    from hermes_rl.config import RunConfig
    from hermes_rl.evals import Comparison, Summary

ROUNDS = 8
"""Rounds after the pilot."""
PILOT_SHARE, PILOT_TASKS = 0.1, 8
LEAST_TASKS = 30
"""Tasks before which no interval stops an evaluation."""

_ABSENT = ("dataset", "model", "out", "pilot", "limit", "dry_run")
_EVAL = run.load_options("eval")
_FOR_ROWS = {"--sample-id": "sample_ids", "--group-by": "group_by"}
_OF_ENV = {k: v for k, v in run.load_options("env").items() if k in ("split", "env_seed", "user")}
_RUN = {k: v for k, v in run.OPTIONS.items() if k not in (*_ABSENT, *_EVAL)}
OPTIONS = {**_EVAL, **_OF_ENV, **_RUN}


@dataclass
class _Evaluation:
    """What is evaluated."""

    name: str
    root: Path
    tasks: int
    about: dict[str, Any] = field(default_factory=dict)
    """Of the benchmark: its version and the published figure."""
    figures: Callable[[Any], dict[str, float]] | None = None
    """Other figures of the benchmark, of its graded trajectories."""
    prefix: str = ""
    """Of its files: a rescore leaves those of the evaluation alone."""
    group_by: str | None = None
    """Column of the rows."""
    is_env: bool = False
    """Whether it is an environment."""
    configs: dict[str, RunConfig] = field(default_factory=dict)
    """Model -> its run."""


def _work(values: dict[str, Any]) -> int:
    if not values["target"]:
        raise UserError("nothing to evaluate. Name it: hermes-rl eval humaneval --model local")
    from batch_runner import SharedRay

    evaluation = _prepare(values)
    with SharedRay() as ray:
        return _run_rounds(evaluation, values, ray)


def _run_rounds(evaluation: _Evaluation, values: dict[str, Any], ray: SharedRay) -> int:
    """Run the pilot and the further rounds, and report."""
    for number, size in enumerate(_sizes(evaluation.tasks)):
        for report in _run_round(evaluation, size, values["max_usd"], ray):
            if report.exit_code not in (ExitCode.DONE, ExitCode.GIVEN_UP):
                run.print_lines(report.lines())
                if "budget" in str(report.detail) and values["max_usd"] is not None:
                    _note(["--max-usd is for all models and all starts. Raise it to continue"])
                return int(report.exit_code)
        if number == 0 and size < evaluation.tasks:
            unscored = _unscored(evaluation, _summaries(evaluation, size))
            if len(unscored) == len(evaluation.configs) or (unscored and values["only_pilot"]):
                break  # the rest would not be graded either
            if _stop_after_pilot(evaluation, values):
                return int(ExitCode.DONE)
        if size >= LEAST_TASKS and _is_narrow(evaluation, size, values["width"]):
            break
    if unscored := _report(evaluation, size, as_json=values["as_json"]):
        of = f" of the first {size} tasks" if size < evaluation.tasks else ""
        _note([f"{', '.join(unscored)}: no unit{of} was graded, so there is no score (exit 1)"])
    return int(ExitCode.GIVEN_UP if unscored else ExitCode.DONE)


command = run.make_command(
    OPTIONS,
    "Evaluate and compare models on a dataset, an environment or a benchmark (humaneval, mbpp, "
    "gsm8k, gpqa, ifeval, bfcl, bfcl-live, terminal-bench-2). The same command resumes.\n\n"
    "Example: hermes-rl eval gsm8k --model gpt-5-mini --model gpt-5-nano --repeats 2 --max-usd 5",
    _work,
)


def _prepare(values: dict[str, Any]) -> _Evaluation:
    from hermes_rl.config import check_keys, parse_config, set_key
    from hermes_rl.evals import file_name

    run.find_modules_here()
    data, written = run.merge_options(values, OPTIONS)
    check_keys(data, "eval", written)
    stored = values["rescore"]
    models = ["oracle"] if stored else values["models"]
    if not models:
        raise UserError("no model. Name one or more: hermes-rl eval humaneval --model local")
    if values["max_usd"] is not None and data.get("run", {}).get("budget_usd") is not None:
        raise UserError("--budget-usd is for each model, --max-usd for all together. Use one")
    _check_names(models)
    evaluation = _evaluation(values, data)
    for model in models:
        name = evaluation.prefix.rstrip(".") or model
        set_key(data, "model.name", model)
        set_key(data, "run.out", str(evaluation.root / file_name(name)))
        evaluation.configs[name] = parse_config(data, "eval", written)
    return evaluation


def _check_names(models: Iterable[str]) -> None:
    """Raises: UserError for models whose runs would share a directory."""
    from hermes_rl.evals import file_name

    names: dict[str, str] = {}
    for model in models:
        if (other := names.get(file_name(model))) is not None:
            raise UserError(
                f"--model {other} and --model {model} would share the run directory "
                f"{file_name(model)!r}. Evaluate one of them with another --out DIR "
                "(--repeats N runs each task N times)"
            )
        names[file_name(model)] = model


def _evaluation(values: dict[str, Any], data: dict[str, Any]) -> _Evaluation:
    """Settle what is evaluated, and write its tasks beside the runs."""
    from hermes_rl.config import set_key
    from hermes_rl.evals import BENCHMARKS, file_name, shuffled
    from hermes_rl.sources import mapped_rows

    target, limit = values["target"], values["limit"]
    _check_values(values)
    columns = run.parse_column_map(values["columns"])
    if _is_environment(target):
        return _environment(values, data)
    if "env" in data:
        raise UserError(f"--split, --env-seed and --user are for environments; {target} is none")
    name = file_name(Path(target).stem) + ("-tools" if values["calls"] == "tools" else "")
    root = Path(values["out"] or f"runs/eval-{name}")
    evaluation = _Evaluation(name, root, 0, group_by=values["group_by"])
    folder = Path(target) if _holds_tasks(Path(target)) else None
    if target in BENCHMARKS:
        rows, folder = _benchmark(evaluation, values, data)
    elif folder is None:
        rows = list(mapped_rows(target, columns=columns))
        _check_rows(target, rows)
    if folder is not None:
        return _of_folder(evaluation, folder, values, data)
    rows = _select(rows, values["sample_ids"], values["group_by"])
    if values["rescore"]:
        evaluation.prefix = f"{Path(values['rescore']).resolve().name}-rescored."
        rows = _with_stored_answers(rows, Path(values["rescore"]))
        data.setdefault("agent", {})["toolsets"] = ["none"]
    chosen = list(islice(shuffled(rows), limit))
    if not chosen:
        raise UserError(f"{target}: no rows to evaluate. Check the file, or --limit")
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{evaluation.prefix}tasks.jsonl"
    _write_tasks(path, [json.dumps(row, default=str) + "\n" for row in chosen])
    set_key(data, "dataset.path", str(path))
    evaluation.tasks = len(chosen)
    return evaluation


def _select(
    rows: list[dict[str, Any]], patterns: list[str] | None, column: str | None
) -> list[dict[str, Any]]:
    """The rows with these ids. Raises: UserError for an id or a column that is not there."""
    from hermes_rl.tasks import FIELDS

    chosen: dict[int, dict[str, Any]] = {}
    for pattern in patterns or ():
        named = ((number, row, str(row.get("id", ""))) for number, row in enumerate(rows))
        found = {n: row for n, row, name in named if name == pattern or fnmatch(name, pattern)}
        if not found:
            raise UserError(f"--sample-id {pattern}: no row has such an id. Use * for any text")
        chosen |= found
    rows = [chosen[number] for number in sorted(chosen)] if patterns else rows
    absent = [row for row in rows if column and (column in FIELDS or row.get(column) is None)]
    if absent:
        raise UserError(
            f"--group-by {column}: {len(absent)} of {len(rows)} rows have no such column of their "
            f"own (first: {str(absent[0].get('id'))!r}; it has {', '.join(absent[0])})"
        )
    return rows


def _check_values(values: Mapping[str, Any]) -> None:
    """Raises: UserError for an option that has a wrong value, or is for other targets."""
    from hermes_rl.evals import BENCHMARKS

    for option in ("limit", "width", "max_usd"):
        if values[option] is not None and not values[option] > 0:
            raise UserError(f"--{option.replace('_', '-')} must be above 0")
    if values["calls"] is not None and values["target"] not in BENCHMARKS:
        raise UserError(f"--calls is for bfcl and bfcl-live; {values['target']} is neither")


def _benchmark(
    evaluation: _Evaluation, values: Mapping[str, Any], data: dict[str, Any]
) -> tuple[list[dict[str, Any]], Path | None]:
    """The rows of a benchmark, or its folder of tasks."""
    from hermes_rl.evals import load_benchmark

    loaded = load_benchmark(values["target"], values["data"], values["calls"])
    evaluation.about = {"version": loaded.version, "published": loaded.benchmark.published}
    evaluation.figures = loaded.benchmark.figures
    if loaded.folder is None:
        agent = data.setdefault("agent", {})
        agent.setdefault("toolsets", ["none"])
        agent.setdefault("system_prompt", "")
    return loaded.rows, loaded.folder


def _holds_tasks(path: Path) -> bool:
    from hermes_rl.task_folders import task_folders

    return path.is_dir() and bool(task_folders(path))


def _of_folder(
    evaluation: _Evaluation, folder: Path, values: Mapping[str, Any], data: dict[str, Any]
) -> _Evaluation:
    """Evaluate task folders where they are, in the order of their names: images are built from
    them. Raises: UserError."""
    from hermes_rl.config import set_key
    from hermes_rl.sources import read_rows

    if values["rescore"]:
        raise UserError("--rescore judges answers, not workspaces. Use env regrade for it")
    if option := next((name for name, key in _FOR_ROWS.items() if values[key]), None):
        raise UserError(f"{option} is for rows of a dataset, and {folder} holds task folders")
    rows = islice(read_rows(str(folder)), values["limit"])
    tasks = [json.dumps({"task_hash": row.task_hash}) + "\n" for row in rows]
    evaluation.tasks = len(tasks)
    evaluation.root.mkdir(parents=True, exist_ok=True)
    _write_tasks(evaluation.root / "tasks.jsonl", tasks)
    set_key(data, "dataset.path", str(folder))
    return evaluation


def _is_environment(target: str) -> bool:
    """Whether `hermes-rl env` takes it: a known name, module:Class, or a file or folder of code."""
    from hermes_rl.rl import known_environments

    where = target.partition(":")[0]
    if where.endswith(".py") or (Path(where).expanduser() / "__init__.py").is_file():
        return True
    return where in known_environments() or bool(re.fullmatch(r"[\w.]+:[A-Z]\w*", target))


def _environment(values: dict[str, Any], data: dict[str, Any]) -> _Evaluation:
    """Settle which tasks of an environment are evaluated."""
    from hermes_rl.config import parse_config
    from hermes_rl.evals import file_name
    from hermes_rl.rl import env_rows, settle_env

    target, limit = values["target"], values["limit"]
    for_rows = {"--data": "data", "--map": "columns", "--rescore": "rescore", **_FOR_ROWS}
    for option, key in for_rows.items():
        if values[key]:
            fix = "Use hermes-rl env regrade" if key == "rescore" else "Leave it out"
            raise UserError(f"{option} is for datasets, and {target} is an environment. {fix}")
    env = {"name": target, "split": "eval", "mode": "evaluate", **data.get("env", {})}
    if judges := data.get("scoring", {}).pop("judges", None):
        env["judge"] = {"name": judges[-1], **env.get("judge", {})}
    data["env"] = env
    probe = {**data, "model": {"name": "noop"}, "dataset": {"limit": limit}}
    _, opened = settle_env(parse_config(probe, "eval"))
    assert opened is not None
    tasks = [json.dumps({"task_hash": row.task_hash}) + "\n" for row in env_rows(opened, limit)]
    if not tasks:
        raise UserError(f"environment {target} has no tasks in the split {env['split']!r}")
    where = Path(target.partition(":")[0]).name.removesuffix(".py")
    name = file_name(where.rpartition(".")[2])
    root = Path(values["out"] or f"runs/eval-{name}")
    root.mkdir(parents=True, exist_ok=True)
    _write_tasks(root / "tasks.jsonl", tasks)
    return _Evaluation(name, root, len(tasks), {}, is_env=True)


def _check_rows(target: str, rows: list[dict[str, Any]]) -> None:
    """Name the first bad row, and refuse a file without a good one, before anything is written.
    Raises: UserError."""
    from hermes_rl.tasks import parse_row

    parsed = [parse_row(row, i, f"{target}: row {i + 1}") for i, row in enumerate(rows)]
    bad = [f"{one.place}: {one.error}" for one in parsed if one.error is not None]
    if bad and len(bad) == len(rows):
        raise UserError(bad[0])
    if bad:
        print(
            f"{len(bad)} of {len(rows)} rows are bad and get no reward: {bad[0]}", file=sys.stderr
        )


def _write_tasks(path: Path, lines: list[str]) -> None:
    """Write the tasks, to which more may have been added. Raises: UserError when one that may have
    been evaluated is changed or absent: its old result would be in the score."""
    if path.exists():
        old = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if gone := len(set(old) - set(lines)):
            raise UserError(
                f"{path.parent}: {gone} of its {len(old)} tasks are changed or no longer chosen, "
                "and would count in the score. Choose another folder: --out DIR"
            )
    new = path.with_suffix(".new")
    new.write_text("".join(lines), encoding="utf-8")
    new.replace(path)  # a half-written file would look like other tasks


def _with_stored_answers(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows whose answers a run holds, each answer as the oracle: it is judged again, without a
    call of the model. Raises: UserError."""
    from hermes_rl.store import load_run

    by_id = {str(row["id"]): row for row in rows if row.get("id") is not None}
    if not by_id:
        raise UserError(
            "--rescore finds answers by the 'id' of their rows; these have none. Give each row an "
            "'id' before it is evaluated"
        )
    verified = next((name for name, row in by_id.items() if row.get("verify")), None)
    if verified is not None:
        raise UserError(
            f"row {verified!r} has 'verify', which judges a workspace. Use env regrade for it"
        )
    calling = any("answer_tools" in row for row in rows)
    made, columns = [], ["task_id", "final_response", *(["messages"] if calling else [])]
    for task, answer, *messages in load_run(path).frame("trajectories", columns)[columns].values:
        if task in by_id:
            whole = messages[0] if by_id[task].get("answer_tools") else []
            last = whole[-1] if len(whole) else {}
            calls = [dict(call["function"]) for call in last.get("tool_calls") or ()]
            step = {"text": answer or "", "calls": calls}
            made.append({**by_id[task], "oracle": json.dumps([step]), "repeats": None})
    if not made:
        raise UserError(f"{path} has no answers to these rows (by 'id'). Is --calls the same?")
    return made


def _sizes(tasks: int) -> list[int]:
    """Numbers of tasks after the pilot and after each further turn."""
    pilot = min(tasks, max(PILOT_TASKS, math.ceil(PILOT_SHARE * tasks)))
    step = (tasks - pilot) / ROUNDS
    return sorted({pilot, *(tasks - math.floor(step * left) for left in range(ROUNDS))})


def _run_round(
    evaluation: _Evaluation, size: int, max_usd: float | None, ray: SharedRay
) -> Iterator[Report]:
    """Run all models on the first `size` tasks at the same time. Embedded models take turns, since
    they compete for this machine."""
    from batch_runner import arun_jointly, default_progress
    from hermes_rl.aio import run_sync
    from hermes_rl.config import LOCAL_MODELS

    sized = {
        model: config.model_copy(
            update={"dataset": config.dataset.model_copy(update={"limit": size})}
        )
        for model, config in evaluation.configs.items()
    }
    alone = [{m: sized.pop(m)} for m in evaluation.configs if m in LOCAL_MODELS]
    for configs in (sized, *alone) if sized else alone:
        progress = default_progress()
        progress.note(f"{', '.join(configs)}: {size:,} of {many(evaluation.tasks, 'task')}")
        running = arun_jointly(configs, progress=progress, budget_usd=max_usd, ray=ray)
        yield from run_sync(running).values()


def _stop_after_pilot(evaluation: _Evaluation, values: Mapping[str, Any]) -> bool:
    """Print what the rest will cost; whether it must not be spent."""
    from batch_runner import forecast_costs

    most, unknown = 0.0, False
    for model, config in evaluation.configs.items():
        out = Path(config.run.out or "")
        repeats = config.dataset.repeats
        ended = forecast_costs(out, 0).ended
        forecast = forecast_costs(out, max(0, evaluation.tasks * repeats - ended))
        _note(f"{model}: {line}" for line in forecast.lines())
        most, unknown = (
            most + (forecast.usd.high if forecast.usd else 0.0),
            unknown or not (forecast.usd),
        )
    limit = values["max_usd"]
    if values["only_pilot"]:
        return True
    if limit is not None and (most > limit or unknown):
        why = "the cost is unknown" if unknown else f"it may cost ${most:.2f}"
        _note([f"stopped after the pilot: {why}, and --max-usd is {limit:g}"])
        return True
    return False


def _note(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line, err=True)


def _summaries(evaluation: _Evaluation, size: int) -> list[Summary]:
    """Summarize the first `size` tasks only: a start that was killed may have left some of the next
    ones, the quick ones first, and the decision to stop must be the same without them."""
    from hermes_rl.evals import summary
    from hermes_rl.store import load_run

    runs = [load_run(config.run.out or "") for config in evaluation.configs.values()]
    return [summary(one, tasks=_first_tasks(evaluation, size)) for one in runs]


def _compared(
    evaluation: _Evaluation, size: int, summaries: Sequence[Summary]
) -> tuple[list[Comparison], list[str]]:
    """Compare the solved shares of the models that have a score, and mean rewards where some are
    neither 0 nor 1; also why some pairs are not compared."""
    from hermes_rl.evals import NotCompared, compare_all
    from hermes_rl.store import load_run

    unscored, tasks = _unscored(evaluation, summaries), _first_tasks(evaluation, size)
    outs = [c.run.out or "" for model, c in evaluation.configs.items() if model not in unscored]
    if len(outs) < 2:
        return [], []
    scored = [load_run(out) for out in outs]
    with warnings.catch_warnings(record=True) as left_out:
        warnings.simplefilter("always")
        pairs = compare_all(scored, tasks=tasks)
        if any(one.partial for one in summaries):
            pairs += compare_all(scored, tasks=tasks, score="reward")
    reasons = (str(one.message) for one in left_out if one.category is NotCompared)
    return pairs, list(dict.fromkeys(reasons))


def _first_tasks(evaluation: _Evaluation, size: int) -> frozenset[str] | None:
    return frozenset(_task_hashes(evaluation)[:size]) if size < evaluation.tasks else None


def _grouped_lines(evaluation: _Evaluation, size: int, result: dict[str, Any]) -> list[str]:
    """The scores by the values of `--group-by` as text; `result` gets them as numbers."""
    from hermes_rl.evals import grouped
    from hermes_rl.store import load_run

    lines, column = list[str](), evaluation.group_by
    for model, config in evaluation.configs.items() if column else ():
        assert column is not None
        graded = load_run(config.run.out or "")
        rows = grouped(graded, column, tasks=_first_tasks(evaluation, size)).to_dict("records")
        result["models"][model]["groups"] = [
            {k: v if isinstance(v, str) else _finite((v,))[0] for k, v in row.items()}
            for row in rows
        ]
        for row in rows:
            line = f"{model}: {column} {row[column]}: solved {row['solved']:.0%}"
            if row["tasks"] > 1:
                line += f" (95 % interval {row['solved_low']:.0%} to {row['solved_high']:.0%})"
            if row["reward"] != row["solved"]:
                line += f", mean reward {row['reward']:.3g}"
            lines.append(f"{line} over {many(row['tasks'], 'task')}, {many(row['units'], 'unit')}")
    return lines


def _task_hashes(evaluation: _Evaluation) -> list[str]:
    from hermes_rl.sources import read_rows

    if evaluation.is_env:
        path = evaluation.root / f"{evaluation.prefix}tasks.jsonl"
        return [json.loads(line)["task_hash"] for line in path.read_text("utf-8").splitlines()]
    config = next(iter(evaluation.configs.values()))
    return [row.task_hash for row in read_rows(config.dataset.path)]


def _is_narrow(evaluation: _Evaluation, size: int, width: float | None) -> bool:
    """Whether every interval over the first `size` tasks is within plus or minus `width`
    percent."""
    if width is None:
        return False
    summaries = _summaries(evaluation, size)
    comparisons, _ = _compared(evaluation, size, summaries)
    intervals = [pair.difference for pair in comparisons]
    for one in () if comparisons else summaries:
        intervals += [one.solved, one.reward] if one.partial else [one.solved]
    return all((one.high - one.low) / 2 * 100 <= width for one in intervals)


def _ungraded_lines(evaluation: _Evaluation, summaries: Iterable[Summary]) -> Iterator[str]:
    """Why units have no reward, and what to do."""
    for (model, config), found in zip(evaluation.configs.items(), summaries, strict=True):
        if not found.never_graded:
            continue
        text = f"{model}: {many(found.never_graded, 'unit')} without a reward"
        if found.failures.empty:
            yield f"{text}: give the tasks a 'score' or 'verify' (docs/scoring.md)"
        else:
            last = " ".join(str(found.failures["error"].iloc[-1]).split())[:300]
            yield (
                f"{text} (the last failure: {last}); hermes-rl show {config.run.out} --failed "
                "lists them, --retry-failed tries them again"
            )


def _unscored(evaluation: _Evaluation, summaries: Iterable[Summary]) -> list[str]:
    """The models without a graded unit."""
    found = zip(evaluation.configs, summaries, strict=True)
    return [model for model, one in found if not one.tasks]


def _report(evaluation: _Evaluation, size: int, *, as_json: bool) -> list[str]:
    """Write and print the result. Returns the models without a score."""
    from hermes_rl.rl import SUMMARY_METRICS

    summaries = _summaries(evaluation, size)
    comparisons, not_compared = _compared(evaluation, size, summaries)
    result: dict[str, Any] = {
        "name": evaluation.name,
        **evaluation.about,
        "models": {
            model: {
                "run": found.name,
                "tasks": found.tasks,
                "units": found.units,
                "solved": _finite(found.solved),
                "reward": _finite(found.reward),
                "never_graded": found.never_graded,
                **_finite_shares(found),
                "bounds": _finite(found.bounds),
                "unfinished": found.unfinished,
                **_figures(evaluation, model),
            }
            for model, found in zip(evaluation.configs, summaries, strict=True)
        },
        "comparisons": [_comparison_fields(pair) for pair in comparisons],
        "not_compared": not_compared,
    }
    grouped = _grouped_lines(evaluation, size, result)
    metrics = _env_metrics(evaluation)
    for model, found_metrics in metrics.items():
        result["models"][model]["metrics"] = found_metrics
    place = evaluation.root / f"{evaluation.prefix}evaluation.json"
    place.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    unscored = _unscored(evaluation, summaries)
    if as_json:
        _note(_ungraded_lines(evaluation, summaries))
        print(json.dumps(result))
        return unscored
    lines = [str(found) for found in summaries]
    lines += _ungraded_lines(evaluation, summaries)
    lines += [found.shares for found in summaries if found.tasks]
    if any(found.units > found.tasks for found in summaries):
        lines += [
            f"{found.name}: {found.variance.advice}" for found in summaries if found.tasks > 1
        ]
    for model in evaluation.configs:
        for name, figure in _figures(evaluation, model).get("figures", {}).items():
            lines.append(f"{model}: {name} {100 * figure:.1f}%")
    lines += [*grouped, *(str(pair) for pair in comparisons), *not_compared]
    for model, values in metrics.items():
        more = {name: values[name] for name in values.keys() - SUMMARY_METRICS}
        lines += [f"{model}: {name} {value:.4g}" for name, value in sorted(more.items())]
    if evaluation.about:
        lines += [
            f"data: {evaluation.about['version']}",
            f"published: {evaluation.about['published']}",
        ]
    run.print_lines([*lines, f"runs: {evaluation.root}"])
    return unscored


def _comparison_fields(pair: Comparison) -> dict[str, Any]:
    return {
        "a": pair.a,
        "b": pair.b,
        "score": pair.score,
        "difference": _finite(pair.difference),
        "p_value": pair.p_value,
        "verdict": pair.verdict,
    }


def _env_metrics(evaluation: _Evaluation) -> dict[str, Any]:
    """Model -> the metrics of an environment, which are also written as `env evaluate` does."""
    if not evaluation.is_env:
        return {}
    from hermes_rl.aio import run_sync
    from hermes_rl.rl import write_evaluation

    return {
        model: run_sync(write_evaluation(Path(config.run.out or "")))
        for model, config in evaluation.configs.items()
    }


def _figures(evaluation: _Evaluation, model: str) -> dict[str, dict[str, float]]:
    from hermes_rl.store import load_run

    if evaluation.figures is None:
        return {}
    columns = ["metadata", "metrics", "reward"]
    run_directory = load_run(evaluation.configs[model].run.out or "")
    frame = run_directory.frame("trajectories", columns).dropna(subset="reward")
    return {"figures": evaluation.figures(frame) if len(frame) else {}}


def _finite_shares(found: Summary) -> dict[str, float | None]:
    names = ("truncated", "retried", "all_failed", "all_solved")
    return dict(zip(names, _finite(tuple(getattr(found, n) for n in names)), strict=True))


def _finite(values: tuple[float, ...]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
