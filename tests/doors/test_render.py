"""Rows as text: what a model wrote is shown, and commands no terminal."""

from hermes_rl.cli.render import visible
from hermes_rl.models.failures.classify import scrub


def test_nothing_that_was_written_commands_the_terminal() -> None:
    assert visible("a\x1b[2J\x9b0m\x07\tb\n\u202ec") == "a\\x1b[2J\\x9b0m\\x07\tb\n\\u202ec"
    assert visible("plain Ünïcödé 漢字\n") == "plain Ünïcödé 漢字\n"
    assert scrub("500: \x1b]0;evil\x07 no") == "500: ]0;evil no"
