"""The tools `read_file`, `write_file` and `patch`."""

from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from hermes_rl.errors import ToolError


async def test_write_then_read(each_bench: Any) -> None:
    wrote = await each_bench("write_file", path="new/dir/f.txt", content="héllo\nworld\n")
    assert wrote == {"bytes_written": 13, "created": True}
    assert await each_bench("read_file", path="new/dir/f.txt") == {
        "content": "1|héllo\n2|world",
        "total_lines": 2,
        "file_size": 13,
        "truncated": False,
    }
    again = await each_bench("write_file", path="new/dir/f.txt", content="")
    assert again == {"bytes_written": 0, "created": False}
    assert (await each_bench("read_file", path="new/dir/f.txt"))["content"] == ""


async def test_content_is_written_byte_for_byte(bench: Any) -> None:
    content = "$HOME `id` \\n 'q' \"d\" \t\r\n\x01 é 𝄞\nEOF\n"
    await bench("write_file", path="f", content=content)
    assert (await bench.sandbox.run("cat f", timeout_s=5)).raw == content.encode()


@pytest.mark.parametrize("path", ["a b.txt", "-n", "--", "q'u\"o$te", "new\nline", "ünï.txt", "*"])
async def test_odd_names(bench: Any, path: str) -> None:
    await bench("write_file", path=path, content="x=1\n")
    assert (await bench("read_file", path=path))["content"] == "1|x=1"
    await bench("patch", path=path, old_string="1", new_string="2")
    assert (await bench("read_file", path=path))["content"] == "1|x=2"
    assert (await bench("search_files", pattern="x=2", path=path))["total_count"] == 1


async def test_paths_mean_what_they_mean_in_the_session(each_bench: Any) -> None:
    await each_bench("terminal", command="mkdir -p sub/deep; cd sub/deep")
    await each_bench("write_file", path="../here", content="x")
    await each_bench("write_file", path="~/home", content="y")
    assert await each_bench.sh("cat ../here ~/home") == "xy"
    assert (await each_bench("read_file", path="../here"))["content"] == "1|x"
    assert (await each_bench("read_file", path="~/home"))["content"] == "1|y"


async def test_windows(bench: Any) -> None:
    await bench.sh("seq 1 5000 > f")
    first = await bench("read_file", path="f")
    assert first["content"].startswith("1|1\n")
    assert first["content"].endswith("\n500|500")
    assert first["hint"] == "showing lines 1-500; continue with offset=501"
    assert first["truncated"]
    part = await bench("read_file", path="f", offset=4999, limit=10)
    assert part["content"] == "4999|4999\n5000|5000"
    assert not part["truncated"]
    most = await bench("read_file", path="f", limit=9999)
    assert most["content"].endswith("\n2000|2000")
    with pytest.raises(ToolError, match="'f' has 5000 lines"):
        await bench("read_file", path="f", offset=5001)


async def test_long_lines_and_long_content(bench: Any) -> None:
    await bench.sh("head -c 5000 /dev/zero | tr '\\0' x > long; yes '' | head -300 > e")
    line = (await bench("read_file", path="long"))["content"]
    assert line == "1|" + "x" * 2000 + " ... [line truncated]"
    await bench.sh("for i in $(seq 200); do printf '%01000d\\n' $i; done > wide")
    wide = await bench("read_file", path="wide")
    assert 95_000 < len(wide["content"]) <= 100_000
    assert wide["truncated"]
    next_line = int(wide["hint"].split("offset=")[1].split()[0])
    rest = await bench("read_file", path="wide", offset=next_line)
    assert rest["content"].startswith(f"{next_line}|{next_line:01000d}")


async def test_content_that_grows_by_escaping_still_fits(bench: Any) -> None:
    await bench.sh(
        "for i in $(seq 100); do head -c 900 /dev/zero | tr '\\0' '\\001'; echo; done > f"
    )
    first = await bench("read_file", path="f")
    assert first["truncated"]
    assert "continue with offset=" in first["hint"]


async def test_files_too_large_to_take_whole(bench: Any) -> None:
    await bench.sh("seq 1 2000000 > big; printf 'no newline' >> big")
    far = await bench("read_file", path="big", offset=1999999)
    assert far["content"] == "1999999|1999999\n2000000|2000000\n2000001|no newline"
    assert (far["total_lines"], far["file_size"]) == (2000001, 14888906)
    with pytest.raises(ToolError, match="too large for patch"):
        await bench("patch", path="big", old_string="1", new_string="2")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("d", "'d' is a directory"),
        ("pipe", "not a regular file"),
        ("confg.yml", r"file not found: 'confg\.yml'\. Did you mean: config\.yaml"),
        ("./notes.md", r"Did you mean: \./Notes\.md"),
        ("no/such", "file not found: 'no/such'$"),
        ("", "must not be empty"),
    ],
)
async def test_what_cannot_be_read(bench: Any, path: str, reason: str) -> None:
    await bench.sh("mkdir d; mkfifo pipe; touch config.yaml Notes.md")
    with pytest.raises(ToolError, match=reason):
        await bench("read_file", path=path)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WebP", "WebP lossless", "WebP alpha"])
async def test_images_are_described(bench: Any, form: str) -> None:
    image, out = Image.new("RGBA" if "alpha" in form else "RGB", (301, 47), "red"), BytesIO()
    if "alpha" in form:
        image.putalpha(99)
    image.save(out, form.split()[0], lossless="lossless" in form)
    await bench.sandbox.write_file(f"{bench.sandbox.workspace}/picture", out.getvalue())
    seen = await bench("read_file", path="picture")
    assert seen.pop("hint").startswith("read_file does not show images")
    size = len(out.getvalue())
    name = f"{form.split()[0]} image"
    assert seen == {"type": name, "file_size": size, "width": 301, "height": 47}
    await bench.sh("head -c 14 picture > cut; printf '\\0' >> cut")
    assert (await bench("read_file", path="cut")).get("width") in (None, 301)


async def test_binary_files_are_described(each_bench: Any) -> None:
    await each_bench.sh(
        "printf 'a\\0b' > binary; tar cf t.tar binary; gzip -k t.tar; cp /bin/sh sh"
    )
    hint = "not text; use a program in the terminal"
    assert await each_bench("read_file", path="binary") == {
        "type": "binary file", "file_size": 3, "first_bytes": "61 00 62", "hint": hint
    }  # fmt: skip
    kinds = [(await each_bench("read_file", path=p))["type"] for p in ("t.tar", "t.tar.gz", "sh")]
    assert kinds == ["tar archive", "gzip data", "ELF program or library"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("d", "'d': it is a directory"),
        ("f/g", "cannot write 'f/g': mkdir: "),
        ("/proc/x/y", "cannot write '/proc/x/y'"),
    ],
)
async def test_what_cannot_be_written(each_bench: Any, path: str, reason: str) -> None:
    await each_bench.sh("mkdir d; touch f")
    with pytest.raises(ToolError, match=reason):
        await each_bench("write_file", path=path, content="x")


async def test_modes_and_links_stay(each_bench: Any) -> None:
    await each_bench.sh("echo one > f; chmod 751 f; ln -s f link")
    await each_bench("patch", path="link", old_string="one", new_string="two")
    await each_bench("write_file", path="link", content="three\n")
    assert await each_bench.sh("stat -c %a f; readlink link; cat f") == "751\nf\nthree\n"


async def test_a_spoilt_session_does_not_spoil_the_tools(each_bench: Any) -> None:
    await each_bench.sh(
        "set -euxCf; shopt -s nullglob; IFS=x; cat() { echo evil; }; head() { echo evil; }; "
        "stat() { echo evil; }; alias grep=false find=false mkdir=false; echo() { :; }"
    )
    assert (await each_bench("write_file", path="a/f", content="one\ntwo"))["created"]
    assert not (await each_bench("write_file", path="a/f", content="one\ntwo"))["created"]
    assert (await each_bench("read_file", path="a/f"))["content"] == "1|one\n2|two"
    await each_bench("patch", path="a/f", old_string="two", new_string="2")
    assert (await each_bench("search_files", pattern="2"))["matches"][0]["content"] == "2"
    assert (await each_bench("search_files", pattern="f", target="files"))["files"] == ["a/f"]


async def test_the_tools_change_nothing_in_the_session(bench: Any) -> None:
    state = "pwd; set +o; trap; set | grep -v -e ^BASH -e ^_ -e ^RANDOM -e ^SRANDOM -e ^SECONDS"
    await bench.sh("mkdir w; cd w; x=1")
    before = await bench.sh(state)
    await bench("write_file", path="f", content="a")
    await bench("read_file", path="f")
    await bench("search_files", pattern="a")
    after = await bench.sh(state)
    strip = [x for x in before.splitlines() if "EPOCH" not in x]
    assert strip == [x for x in after.splitlines() if "EPOCH" not in x]


async def test_patch_shows_what_it_did(each_bench: Any) -> None:
    await each_bench("write_file", path="p.py", content="def f():\n    return 1\n\n\nx = f()\n")
    done = await each_bench("patch", path="p.py", old_string="return 1", new_string="return 2")
    assert (done["success"], done["replacements"], done["strategy"]) == (True, 1, "exact")
    assert "--- a/p.py\n+++ b/p.py\n@@ -1,5 +1,5 @@\n def f():\n-    return 1\n+    return 2\n" in (
        done["diff"] + "\n"
    )
    assert await each_bench.sh("cat p.py") == "def f():\n    return 2\n\n\nx = f()\n"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("1", "2", "occurs 2 times in 'f'"),
        ("a = 11 + x", "2", "not found in 'f'; the closest line is 1: 'a = 1'"),
        ("1", "1", "are the same"),
        ("", "1", "old_string is empty"),
    ],
)
async def test_patch_refuses_what_is_unclear(bench: Any, old: str, new: str, reason: str) -> None:
    await bench("write_file", path="f", content="a = 1\nb = 1\n")
    with pytest.raises(ToolError, match=reason):
        await bench("patch", path="f", old_string=old, new_string=new)
    assert await bench.sh("cat f") == "a = 1\nb = 1\n"
    done = await bench("patch", path="f", old_string="1", new_string="2", replace_all=True)
    assert done["replacements"] == 2


async def test_patch_keeps_line_ends_and_foreign_bytes(bench: Any) -> None:
    await bench.sh(r"printf 'one\r\ntwo\r\n' > crlf; printf 'caf\351 one\ntwo\n' > latin")
    await bench("patch", path="crlf", old_string="one\ntwo", new_string="1\n2\n3")
    done = await bench("patch", path="latin", old_string="two", new_string="2")
    assert "caf\ufffd" in done["diff"]
    assert (await bench.sandbox.run("cat crlf", timeout_s=5)).raw == b"1\r\n2\r\n3\r\n"
    assert (await bench.sandbox.run("cat latin", timeout_s=5)).raw == b"caf\xe9 one\n2\n"


async def test_a_huge_diff_is_cut(bench: Any) -> None:
    await bench.sh("yes 'same line' | head -5000 > f")
    done = await bench("patch", path="f", old_string="same", new_string="other", replace_all=True)
    assert done["replacements"] == 5000
    assert done["diff"].endswith("[diff truncated]")
    assert await bench.sh("sort -u f") == "other line\n"
