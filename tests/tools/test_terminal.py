"""The tool `terminal`."""

import time
from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.errors import ToolError


async def test_output_and_exit_code(bench: Any) -> None:
    result = await bench.result("terminal", command="echo out; echo err >&2; exit 3")
    assert result.text == '{"output":"out\\nerr\\n","exit_code":3}'
    assert not result.ok
    assert (await bench.result("terminal", command="true")).ok


async def test_the_session_stays(each_bench: Any) -> None:
    await each_bench("terminal", command="mkdir -p d; cd d; export A=1; f() { echo f-$A; }")
    assert (await each_bench("terminal", command='f; basename "$PWD"'))["output"] == "f-1\nd\n"


async def test_a_timeout_is_124_and_keeps_what_was_printed(each_bench: Any) -> None:
    start = time.monotonic()
    result = await each_bench("terminal", command="echo first; sleep 30", timeout=1.5)
    assert time.monotonic() - start < 20
    assert result["output"] == "first\n"
    assert result["exit_code"] == 124
    assert result["error"].startswith("timed out after 1.5 s")
    assert (await each_bench("terminal", command="echo next"))["output"] == "next\n"


@pytest.mark.parametrize(
    ("timeout", "reason"),
    [(601, "at most 600 s"), (10**400, "at most 600 s"), (0, "above 0")],
)
async def test_timeouts_above_the_limit_are_refused(bench: Any, timeout: int, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        await bench("terminal", command="touch made", timeout=timeout)
    assert await bench.sh("ls") == ""


async def test_what_is_left_of_the_rollout_bounds_the_timeout(bench: Any) -> None:
    bench.context = replace(bench.context, max_timeout_s=0.3)
    result = await bench("terminal", command="sleep 30")
    assert result["exit_code"] == 124


async def test_workdir_is_for_one_command(bench: Any) -> None:
    await bench.sh("mkdir -p 'a b'")
    assert (await bench("terminal", command='basename "$PWD"', workdir="a b"))["output"] == "a b\n"
    assert "a b" not in (await bench("terminal", command="pwd"))["output"]
    missing = await bench("terminal", command="echo ran", workdir="nope")
    assert missing["exit_code"] != 0
    assert "ran" not in missing["output"]


async def test_terminal_codes_are_taken_out(bench: Any) -> None:
    codes = r"\e[1;31mred\e[0m \e]0;title\a\e]8;;http://x\e\\link\e]8;;\e\\ \e(Bplain\e[2K"
    result = await bench("terminal", command=f"printf '{codes}'")
    assert result["output"] == "red link plain"


async def test_long_output_loses_its_middle(bench: Any) -> None:
    output = (await bench("terminal", command="seq 1 200000"))["output"]
    assert 49_000 < len(output) <= 50_000
    assert output.startswith("1\n2\n3\n")
    assert output.endswith("199999\n200000\n")
    assert output.index("bytes omitted") / len(output) == pytest.approx(0.4, abs=0.01)


async def test_output_that_grows_by_escaping_still_fits(bench: Any) -> None:
    result = await bench("terminal", command="head -c 40000 /dev/zero | tr '\\0' '\\001'; echo end")
    assert result["output"].startswith("\x01\x01")
    assert result["output"].endswith("\x01end\n")
    assert result["exit_code"] == 0


async def test_bytes_that_are_no_text(bench: Any) -> None:
    result = await bench("terminal", command="printf 'a\\377\\000b'")
    assert result["output"] == "a\ufffd\x00b"


async def test_nobody_can_type_into_a_command(bench: Any) -> None:
    result = await bench("terminal", command="read x; echo [$x]", timeout=5)
    assert result["output"] == "[]\n"
