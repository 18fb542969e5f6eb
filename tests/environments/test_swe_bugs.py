"""Repositories with bugs: the stored bugs, the git history, and rewards."""

import ast
import gc
import json
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from checks import Attempt, applies, cheats, check_stream, failed_attempts

from environments.swe_bugs.answers import canonical_text
from environments.swe_bugs.catalogue import (
    CALLS,
    ENOUGH,
    FILE,
    MODULES,
    UNSEEN,
    bugs,
    build_catalogue,
    right_answers,
    right_digests,
    source,
)
from environments.swe_bugs.mutate import mutants
from environments.swe_bugs.repository import repositories, visible_tests
from hermes_rl.rl import Task, first_tasks, rewards_of, run_trial
from hermes_rl.testing import CHEATS

NAME = "swe_bugs"
KINDS = {
    *("comparison", "off by one", "operator", "dropped call", "swapped arguments"),
    *("wrong default", "missing branch", "wrong branch", "and for or"),
}


def test_the_stored_bugs_are_those_that_the_calls_detect() -> None:
    """Trying every change with every call gives the stored catalogue."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    left: list[float] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        left.append(signal.getitimer(signal.ITIMER_VIRTUAL)[0])

    gc.callbacks.append(watch)
    try:
        assert build_catalogue() == stored
    finally:
        gc.callbacks.remove(watch)
    assert not any(left), "no timer ran during garbage collection"
    for module, entry in stored.items():
        for shown in entry["bugs"].values():
            assert len(shown) >= ENOUGH
            assert sum(not CALLS[module][n].visible for n in shown) >= UNSEEN
    assert {m.kind for module in MODULES for m, _ in bugs(module)} >= KINDS


@pytest.mark.parametrize("module", MODULES)
def test_a_change_affects_one_place_and_leaves_valid_python(module: str) -> None:
    text = source(module)
    for mutant in mutants(text):
        changed = mutant.applied(text)
        ast.parse(changed)
        assert changed != text
        assert changed.startswith(text[: mutant.start])
        assert changed.endswith(text[mutant.end :])


def test_the_modules_without_bugs_pass_their_visible_tests(tmp_path: Path) -> None:
    for folder in ("toolbox", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for module in MODULES:
        (tmp_path / f"toolbox/{module}.py").write_text(source(module))
        (tmp_path / f"tests/test_{module}.py").write_text(visible_tests(module))
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "discover", "-s", "tests", "-t", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_repository_stream_is_deterministic_and_its_splits_share_no_bug() -> None:
    check_stream(NAME)
    train, held = (
        {b.name for r in islice(repositories(split, 0), 300) for b in r.bugs}
        for split in ("train", "eval")
    )
    assert train
    assert held
    assert train.isdisjoint(held)


def test_the_git_history_contains_no_fix(tmp_path: Path) -> None:
    """There is one commit and no other object, and no object is a correct module."""
    task = first_tasks(NAME, 1)[0]
    for path, data in task.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    assert task.setup
    subprocess.run(["bash", "-c", task.setup], cwd=tmp_path, check=True, timeout=60)
    assert git("status", "--porcelain") == ""
    assert git("rev-list", "--all", "--count").strip() == "1"
    every = git("cat-file", "--batch-all-objects", "--batch-check").splitlines()
    reachable = git("rev-list", "--all", "--objects").splitlines()
    assert len(every) == len(reachable)
    blobs = {git("cat-file", "-p", line.split()[0]) for line in every if " blob " in line}
    assert blobs.isdisjoint(source(b["module"]) for b in task.metadata["bugs"])


def test_every_cheat_applies_to_repositories() -> None:
    task = first_tasks(NAME, 1)[0]
    assert all(applies(name, task) for name in CHEATS)


def break_another(task: Task) -> str:
    fixed = {b["module"] for b in task.metadata["bugs"]}
    other = next(m for m in task.metadata["modules"] if m not in fixed)
    return f"{task.oracle}\nprintf 'x = 1\\n' > toolbox/{other}.py"


def hard_code_visible_calls(task: Task) -> str:
    """Return the right results for the visible calls, and fix nothing."""
    lines = []
    for bug in task.metadata["bugs"]:
        module = bug["module"]
        reported = next(c for c in CALLS[module] if f"{module}.{c.function}(" in task.prompt_text)
        name = reported.function
        lines += [f"cat >> toolbox/{module}.py <<'PY'", f"_was = {name}", f"def {name}(*a, **k):"]
        answers = {
            repr((list(c.arguments[0]), c.arguments[1])): n
            for n, c in enumerate(CALLS[module])
            if c.function == name and c.visible
        }
        values = {key: right_answers(module)[n] for key, n in answers.items()}
        lines += [f"    known = {values!r}", "    key = repr((list(a), k))"]
        lines += ["    return eval(known[key]) if key in known else _was(*a, **k)", "PY"]
    return "\n".join(lines)


def leak_answers(task: Task) -> str:
    """Modules that search the sandbox for answers and report what they find."""
    code = (
        "import glob, json, os\n"
        "found = [open(p, 'rb').read() for p in glob.glob('/verify/*') + glob.glob('/hx/*')]\n"
        "name = __name__.rpartition('.')[2]\n"
        "calls = json.load(open('/verify/calls.json'))[name]\n"
        "line = ' '.join([name] + [f[:8].hex() for f in found][:1] * len(calls))\n"
        "os.write(3, (line + chr(10) + name + chr(10)).encode())\n"
        "os._exit(0)\n"
    )
    return f"for f in toolbox/[a-z]*.py; do cat > $f <<'PY'\n{code}PY\ndone"


def report_several_answers(task: Task) -> str:
    """Modules that report results with and without their bug."""
    lines = []
    for bug in task.metadata["bugs"]:
        module = bug["module"]
        texts = [task.files[f"toolbox/{module}.py"].decode(), source(module)]
        code = (
            "import json, os, sys, types\n"
            "sys.path.insert(0, os.environ['VERIFY'])\n"
            "import answers\n"
            f"calls = json.load(open('/verify/calls.json'))[{module!r}]\n"
            f"for text in {texts!r}:\n"
            "    made = types.ModuleType('made')\n"
            "    exec(text, made.__dict__)\n"
            "    found = [answers.digest(answers.answer(made, *call)) for call in calls]\n"
            f"    line = ' '.join([{module!r}, *found]) + chr(10)\n"
            "    os.write(3, line.encode())\n"
            "os._exit(0)\n"
        )
        lines += [f"cat > toolbox/{module}.py <<'PY'", code + "PY"]
    return "\n".join(lines)


def test_only_fixed_bugs_get_a_reward() -> None:
    attempts = [
        Attempt("oracle", lambda t: str(t.oracle), 1.0),
        Attempt("oracle, tests deleted", lambda t: f"{t.oracle}\nrm -r tests .git", 1.0),
        Attempt("another module broken", break_another, 0.0),
        Attempt("the visible calls hard-coded", hard_code_visible_calls, 0.0),
        Attempt("searches the sandbox for answers", leak_answers, 0.0),
        Attempt("several results per module", report_several_answers, 0.0),
        Attempt("module deleted", lambda t: "rm toolbox/*.py", 0.0),
        *cheats(),
    ]
    assert failed_attempts(NAME, attempts) == {}


def test_each_fixed_bug_gets_its_share_of_the_reward() -> None:
    def fix_first_bug(task: Task) -> str:
        module = task.metadata["bugs"][0]["module"]
        return f"cat > toolbox/{module}.py <<'PY'\n{source(module)}PY"

    rows = run_trial(NAME, tasks=6, solution=fix_first_bug)
    counts = [len(t.metadata["bugs"]) for t in first_tasks(NAME, 6)]
    assert len(set(counts)) > 1
    assert [row.reward for row in rows] == pytest.approx([1 / n for n in counts])


def test_the_oracle_fixes_what_is_held_out_too() -> None:
    assert rewards_of(NAME, "oracle", tasks=6, split="eval") == [1.0] * 6


def test_doing_nothing_earns_nothing() -> None:
    assert rewards_of(NAME, "noop", tasks=3, split="eval") == [0.0] * 3


class EqualToAll(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "'right'"

    __hash__ = str.__hash__


def test_results_are_compared_by_value() -> None:
    assert canonical_text((1, [2.0, "a"], {"b": None, "a": True})) == canonical_text(
        [1, (2.0, "a"), {"a": True, "b": None}]
    )
    assert canonical_text(EqualToAll("right")) != canonical_text("right")
    assert canonical_text(1) != canonical_text(True) != canonical_text("True")
    assert canonical_text(0.1 + 0.2) == canonical_text(0.3)
    assert all(len(right_digests(m)) == len(CALLS[m]) for m in MODULES)
    # The report of the five longest modules fits into the limit of a grading sandbox.
    longest = sorted(len(" ".join([m, *right_digests(m)])) + 1 for m in MODULES)
    assert sum(longest[-5:]) <= 4096
