"""`patch` with a patch of the format V4A: several files, all or none."""

import contextlib
import difflib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import ToolError
from hermes_rl.tools import apply_hunks, parse_patch

LINES = st.lists(st.text("ab+-@* \té", max_size=3), max_size=12)


def patch_of(before: list[str], after: list[str], context: int) -> str:
    out = ["*** Begin Patch", "*** Update File: f"]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(context):
        out.append("@@")
        for tag, i, j, k, end in group:
            out += [(" " if tag == "equal" else "-") + line for line in before[i:j]]
            out += ["+" + line for line in after[k:end] if tag != "equal"]
        if group[-1][2] == len(before):
            out.append("*** End of File")
    return "\n".join([*out, "*** End Patch"])


def applied(before: list[str], patch: str) -> str:
    (change,) = parse_patch(patch)
    return apply_hunks("".join(f"{line}\n" for line in before), change.hunks)


@given(LINES, LINES, st.integers(0, 3))
def test_an_edit_as_a_patch_gives_the_edited_file_or_is_refused(
    before: list[str], after: list[str], context: int
) -> None:
    if before == after:
        return
    wanted = "".join(f"{line}\n" for line in after)
    assert applied(before, patch_of(before, after, len(before))) == wanted
    try:
        result = applied(before, patch_of(before, after, context + 1))
    except ToolError as error:
        result = str(error)
    assert result == wanted or "occur" in result


@given(st.lists(st.integers(0, 60), max_size=40, unique=True), st.data())
def test_an_edit_between_unique_lines_always_applies(numbers: list[int], data: Any) -> None:
    before = [f"line {number}" for number in numbers]
    chosen = data.draw(st.lists(st.sampled_from([*before, "new", "other"]), max_size=40))
    after = [line for line in before if line not in chosen[:5]]
    after[len(after) // 2 : len(after) // 2] = chosen[5:]
    if before != after:
        wanted = "".join(f"{line}\n" for line in after)
        assert applied(before, patch_of(before, after, 3)) == wanted


PIECES = "*** Update File: f|*** Move to: g|*** End of File|@@|@@ a| a|+b|-a||x|*** Add File: h"


@given(st.lists(st.sampled_from(PIECES.split("|"))))
def test_any_text_is_read_or_refused(lines: list[str]) -> None:
    text = "\n".join(["*** Begin Patch", "*** Update File: f", *lines, "*** End Patch"])
    with contextlib.suppress(ToolError):
        for change in parse_patch(text):
            assert set(apply_hunks("a\nx\na\n", change.hunks)) <= set("abx\n")


CODE = (
    "class A:\n    def f(self):\n        return 1\n\n\nclass B:\n    def f(self):\n        return 1"
)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("@@ class B:\n@@     def f(self):\n-        return 1\n+        return 2", CODE[:-1] + "2"),
        ("@@ class B\n     def f(self):\n-        return 1\n+        return 2", CODE[:-1] + "2"),
        ("-        return 1\n+        return 2\n*** End of File", CODE[:-1] + "2"),
        ("@@ class B:\n def f(self):\n-    return 1\n+    return 2", CODE[:-1] + "2"),
        ("@@ -6,3 +6,3 @@ class B:\n     def f(self):\n-        return 1", CODE[:-17]),
        ("@@ class A:\n+    x = 1", CODE.replace("A:\n", "A:\n    x = 1\n")),
        (" class B:  \n+    x = 1\n", CODE.replace("B:\n", "B:\n    x = 1\n")),
    ],
)
def test_where_a_hunk_belongs(body: str, result: str) -> None:
    (change,) = parse_patch(f"*** Begin Patch\n*** Update File: f\n{body}\n*** End Patch")
    assert apply_hunks(CODE, change.hunks) == result


BOTH = """*** Begin Patch
*** Update File: a.py
*** Move to: lib/a.py
@@
-x = 1
+x = 2
*** Add File: new/b.txt
+héllo
+
*** Update File: crlf
 one
-two
+2
*** Delete File: old.txt
*** End Patch
"""


async def test_a_patch_changes_all_its_files(each_bench: Any) -> None:
    await each_bench.sh(
        r"echo x = 1 > a.py; chmod 751 a.py; echo > old.txt; printf 'one\r\ntwo\r\n' > crlf"
    )
    done = await each_bench("patch", patch=BOTH)
    assert done["success"]
    assert "-x = 1\n+x = 2" in done["diff"]
    assert done["files"] == [
        {"path": "a.py", "action": "update", "moved_to": "lib/a.py"},
        {"path": "new/b.txt", "action": "add"},
        {"path": "crlf", "action": "update"},
        {"path": "old.txt", "action": "delete"},
    ]
    shown = await each_bench.sh("stat -c %a lib/a.py; cat lib/a.py new/b.txt; od -c crlf; ls -A")
    assert shown.startswith("751\nx = 2\nhéllo\n\n0000000   o   n   e  \\r  \\n   2  \\r  \\n")
    assert not {"a.py", "old.txt"} & set(shown.split())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("*** Update File: f\n-x = 3\n+y", r"'f', hunk 1 \(line 3.*the closest line is 1: 'x = 1'"),
        ("*** Add File: f\n+x", "'f' exists already"),
        ("*** Update File: f\n*** Move to: d/g\n-x = 1", "'d/g' exists already"),
        ("*** Delete File: no", "file not found: 'no'"),
        ("*** Delete File: d", "'d' is a directory"),
        ("*** Update File: f\n-x = 1\n*** Delete File: ./f", "'./f' is in the patch twice"),
        ("*** Add File: g/h\n+x\n*** Update File: bin\n-x", "'bin' is a binary file"),
        ("*** Update File: d/g\n-z\n+y", r"occur 2 times, at the lines 1, 3"),
        ("*** Update File: f\n x = 1", "no line that begins with '-' or '\\+'"),
        ("*** Update File: f\nx = 1", "line 3 of the patch: a line of a hunk begins with"),
        ("*** Update File: f\n@@ def g\n-x = 1", "no line is '@@ def g'"),
        ("*** Rename File: f", "line 2 of the patch: expected"),
    ],
)
async def test_a_patch_that_does_not_apply_changes_nothing(
    bench: Any, body: str, reason: str
) -> None:
    await bench.sh("echo x = 1 > f; mkdir d; printf 'z\\na\\nz\\n' > d/g; printf 'x\\0' > bin")
    before = await bench.sh("find . -type f | sort | xargs md5sum")
    first = "\n*** Update File: d/g\n-a\n+b" if "d/g" not in body else ""
    with pytest.raises(ToolError, match=reason):
        await bench("patch", patch=f"*** Begin Patch\n{body}{first}\n*** End Patch")
    assert await bench.sh("find . -type f | sort | xargs md5sum") == before


async def test_a_write_that_fails_undoes_those_before_it(each_bench: Any) -> None:
    await each_bench.sh("echo x = 1 > a.py; echo > old.txt; printf 'one\\ntwo\\n' > crlf; echo > f")
    before = await each_bench.sh("find . -type f | sort | xargs md5sum")
    for more, reason in (
        ("*** Add File: f/under\n+x", "cannot write 'f/under': .*; nothing was changed"),
        ("*** Delete File: /proc/version", "cannot delete: .*; nothing was changed"),
    ):
        with pytest.raises(ToolError, match=reason):
            await each_bench("patch", patch=BOTH.replace("*** End Patch", f"{more}\n*** End Patch"))
    assert await each_bench.sh("find . -type f | sort | xargs md5sum") == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "missing argument 'path'"),
        ({"path": "f", "old_string": "a"}, "missing argument 'new_string'"),
        ({"path": "f", "patch": BOTH}, "either patch alone"),
        ({"patch": "*** Begin Patch\n*** End Patch"}, "the patch has no file"),
        ({"patch": BOTH[:-15]}, "must end with the line"),
        ({"patch": "--- a/f\n+++ b/f"}, "must begin with the line"),
    ],
)
async def test_a_call_says_what_it_lacks(bench: Any, arguments: Any, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        await bench("patch", **arguments)
