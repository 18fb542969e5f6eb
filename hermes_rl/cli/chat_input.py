"""What people type in `hermes-rl chat`: messages of several lines, answers to questions, images."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import termios
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from hermes_rl.errors import UserError
from hermes_rl.text import SECRETS

IMAGE_KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
MAX_IMAGE_BYTES = 20_000_000
_IMAGE = re.compile(r"(?<!\S)@(?:\"([^\"]+)\"|(\S+))")


class Reader(Protocol):
    """Reads what the user types."""

    interactive: bool

    def message(self, default: str = "") -> str:
        """The next message. Raises: EOFError at the end; KeyboardInterrupt."""
        ...

    def answer(self, question: str) -> str:
        """The answer to a question. Raises: EOFError, KeyboardInterrupt."""
        ...


class LineReader:
    """Messages from a pipe, one a line; questions have no answer."""

    interactive = False

    def message(self, default: str = "") -> str:
        """See `Reader`."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def answer(self, question: str) -> str:
        """See `Reader`."""
        raise EOFError


class TerminalReader:
    """Prompts with history, completion of commands, and messages of several lines.

    Args:
        history: the file that keeps what was typed, for its owner alone.
        commands: names that are completed.
        toolbar: the text below the prompt.

    Raises: UserError without prompt_toolkit.
    """

    interactive = True

    def __init__(self, history: Path, commands: Iterable[str], toolbar: Callable[[], str]) -> None:
        try:
            from prompt_toolkit import PromptSession
        except ImportError:
            raise UserError(
                "a chat needs prompt_toolkit. Install it: pip install 'hermes-rl[chat]'; "
                'or ask one question: hermes-rl chat -q "..."'
            ) from None
        from prompt_toolkit.completion import NestedCompleter
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()
        keys.add("enter")(lambda event: _enter(event.current_buffer))
        for newline in (("escape", "enter"), ("c-j",)):
            keys.add(*newline)(lambda event: event.current_buffer.insert_text("\n"))
        self._question: PromptSession[str] = PromptSession()
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=keys,
            completer=NestedCompleter.from_nested_dict(dict.fromkeys(commands)),
            complete_while_typing=True,
            bottom_toolbar=toolbar,
            prompt_continuation=". ",
            reserve_space_for_menu=4,
        )

    def message(self, default: str = "") -> str:
        """See `Reader`."""
        from prompt_toolkit.patch_stdout import patch_stdout

        with patch_stdout(raw=True):  # background tasks may write meanwhile
            return self._session.prompt("> ", default=default)

    def answer(self, question: str) -> str:
        """See `Reader`. Nothing that was typed before the question answers it."""
        from prompt_toolkit.input.typeahead import clear_typeahead

        clear_typeahead(self._question.app.input)
        with contextlib.suppress(termios.error, ValueError, OSError):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        return self._question.prompt(question)


def _enter(buffer: Any) -> None:
    """Send the message; behind a backslash begin another line."""
    if buffer.document.text_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


def _history(path: Path) -> Any:
    """The history in a file; in memory where the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Private(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk must not cost the message
                super().store_string(SECRETS.scrub(string))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return Private(path)


def with_images(text: str, paths: Iterable[Path] = ()) -> str | list[dict[str, Any]]:
    """The content of a message, with the images that it names as `@PATH`.

    Args:
        paths: more images.

    Raises: UserError for an image that cannot be read.
    """
    names = [quoted or plain for quoted, plain in _IMAGE.findall(text)]
    found = [*paths, *(Path(n) for n in names if Path(n).suffix.lower() in IMAGE_KINDS)]
    if not found:
        return text
    return [{"type": "text", "text": text}, *map(_part, dict.fromkeys(found))]


def _part(path: Path) -> dict[str, Any]:
    kind = IMAGE_KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{path}: not an image. Use {', '.join(IMAGE_KINDS)}")
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise UserError(f"{path}: more than {MAX_IMAGE_BYTES:,} bytes. Make it smaller")
        data = base64.b64encode(path.expanduser().read_bytes()).decode()
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or '').lower()}. Check the path") from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
