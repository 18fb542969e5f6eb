"""The task files in datasets/ and their cards, as files: nothing is run but `bash -n`, and oracles.

That oracles get 1 and no-ops 0 is shown elsewhere, by `hermes-rl check --run` in real sandboxes.
"""

import base64
import json
import re
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hermes_rl import load_run
from hermes_rl.cli import main

DATASETS = Path(__file__).parents[2] / "datasets"
FIELDS = {"id", "prompt", "files", "setup", "verify", "oracle", "requires", "toolsets"}
EXTRA_COLUMNS = {"category", "difficulty", "title"}
VERIFY_FIELDS = {"script", "files", "timeout_s", "image", "score"}
DIFFICULTIES = ("easy", "medium", "hard")
CATEGORIES = {
    *("text", "archives", "permissions", "json", "csv", "sqlite", "bugfix", "logs"),
    *("processes", "find", "sed-awk", "git", "build"),
}
# Not in bash, coreutils, grep, sed, awk, tar, gzip or python3: `requires` must name them.
NOT_BASIC = (
    *("find", "xargs", "cmp", "diff", "git", "make", "gcc", "cc", "setsid", "jq", "ps", "pgrep"),
    *("pkill", "killall", "lsof", "unzip", "zip", "sqlite3", "bc", "xxd", "perl", "curl", "wget"),
    *("rsync", "xz", "bzip2", "column", "rev", "flock"),
)
IN_COMMAND_POSITION = re.compile(
    rf"(?:^|[|;&({{]|\bdo|\bthen|\$\()[ \t]*({'|'.join(NOT_BASIC)})(?= )", re.MULTILINE
)

Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    """All rows of a data file, in order."""
    text = (DATASETS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


SMOKE = rows_of("smoke")
TASKS = rows_of("terminal_tasks")
TOOL_TASKS = rows_of("tool_tasks")
BOTH = SMOKE + TASKS + TOOL_TASKS


def verifier(row: Row) -> Row:
    """The verifier of a task in its long form."""
    verify = row["verify"]
    return {"script": verify} if isinstance(verify, str) else verify


def masked(text: str) -> str:
    """Text without what two copies of one task would differ in: digits, quoted strings, spacing."""
    text = re.sub(r"\"[^\"]*\"|'[^']*'|`[^`]*`", "Q", text)
    return " ".join(re.sub(r"\d+", "0", text).split())


def card_table(name: str, first_column: str) -> list[list[str]]:
    """Rows of the card's table whose first header cell is `first_column`, header left out."""
    lines = (DATASETS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().strip("`*") for cell in line.strip("|").split("|")])
    return table


def test_row_has_only_known_fields_of_the_right_kind() -> None:
    for row in BOTH:
        assert set(row) <= FIELDS | EXTRA_COLUMNS, row["id"]
        for field in ("id", "prompt", "oracle", "category", "difficulty"):
            assert isinstance(row[field], str), row["id"]
            assert row[field].strip(), row["id"]
        assert row["difficulty"] in DIFFICULTIES, row["id"]
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["id"]), row["id"]
        assert "files" in row or "setup" in row or row["id"] == "write-note", row["id"]
        assert set(verifier(row)) <= VERIFY_FIELDS, row["id"]
        assert all(program in NOT_BASIC for program in row.get("requires", [])), row["id"]


def test_scripts_are_valid_bash() -> None:
    for row in BOTH:
        for script in (row.get("setup", ""), verifier(row)["script"], row["oracle"]):
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
            assert done.returncode == 0, (row["id"], done.stderr)
            assert done.stderr == "", row["id"]


def test_files_stay_below_their_folder_and_decode() -> None:
    for row in BOTH:
        for files in (row.get("files", {}), verifier(row).get("files", {})):
            for name, content in files.items():
                path = PurePosixPath(name)
                assert not path.is_absolute(), row["id"]
                assert ".." not in path.parts, row["id"]
                if not isinstance(content, str):
                    assert set(content) == {"base64"}, row["id"]
                    base64.b64decode(content["base64"], validate=True)


def test_programs_beyond_the_basic_ones_are_declared() -> None:
    for row in BOTH:
        scripts = "\n".join((row.get("setup", ""), verifier(row)["script"], row["oracle"]))
        used = set(IN_COMMAND_POSITION.findall(scripts))
        assert used <= set(row.get("requires", [])), row["id"]


def test_verifier_suits_the_grading_box() -> None:
    """There the working directory is empty and lies outside the workspace."""
    for row in BOTH:
        verify = verifier(row)
        everything = verify["script"] + "".join(
            text for text in verify.get("files", {}).values() if isinstance(text, str)
        )
        assert "/workspace" in everything, row["id"]
        if "/verify/" in everything:
            assert verify.get("files"), row["id"]
        for call in re.findall(r"python3 [^\n]*(?:<<|/verify/)", verify["script"]):
            assert call.startswith("python3 -I "), call


def test_a_scoring_verifier_writes_to_descriptor_three_and_runs_nothing() -> None:
    """A program of the policy that inherits descriptor 3 could write its own reward."""
    for row in BOTH:
        verify = verifier(row)
        text = verify["script"] + "".join(verify.get("files", {}).values())
        assert bool(verify.get("score")) == ("reward=" in text), row["id"]
        if verify.get("score"):
            assert "os.write(3," in text, row["id"]
            assert "subprocess" not in text, row["id"]


def test_ids_are_unique() -> None:
    assert max(Counter(row["id"] for row in BOTH).values()) == 1


@pytest.mark.parametrize("part", ["prompt", "oracle", "verify"])
def test_no_two_tasks_are_alike(part: str) -> None:
    def text(row: Row) -> str:
        verify = verifier(row)
        return "\n".join((verify["script"], *map(str, verify.get("files", {}).values())))

    by_text: dict[str, list[str]] = {}
    for row in TASKS + TOOL_TASKS:
        by_text.setdefault(masked(text(row) if part == "verify" else row[part]), []).append(
            row["id"]
        )
    assert [ids for ids in by_text.values() if len(ids) > 1] == []


def test_no_two_prompts_share_most_of_their_words() -> None:
    words = {
        row["id"]: set(re.findall(r"[a-z]+", row["prompt"].lower())) for row in TASKS + TOOL_TASKS
    }
    for a, b in combinations(words, 2):
        assert len(words[a] & words[b]) / len(words[a] | words[b]) < 0.6, (a, b)


def test_smoke_is_ten_easy_tasks_and_four_need_two_commands() -> None:
    assert len(SMOKE) == 10
    assert {row["difficulty"] for row in SMOKE} == {"easy"}
    steps = {row["id"]: len(row["oracle"].strip().splitlines()) for row in SMOKE}
    assert sum(n >= 2 for n in steps.values()) >= 4
    assert "count-txt" in steps
    assert all(len(row["prompt"]) <= 160 for row in SMOKE)
    assert all("requires" not in row for row in SMOKE)
    assert {i: int(n) for i, _, n in card_table("smoke", "id")} == steps
    assert {i: c for i, c, _ in card_table("smoke", "id")} == {
        row["id"]: row["category"] for row in SMOKE
    }


def test_terminal_tasks_cover_all_categories_and_difficulties() -> None:
    assert len(TASKS) >= 60
    categories = Counter(row["category"] for row in TASKS)
    assert set(categories) == CATEGORIES
    assert min(categories.values()) >= 4
    difficulties = Counter(row["difficulty"] for row in TASKS)
    assert set(difficulties) == set(DIFFICULTIES)
    assert min(difficulties.values()) >= len(TASKS) / 4
    for category in CATEGORIES:
        assert {r["difficulty"] for r in TASKS if r["category"] == category} == set(DIFFICULTIES)
    assert sum(isinstance(row["verify"], dict) for row in TASKS) >= 3
    assert sum(bool(verifier(row).get("score")) for row in TASKS) >= 2


def test_git_and_build_tasks_say_what_they_require() -> None:
    for row in TASKS:
        if row["category"] == "git":
            assert row["requires"] == ["git"]
        if row["category"] == "build":
            assert row["requires"] in (["make"], ["make", "gcc"])


@pytest.mark.parametrize(("name", "rows"), [("terminal_tasks", TASKS), ("tool_tasks", TOOL_TASKS)])
def test_the_card_counts_what_is_there(name: str, rows: list[Row]) -> None:
    counts = Counter((row["category"], row["difficulty"]) for row in rows)
    table = card_table(name, "category")
    want = []
    categories = list(dict.fromkeys(row["category"] for row in rows))
    for category in categories:
        numbers = [counts[category, difficulty] for difficulty in DIFFICULTIES]
        want.append([category, *map(str, numbers), str(sum(numbers))])
    sums = [sum(counts[c, d] for c in categories) for d in DIFFICULTIES]
    want.append(["all", *map(str, sums), str(len(rows))])
    assert table == want


def test_the_folder_holds_data_and_cards_only() -> None:
    names = {path.name for path in DATASETS.iterdir()}
    data = {name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")}
    assert data == {"smoke", "terminal_tasks", "tool_tasks"}
    assert names == {"README.md", *(f"{n}.jsonl" for n in data), *(f"{n}.md" for n in data)}
    for name in data:
        assert "license: mit" in (DATASETS / f"{name}.md").read_text(encoding="utf-8")


def test_tool_tasks_cover_what_one_command_does_not() -> None:
    assert len(TOOL_TASKS) >= 30
    categories = Counter(row["category"] for row in TOOL_TASKS)
    assert set(categories) == {"services", "code", "web", "plans", "skills", "mcp"}
    assert all(row["toolsets"][0] == "terminal" for row in TOOL_TASKS)
    assert all("browser" in row["toolsets"] for row in TOOL_TASKS if row["category"] == "web")
    assert {row["difficulty"] for row in TOOL_TASKS} == set(DIFFICULTIES)


@pytest.mark.slow
def test_every_tool_task_is_solved_by_its_oracle(tmp_path: Path) -> None:
    options = ["--model", "oracle", "--workers", "0", "--out", str(tmp_path / "run")]
    assert main(["run", "tool_tasks", *options]) == 0
    done = load_run(tmp_path / "run").arrow("trajectories").to_pylist()
    rewards = {row["task_id"]: row["reward"] for row in done}
    assert rewards == {row["id"]: 1.0 for row in TOOL_TASKS}
