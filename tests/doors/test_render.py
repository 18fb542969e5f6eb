"""Rows as text: what a model wrote is shown, and commands no terminal."""

from batch_runner.progress import wrapped
from hermes_rl.cli.render import visible
from hermes_rl.text import scrub


def test_nothing_that_was_written_commands_the_terminal() -> None:
    assert visible("a\x1b[2J\x9b0m\x07\tb\n\u202ec") == "a\\x1b[2J\\x9b0m\\x07\tb\n\\u202ec"
    assert visible("plain Ünïcödé 漢字\n") == "plain Ünïcödé 漢字\n"
    assert scrub("500: \x1b]0;evil\x07 no") == "500: ]0;evil no"


def test_a_narrow_terminal_shows_cost_and_throttling() -> None:
    speed, spent = "24/min  0:15 left", "41 tok/s  unpriced  429: 0 %"
    line = f"14/20 units  11 solved  0 failed  4 running | {speed} | {spent}"
    assert wrapped(line, 200) == line
    assert wrapped(line, 60).split("\n") == [
        "14/20 units  11 solved  0 failed  4 running",
        f"{speed} | {spent}",
    ]
