"""A conversation as it is sent: prepared piece by piece, each message encoded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hermes_rl.messages import Message


class Preparation(Protocol):
    """How messages are made fit to be sent."""

    def run(self, messages: list[Message]) -> list[Message]:
        """The messages as they are sent; what needs no change is the same object. Pure."""
        ...

    def cut(self, messages: list[Message], start: int) -> int:
        """The last place (at least `start`) at which the list can be cut so that the prepared
        pieces, from `start` on, are what the whole would be, whatever comes later."""
        ...


class AsTheyAre:
    """Sends what is stored."""

    def run(self, messages: list[Message]) -> list[Message]:
        """See `Preparation.run`."""
        return messages

    def cut(self, messages: list[Message], start: int) -> int:
        """See `Preparation.cut`."""
        return len(messages)


class View:
    """One preparation of one conversation.

    Only what follows the last cut is prepared again when messages are added, so a turn costs what
    it adds, and what was sent stays the same objects.

    Args:
        source: the conversation's own list, append-only.
    """

    def __init__(self, source: list[Message], preparation: Preparation) -> None:
        self._source, self._preparation = source, preparation
        self._sent: list[Message] = []
        self._done = 0
        """Source messages before the last cut."""
        self._closed = 0
        """Sent messages that stand for them."""
        self._seen = 0
        """Source messages when the view was last brought up to date."""
        self._encoded: dict[str, _Encoded] = {}

    def messages(self) -> list[Message]:
        """All messages as they are sent now. Not to be changed."""
        source = self._source
        if len(source) == self._seen:
            return self._sent
        run = self._preparation.run
        cut = self._preparation.cut(source, self._done)
        if cut > self._done:
            if cut != self._seen:  # else the piece stands there already, prepared as the tail
                self._sent[self._closed :] = run(source[self._done : cut])
            self._done, self._closed = cut, len(self._sent)
        self._sent[self._closed :] = run(source[cut:])
        self._seen = len(source)
        return self._sent

    def encoded(self, key: str, encode: Callable[[Message], bytes]) -> list[bytes]:
        """`encode` of each of `messages`, made once per object. Not to be changed.

        Args:
            key: names `encode`, so that a conversation may be sent in several ways.
        """
        sent = self.messages()
        known = self._encoded.setdefault(key, _Encoded())
        same = min(known.closed, len(sent))
        while same < len(known.of) and same < len(sent) and known.of[same] is sent[same]:
            same += 1
        fresh = sent[same:]
        known.of[same:] = fresh
        known.data[same:] = [encode(message) for message in fresh]
        known.closed = self._closed
        return known.data


class _Encoded:
    """Bytes, and the objects that they were made of."""

    __slots__ = ("closed", "data", "of")

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.of: list[Message] = []
        self.closed = 0
