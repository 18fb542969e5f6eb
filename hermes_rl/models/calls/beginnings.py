"""The beginning of an answer whose stream broke off, kept for whoever can go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hermes_rl.errors import ConnectionLost, ModelTimeout, ProtocolError
from hermes_rl.models.base import ModelRequest
from hermes_rl.models.wire.base import Decoder
from hermes_rl.models.wire.reasoning import split_think


class BrokenOff(ConnectionLost):
    """A streamed answer broke off behind some text, and the request was `continuable`: the rest can
    be asked for, so the same is not asked for again.

    Args:
        text: what had arrived, without reasoning.
        in_call: whether a tool call had begun behind it.
    """

    transient = False

    def __init__(
        self, error: ConnectionLost | ModelTimeout | ProtocolError, text: str, in_call: bool
    ):
        super().__init__(str(error), request_id=error.request_id, served=True, reason=error.reason)
        self.text = text
        self.in_call = in_call


class Beginning:
    """Hears one request's streamed text.

    Args:
        request: asks for it by `continuable`; others are left as they are.
    """

    def __init__(self, request: ModelRequest) -> None:
        self._pieces: list[str] = []
        self._on_delta = request.on_delta
        self._wanted = request.continuable
        self.request = replace(request, on_delta=self._hear) if self._wanted else request

    @contextmanager
    def kept(self, decoder: Decoder) -> Iterator[None]:
        """Around the reading of the answer. Raises: BrokenOff in place of an error behind text."""
        try:
            yield
        except (ConnectionLost, ModelTimeout, ProtocolError) as error:
            text = split_think("".join(self._pieces)).content
            if not text.strip():
                raise
            raise BrokenOff(error, text, decoder.in_call) from error

    def _hear(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._on_delta is not None:
            self._on_delta(piece)
