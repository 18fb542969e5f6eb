"""A small repository with one to three bugs: its files, the reports, the script that begins it."""

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
    loaded,
    right,
    source,
    written,
)
from environments.swe_bugs.mutate import Mutant

EVAL_OF = 4
"""One bug of so many belongs to the split `eval`, by the hash of module and change: the splits
share no bug."""
_BUGS = ((1, 6), (2, 3), (3, 1))
"""Number of bugs in a repository, and how often."""
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
    """A change of a module that calls show."""

    module: str
    mutant: Mutant
    shown: tuple[int, ...]
    """Places of the calls."""

    @property
    def name(self) -> str:
        """Names it among all bugs."""
        return f"{self.module}-{self.mutant.key}"

    @property
    def split(self) -> str:
        """`train` or `eval`."""
        first = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return "eval" if int(first, 16) % EVAL_OF == 0 else "train"

    @property
    def text(self) -> str:
        """The module with it."""
        return self.mutant.applied(source(self.module))


@dataclass(frozen=True)
class Repository:
    """What an agent gets."""

    bugs: tuple[Bug, ...]
    modules: tuple[str, ...]
    """All that it holds, by name; at most one bug in each."""
    reported: tuple[Call, ...]
    """A call for each bug."""

    @property
    def name(self) -> str:
        """Names it among all repositories of both splits."""
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
        """What somebody saw, a line for each bug."""
        lines = []
        for bug, call in zip(self.bugs, self.reported, strict=True):
            got = answer(loaded(bug.module, bug.text), call.function, call.arguments)
            wanted = right(bug.module)[CALLS[bug.module].index(call)]
            lines.append(f"`{written(call, bug.module)}`: {_said(got)}, expected: {_said(wanted)}")
        return lines

    @property
    def setup(self) -> str:
        """One commit, of the state with the bugs: no other was ever in this repository."""
        return _SETUP

    def patched(self, fixed: Sequence[str]) -> str:
        """A script that fixes the bugs of some modules."""
        return "\n".join(
            f"printf %s {shlex.quote(source(module))} > toolbox/{module}.py" for module in fixed
        )


def repositories(split: str, seed: int) -> Iterator[Repository]:
    """The repositories of a split, no two with the same bugs; some hundred thousand."""
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
        made = Repository(tuple(chosen), tuple(modules), reported)
        if made.name not in seen:
            seen.add(made.name)
            tries = 0
            yield made


def _in_distinct_modules(random: Random, pool: Sequence[Bug], count: int) -> list[Bug]:
    chosen: dict[str, Bug] = {}
    while len(chosen) < count:
        bug = random.choice(pool)
        chosen.setdefault(bug.module, bug)
    return sorted(chosen.values(), key=lambda b: b.module)


@cache
def visible_tests(module: str) -> str:
    """The test file of a module: two calls of each function."""
    lines = ["import unittest", "", f"from toolbox import {module}", "", ""]
    lines.append(f"class {module.capitalize()}Test(unittest.TestCase):")
    function = ""
    for call, told in zip(CALLS[module], right(module), strict=True):
        if not call.visible:
            continue
        if call.function != function:
            lines += ([""] if function else []) + [f"    def test_{call.function}(self):"]
            function = call.function
        lines.append(f"        {_asserted(module, call, told)}")
    return "\n".join(lines) + "\n"


def _asserted(module: str, call: Call, told: str) -> str:
    positional, named = call.arguments
    if told.startswith("raises "):
        given = [repr(a) for a in positional] + [f"{k}={v!r}" for k, v in named.items()]
        error = told.removeprefix("raises ")
        return f"self.assertRaises({error}, {', '.join([f'{module}.{call.function}', *given])})"
    wanted = getattr(loaded(module, source(module)), call.function)(*positional, **named)
    return f"self.assertEqual({written(call, module)}, {wanted!r})"


def _said(text: str) -> str:
    return text if text.startswith("raises ") else f"`{text}`"
