"""Repositories with bugs: each bug is one, nothing shows the fix, and what earns a reward."""

import ast
import gc
import json
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from env_kit import Play, cheats, check_stream, works, wrong

from environments.swe_bugs.answers import told
from environments.swe_bugs.catalogue import (
    CALLS,
    ENOUGH,
    FILE,
    MODULES,
    UNSEEN,
    bugs,
    made,
    right,
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


def test_every_bug_is_shown_by_calls_that_the_module_without_it_answers() -> None:
    """The stored catalogue is what trying every change against every call gives now."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    left: list[float] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        left.append(signal.getitimer(signal.ITIMER_VIRTUAL)[0])

    gc.callbacks.append(watch)
    try:
        assert made() == stored
    finally:
        gc.callbacks.remove(watch)
    assert not any(left), "the limit of time could have ended in a callback of the collector"
    for module, entry in stored.items():
        for shown in entry["bugs"].values():
            assert len(shown) >= ENOUGH
            assert sum(not CALLS[module][n].visible for n in shown) >= UNSEEN
    assert {m.kind for module in MODULES for m, _ in bugs(module)} >= KINDS


@pytest.mark.parametrize("module", MODULES)
def test_a_change_touches_one_place_and_leaves_python(module: str) -> None:
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
def test_a_thousand_repositories_per_seed_and_no_bug_in_both_splits() -> None:
    check_stream(NAME)
    train, held = (
        {b.name for r in islice(repositories(split, 0), 1_000) for b in r.bugs}
        for split in ("train", "eval")
    )
    assert train
    assert held
    assert train.isdisjoint(held)


def test_the_history_holds_no_fix(tmp_path: Path) -> None:
    """One commit, no other object, and no object is a module without its bug."""
    task = first_tasks(NAME, 1)[0]
    for path, data in task.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
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


def test_every_cheat_has_something_to_work_on() -> None:
    task = first_tasks(NAME, 1)[0]
    assert all(works(name, task) for name in CHEATS)


def break_another(task: Task) -> str:
    fixed = {b["module"] for b in task.metadata["bugs"]}
    other = next(m for m in task.metadata["modules"] if m not in fixed)
    return f"{task.oracle}\nprintf 'x = 1\\n' > toolbox/{other}.py"


def only_what_was_reported(task: Task) -> str:
    """The reported call gets its answer, and nothing else is fixed."""
    lines = []
    for bug in task.metadata["bugs"]:
        module = bug["module"]
        told_at = next(c for c in CALLS[module] if f"{module}.{c.function}(" in task.prompt_text)
        name = told_at.function
        lines += [f"cat >> toolbox/{module}.py <<'PY'", f"_was = {name}", f"def {name}(*a, **k):"]
        answers = {
            repr((list(c.arguments[0]), c.arguments[1])): n
            for n, c in enumerate(CALLS[module])
            if c.function == name and c.visible
        }
        values = {key: right(module)[n] for key, n in answers.items()}
        lines += [f"    known = {values!r}", "    key = repr((list(a), k))"]
        lines += ["    return eval(known[key]) if key in known else _was(*a, **k)", "PY"]
    return "\n".join(lines)


def leak(task: Task) -> str:
    """Modules that look for answers in the box and send whatever they find."""
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


def every_answer(task: Task) -> str:
    """Modules that answer both with and without their bug, and leave the choice to the verifier."""
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


def test_fixed_bugs_earn_a_reward_and_nothing_else_does() -> None:
    plays = [
        Play("oracle", lambda t: str(t.oracle), 1.0),
        Play("oracle, tests deleted", lambda t: f"{t.oracle}\nrm -r tests .git", 1.0),
        Play("another module broken", break_another, 0.0),
        Play("the visible calls hard-coded", only_what_was_reported, 0.0),
        Play("looks for answers in the box", leak, 0.0),
        Play("several answers to choose from", every_answer, 0.0),
        Play("module deleted", lambda t: "rm toolbox/*.py", 0.0),
        *cheats(),
    ]
    assert wrong(NAME, plays) == {}


def test_each_fixed_bug_is_its_share() -> None:
    def first_alone(task: Task) -> str:
        module = task.metadata["bugs"][0]["module"]
        return f"cat > toolbox/{module}.py <<'PY'\n{source(module)}PY"

    rows = run_trial(NAME, tasks=6, solution=first_alone)
    counts = [len(t.metadata["bugs"]) for t in first_tasks(NAME, 6)]
    assert len(set(counts)) > 1
    assert [row.reward for row in rows] == pytest.approx([1 / n for n in counts])


def test_the_oracle_fixes_what_is_held_out_too() -> None:
    assert rewards_of(NAME, "oracle", tasks=6, split="eval") == [1.0] * 6


def test_doing_nothing_earns_nothing() -> None:
    assert rewards_of(NAME, "noop", tasks=3, split="eval") == [0.0] * 3


class Sly(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "'right'"

    __hash__ = str.__hash__


def test_answers_are_told_by_value() -> None:
    assert told((1, [2.0, "a"], {"b": None, "a": True})) == told(
        [1, (2.0, "a"), {"a": True, "b": None}]
    )
    assert told(Sly("right")) != told("right")
    assert told(1) != told(True) != told("True")
    assert told(0.1 + 0.2) == told(0.3)
    assert all(len(right_digests(m)) == len(CALLS[m]) for m in MODULES)
    # The longest report, of the five longest modules, fits into what a grading box passes on.
    longest = sorted(len(" ".join([m, *right_digests(m)])) + 1 for m in MODULES)
    assert sum(longest[-5:]) <= 4096
