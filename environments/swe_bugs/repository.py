"""Small repositories with one to three bugs: files, reports, and the setup script."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from environments.swe_bugs.answers import answer
from environments.swe_bugs.catalogue import (
    CALLS,
    MODULES,
    Call,
    bugs,
    format_call,
    load,
    right_answers,
    source,
)
from environments.swe_bugs.mutate import Mutant

EVAL_OF = 4
"""One bug in this many belongs to the split `eval`, by the hash of module and change, so that the
splits share no bug."""
_BUGS = ((1, 6), (2, 3), (3, 1))
"""Number of bugs in a repository, and its weight."""
_TRIES = 10_000
"""Draws without a new repository after which the stream ends."""

_README = """\
# toolbox

Small modules without dependencies: {modules}. The docstrings say what each function does.

    python3 -m unittest discover -s tests -t .
"""

_SETUP = """\
export GIT_AUTHOR_DATE='2024-03-01T12:00:00Z' GIT_COMMITTER_DATE='2024-03-01T12:00:00Z'
git init -q . && git config user.name toolbox && git config user.email toolbox@example.org &&
git add -A && git commit -q -m 'toolbox' && rm -rf .git/hooks .git/logs
"""


@dataclass(frozen=True)
class Bug:
    """A change of a module that calls detect."""

    module: str
    mutant: Mutant
    shown: tuple[int, ...]
    """Indices of the calls that detect it."""

    @property
    def name(self) -> str:
        """Identifies it among all bugs."""
        return f"{self.module}-{self.mutant.key}"

    @property
    def split(self) -> str:
        """`train` or `eval`."""
        first = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return "eval" if int(first, 16) % EVAL_OF == 0 else "train"

    @property
    def text(self) -> str:
        """The source of the module with the bug."""
        return self.mutant.applied(source(self.module))


@dataclass(frozen=True)
class Repository:
    """The repository that an agent gets."""

    bugs: tuple[Bug, ...]
    modules: tuple[str, ...]
    """Names of its modules, each with at most one bug."""
    reported: tuple[Call, ...]
    """One call that detects each bug."""

    @property
    def name(self) -> str:
        """Identifies it among the repositories of both splits."""
        return hashlib.sha256(" ".join(b.name for b in self.bugs).encode()).hexdigest()[:16]

    @property
    def files(self) -> dict[str, str]:
        """Path -> text."""
        texts = {m: source(m) for m in self.modules} | {b.module: b.text for b in self.bugs}
        listed = ", ".join(f"`{m}`" for m in self.modules)
        return {
            "README.md": _README.format(modules=listed),
            "toolbox/__init__.py": source("__init__"),
            "tests/__init__.py": "",
            **{f"toolbox/{m}.py": text for m, text in texts.items()},
            **{f"tests/test_{m}.py": visible_tests(m) for m in self.modules},
        }

    @property
    def reports(self) -> list[str]:
        """The report of each bug, one line each."""
        lines = []
        for bug, call in zip(self.bugs, self.reported, strict=True):
            got = answer(load(bug.module, bug.text), call.function, call.arguments)
            wanted = right_answers(bug.module)[CALLS[bug.module].index(call)]
            reported, expected = _format_result(got), _format_result(wanted)
            lines.append(f"`{format_call(call, bug.module)}`: {reported}, expected: {expected}")
        return lines

    @property
    def setup(self) -> str:
        """Make one commit with the bugs: no other state was ever in the repository."""
        return _SETUP

    def patched(self, fixed: Sequence[str]) -> str:
        """Return a script that fixes the bugs of some modules."""
        return "\n".join(
            f"printf %s {shlex.quote(source(module))} > toolbox/{module}.py" for module in fixed
        )


def repositories(split: str, seed: int) -> Iterator[Repository]:
    """Yield the repositories of a split, each with other bugs; some hundred thousand."""
    random = Random(f"swe_bugs/{split}/{seed}")
    pool = [b for m in MODULES for b in (Bug(m, *entry) for entry in bugs(m)) if b.split == split]
    numbers, weights = zip(*_BUGS, strict=True)
    seen: set[str] = set()
    tries = 0
    while tries < _TRIES:
        tries += 1
        count = random.choices(numbers, weights)[0]
        chosen = _in_distinct_modules(random, pool, count)
        others = [m for m in MODULES if m not in {b.module for b in chosen}]
        modules = sorted([b.module for b in chosen] + random.sample(others, random.randint(1, 2)))
        reported = tuple(CALLS[b.module][random.choice(b.shown)] for b in chosen)
        repository = Repository(tuple(chosen), tuple(modules), reported)
        if repository.name not in seen:
            seen.add(repository.name)
            tries = 0
            yield repository


def _in_distinct_modules(random: Random, pool: Sequence[Bug], count: int) -> list[Bug]:
    chosen: dict[str, Bug] = {}
    while len(chosen) < count:
        bug = random.choice(pool)
        chosen.setdefault(bug.module, bug)
    return sorted(chosen.values(), key=lambda b: b.module)


@cache
def visible_tests(module: str) -> str:
    """Return the test file of a module, with two calls of each function."""
    lines = ["import unittest", "", f"from toolbox import {module}", "", ""]
    lines.append(f"class {module.capitalize()}Test(unittest.TestCase):")
    function = ""
    for call, result in zip(CALLS[module], right_answers(module), strict=True):
        if not call.visible:
            continue
        if call.function != function:
            lines += ([""] if function else []) + [f"    def test_{call.function}(self):"]
            function = call.function
        lines.append(f"        {_assertion(module, call, result)}")
    return "\n".join(lines) + "\n"


def _assertion(module: str, call: Call, result: str) -> str:
    positional, named = call.arguments
    if result.startswith("raises "):
        arguments = [repr(a) for a in positional] + [f"{k}={v!r}" for k, v in named.items()]
        error = result.removeprefix("raises ")
        return f"self.assertRaises({error}, {', '.join([f'{module}.{call.function}', *arguments])})"
    wanted = getattr(load(module, source(module)), call.function)(*positional, **named)
    return f"self.assertEqual({format_call(call, module)}, {wanted!r})"


def _format_result(text: str) -> str:
    return text if text.startswith("raises ") else f"`{text}`"
