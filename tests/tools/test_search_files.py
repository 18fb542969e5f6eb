"""The tool `search_files`."""

from typing import Any

import pytest

from hermes_rl.errors import ToolError

TREE = """
mkdir -p src/deep .git node_modules/x docs
printf 'import os\\nx = 12\\ny = os.getcwd()\\n' > src/a.py
printf '# title\\nuse os here\\n' > docs/b.md
printf 'os\\n' > src/deep/c.py
printf 'os\\n' > .git/config
printf 'os\\n' > node_modules/x/i.py
printf 'os\\0\\n' > src/bin.py
"""


def places(found: Any) -> list[tuple[str, int]]:
    return [(m["path"], m["line"]) for m in found["matches"]]


async def test_content(each_bench: Any) -> None:
    await each_bench.sh(TREE)
    found = await each_bench("search_files", pattern=r"\bos\b")
    assert places(found) == [
        ("docs/b.md", 2),
        ("src/a.py", 1),
        ("src/a.py", 3),
        ("src/deep/c.py", 1),
    ]
    assert found["matches"][2]["content"] == "y = os.getcwd()"
    assert (found["total_count"], found["truncated"]) == (4, False)
    only = await each_bench("search_files", pattern="os", path="src", file_glob="*.py")
    assert [m["path"] for m in only["matches"]] == ["src/a.py", "src/a.py", "src/deep/c.py"]
    one = await each_bench("search_files", pattern="os", path="docs/b.md")
    assert places(one) == [("docs/b.md", 2)]
    assert (await each_bench("search_files", pattern="absent"))["matches"] == []


@pytest.mark.parametrize(
    "pattern", [r"x = \d+", r"x = [0-9]{2}", r"x\s*=\s*12", r"(?i)X = 12", r"^x.*?2$", "x|nothing"]
)
async def test_dialects_of_regular_expressions(bench: Any, pattern: str) -> None:
    await bench.sh("printf 'x = 12\\n' > f")
    assert places(await bench("search_files", pattern=pattern)) == [("f", 1)]


async def test_windows_and_modes(bench: Any) -> None:
    await bench.sh("for i in 1 2 3; do seq 1 40 > f$i; done")
    page = await bench("search_files", pattern=".", limit=10, offset=35)
    assert places(page) == [("f1", n) for n in range(36, 41)] + [("f2", n) for n in range(1, 6)]
    assert (page["total_count"], page["truncated"]) == (120, True)
    assert page["hint"] == "continue with offset=45"
    files = await bench("search_files", pattern="4", output_mode="files_only", limit=2)
    assert (files["files"], files["total_count"], files["truncated"]) == (["f1", "f2"], 3, True)
    counts = await bench("search_files", pattern="4", output_mode="count")
    assert (counts["counts"], counts["total_count"]) == ({"f1": 5, "f2": 5, "f3": 5}, 15)


async def test_context(bench: Any) -> None:
    await bench.sh("seq 1 30 > f")
    found = await bench("search_files", pattern="^(10|20)$", context=1)
    lines = [(m["line"], m.get("context", False)) for m in found["matches"]]
    assert lines == [(9, True), (10, False), (11, True), (19, True), (20, False), (21, True)]
    assert found["total_count"] == 2
    second = await bench("search_files", pattern="^(10|20)$", context=1, offset=1)
    assert [m["line"] for m in second["matches"]] == [19, 20, 21]


async def test_names(each_bench: Any) -> None:
    await each_bench.sh(TREE + "ln -s a.py src/link.py")
    found = await each_bench("search_files", pattern="*.py", target="files")
    assert found["files"] == ["src/a.py", "src/bin.py", "src/deep/c.py", "src/link.py"]
    assert (await each_bench("search_files", pattern="b.m", target="files"))["files"] == [
        "docs/b.md"
    ]
    deep = await each_bench("search_files", pattern="deep/*.py", target="files")
    assert deep["files"] == ["src/deep/c.py"]
    page = await each_bench(
        "search_files", pattern="*", target="files", path="src", limit=1, offset=1
    )
    assert page["files"] == ["src/bin.py"]
    assert page["truncated"]


async def test_odd_lines_and_names(bench: Any) -> None:
    await bench.sh(r"mkdir 'a b'; printf 'k:1-2:v\r\n' > 'a b/x:3:y-4-z'; printf '\351 k\n' > l")
    found = await bench("search_files", pattern="k")
    first = found["matches"][0]
    assert (first["path"], first["content"]) == ("a b/x:3:y-4-z", "k:1-2:v")
    await bench.sh("head -c 3000 /dev/zero | tr '\\0' k > long; echo >> long")
    long = await bench("search_files", pattern="k{9}")
    assert long["matches"][0]["content"] == "k" * 500 + " ... [truncated]"


async def test_much_is_bounded(bench: Any) -> None:
    await bench.sh("seq -f 'line %g with some more text to make it long' 1 100000 > f")
    found = await bench("search_files", pattern="line", limit=5000)
    assert found["truncated"]
    assert found["matches"][0]["line"] == 1
    assert "narrow the search" in found["hint"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pattern": "("}, "invalid regular expression: Unmatched"),
        ({"pattern": r"\d("}, "invalid regular expression"),
        ({"pattern": "x", "path": "nope"}, "no such file or directory: 'nope'"),
        ({"pattern": ""}, "must not be empty"),
        ({"pattern": "x", "target": "names"}, "must be one of"),
    ],
)
async def test_mistakes(bench: Any, arguments: dict[str, str], reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        await bench("search_files", **arguments)


async def test_a_pattern_may_look_like_an_option(bench: Any) -> None:
    await bench.sh("printf -- '-rf\\n' > f")
    assert (await bench("search_files", pattern="-rf"))["total_count"] == 1
