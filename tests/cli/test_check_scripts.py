"""`check` parses many scripts with one bash; the result is that of parsing each alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_runner import run_cli, write_rows

from hermes_rl.cli import find_script_errors

GOOD = ("echo ok", "if true; then echo 'x y'; fi", "cat <<EOF\nit's\nEOF", "# don't", "", "true &")
BROKEN = (
    *("if true", "fi", "else echo", "echo 'x", 'echo "x', "echo `x", "x=$(echo", "(echo", "echo )"),
    *("{ echo", "}", "case x in", "x) echo;;", "x)\n(\necho", "echo ${x", "echo $((1", "((1", "))"),
    *(
        "[[ -n x",
        "]] &&",
        "cd a &&",
        "echo |",
        "while :",
        "for i in a; do",
        "done",
        "f() {",
        "a=(1",
    ),
    *("<(echo", "done\nwhile :", ")\n(", "cat <<EOF\nif true\nEOF\nfi"),
)


def bash_refuses(script: str) -> bool:
    return bool(
        subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True).returncode
    )


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_script_is_found_among_valid_ones(broken: str) -> None:
    scripts = (*GOOD[:3], broken, *GOOD[3:])
    errors = find_script_errors(scripts)
    assert set(errors) == {script for script in scripts if bash_refuses(script)}


def test_two_broken_scripts_do_not_complete_each_other() -> None:
    pairs = [
        ("if true", "then echo; fi"),
        ("echo 'a", "b'"),
        ("(", ")"),
        ("$((1", "))"),
        ("{", "}"),
    ]
    for first, second in pairs:
        assert set(find_script_errors((first, "echo ok", second))) == {first, second}
    # bash accepts an unterminated here-document; the scripts that follow are still checked.
    assert set(find_script_errors(("cat <<EOF", "if true", "EOF\nfi"))) == {"if true", "EOF\nfi"}


def test_ten_thousand_verifiers_are_parsed_by_few_processes(tmp_path: Path) -> None:
    starts, bash, real = tmp_path / "starts", tmp_path / "bin" / "bash", shutil.which("bash")
    bash.parent.mkdir()
    bash.write_text(f'#!{real}\necho >>{starts}\nexec -a bash {real} "$@"\n')
    bash.chmod(0o755)
    script = 'cd "$WORKSPACE"\ntest "$(cat out)" = {} || exit 1\n'
    rows = [{"id": f"t{n}", "prompt": "x", "verify": script.format(n)} for n in range(10_000)]
    rows[7000]["verify"] = "if true"
    write_rows(tmp_path / "many.jsonl", *rows)
    path = f"{bash.parent}:{os.environ['PATH']}"
    result = run_cli("check", "many.jsonl", cwd=tmp_path, env={"PATH": path})
    assert result.code == 2
    assert result.out.startswith("many.jsonl: 10,000 rows, 1 bad, 10,000 with a verifier")
    assert "error: many.jsonl:7001: 'verify' is not a bash script: line " in result.err
    assert 0 < len(starts.read_bytes()) < 100
