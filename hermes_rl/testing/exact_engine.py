"""A fake inference engine that knows its tokens: real sockets, four wires, and a truth to check by.

    python -m hermes_rl.testing.exact_engine --tokenizer FOLDER --log truth.jsonl

prints one JSON line, `{"port": N, "base_url": ...}`, and serves until SIGTERM or SIGINT, or until
its standard input closes when `--until-eof` is given. In a test:

    async with ExactEngine(ExactConfig(tokenizer=folder)) as engine:
        client = token_client(Endpoint(engine.base_url), ...)

It speaks vLLM's `/v1/completions`, `/inference/v1/generate` and Chat Completions with ids, SGLang's
`/generate`, and llama.cpp's `/completion`. It samples from a toy policy, or says what a script
asks for, cut into tokens as no tokenizer would (`exact_engine_scripts`). Which ids it was sent and
which it sampled stands in its log, also for answers that it lost on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import msgspec

from hermes_rl.errors import BadRequest
from hermes_rl.testing.exact_engine_brain import Answered, Brain, read_lexicon
from hermes_rl.testing.exact_engine_log import Outcome, Truth
from hermes_rl.testing.exact_engine_sampler import LogprobsOf
from hermes_rl.testing.exact_engine_scripts import CallStyle, Mouth, Speaker, Split, scripted
from hermes_rl.testing.exact_engine_wires import CHAT, WIRES, Ask, BadAsk, Told, Wire, read_ask
from hermes_rl.testing.faults import BREAKS, FaultPlan, Refusal, refusal_body, refusal_for
from hermes_rl.testing.line_log import LineLog
from hermes_rl.testing.listening import Listening
from hermes_rl.testing.routes import CHAT as CHAT_ERRORS
from hermes_rl.testing.routes import server_dialect
from hermes_rl.testing.wire import Connection, Incoming, head


class ChatSide(Protocol):
    """What an engine does for Chat Completions: the template before, the parsers behind."""

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> Sequence[int]:
        """The prompt of a conversation. Raises: ValueError, BadRequest."""
        ...

    def message(self, text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's message in a text that was sampled."""
        ...


@dataclass(frozen=True)
class ExactConfig:
    """What the engine is like."""

    tokenizer: Path
    """A folder with `tokenizer.json`, or that file. Byte-level BPE."""
    end: str = "<|im_end|>"
    """The end-of-turn token."""
    ends: tuple[str, ...] = ("<|endoftext|>",)
    """Further tokens that it stops at by itself, as far as the vocabulary has them."""
    header: str = "<|im_start|>assistant\n"
    """How an assistant turn begins in a prompt."""
    seed: int = 0
    logprobs: LogprobsOf = "raw"
    split: Split = "canonical"
    """How scripted texts are cut into tokens, where a step does not say."""
    calls: CallStyle = "hermes"
    """How scripted tool calls are written."""
    routes: frozenset[str] = frozenset(WIRES)
    """Others are answered with 404."""
    chat_ids: Literal["vllm", "sglang", "none"] = "vllm"
    """Whose names Chat Completions use for ids; `none` ignores the question, as hosted providers.
    """
    window: int | None = None
    """Tokens of prompt and answer together."""
    version: str | None = None
    """Of the weights."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    latency_s: float = 0.0
    log: Path | None = None
    """Appended to, one JSON line per request."""
    port: int = 0


class ExactEngine(Listening):
    """The engine, as an async context manager.

    Args:
        speaker: decides what is said; by default the scripts in prompts.
        chat: for Chat Completions; None answers them with 404.
    """

    def __init__(
        self, config: ExactConfig, speaker: Speaker = scripted, chat: ChatSide | None = None
    ) -> None:
        super().__init__(config.port)
        self.config = config
        self.lexicon = read_lexicon(config.tokenizer)
        self.faults = config.faults
        """What goes wrong from now on."""
        self._chat = chat
        self._log = LineLog[Truth]()
        more = (self.lexicon.added.get(text) for text in config.ends)
        end_id = self.lexicon.added[config.end]
        self._brain = Brain(
            Mouth(self.lexicon, end_id, config.split, config.calls),
            speaker,
            seed=config.seed,
            ends=(end_id, *(i for i in more if i is not None)),
            header=config.header,
            window=config.window,
        )
        self._timers: set[asyncio.TimerHandle] = set()

    async def __aenter__(self) -> Self:
        self._log = LineLog(self.config.log)
        return await super().__aenter__()

    async def aclose(self) -> None:
        """See `Listening.aclose`."""
        for timer in self._timers:
            timer.cancel()
        await super().aclose()
        self._log.close()

    @property
    def truth(self) -> list[Truth]:
        """What it did so far, in order."""
        return self._log.entries

    def handle(self, connection: Connection, request: Incoming) -> None:
        """See `Handler.handle`."""
        if request.method == "GET" or request.path == "/tokenize":
            self._tell(connection, request)
            return
        self.requests += 1
        call_id = request.headers.get("x-hermes-call-id")
        job = _Job(self.requests, f"{self._prefix}-{self.requests}", request.path, call_id)
        if not self.config.latency_s:
            self._serve(connection, request, job)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.config.latency_s, self._serve, connection, request, job)
        self._timers = {t for t in self._timers if not t.cancelled() and t.when() > loop.time()}
        self._timers.add(timer)

    def lost(self, connection: Connection) -> None:
        """See `Handler.lost`: an answer that nobody waits for is still sampled and logged."""

    def _serve(self, connection: Connection, request: Incoming, job: _Job) -> None:
        wire = WIRES.get(request.path)
        unknown = wire is None or request.path not in self.config.routes
        if unknown or (wire is not None and wire.name == CHAT and self._chat is None):
            self._refuse(
                connection, job, Refusal(404, "not_found_error", None, f"No route {request.path}")
            )
            return
        assert wire is not None
        fault = self.faults.draw((job.call_id or str(job.n)).encode())
        if fault is not None and (refusal := refusal_for(fault, "chat_completions")):
            self._refuse(connection, replace(job, fault=fault), refusal)
            return
        try:
            told, answered = self._answer(read_ask(wire, request.body), job, wire)
        except (ValueError, BadRequest) as error:
            self._refuse(connection, job, Refusal(400, "invalid_request_error", None, str(error)))
            return
        job = replace(job, fault=fault or (answered.say.fault if answered.say else None))
        if job.fault and (refusal := refusal_for(job.fault, "chat_completions")):
            self._refuse(connection, job, refusal)
            return
        self._send(connection, job, told, wire, scripted=answered.say is not None)

    def _answer(self, ask: Ask, job: _Job, wire: Wire) -> tuple[Told, Answered]:
        """Sample. Raises: BadAsk, BadScript, ValueError."""
        prompt = self._prompt(ask, wire)
        self._check_room(ask, len(prompt), wire)
        answered = self._brain.answer(ask, prompt, job.n, job.call_id)
        ids = ask.ids and (wire.name != CHAT or self.config.chat_ids != "none")
        told = Told(
            ask=replace(ask, ids=ids),
            prompt=prompt,
            sampled=answered.sampled,
            lexicon=self.lexicon,
            kind=self.config.logprobs,
            request_id=job.request_id,
            cached=answered.cached,
            version=self.config.version,
            spelling=self.config.chat_ids,
        )
        if wire.name != CHAT or self._chat is None:
            return told, answered
        shown = replace(told, ask=replace(ask, skip_special=False)).text
        return replace(told, message=self._chat.message(shown, ask.tools)), answered

    def _check_room(self, ask: Ask, prompt: int, wire: Wire) -> None:
        """vLLM and SGLang refuse what asks for more than the window has; llama.cpp gives less."""
        window, most = self.config.window, ask.params.max_tokens
        if window is None or most is None or wire is WIRES["/completion"]:
            return
        if prompt < window < prompt + most:
            raise BadAsk(
                f"'max_tokens' or 'max_completion_tokens' is too large: {most}. This model's "
                f"maximum context length is {window} tokens and your request has {prompt} input "
                f"tokens ({most} > {window} - {prompt})."
            )

    def _prompt(self, ask: Ask, wire: Wire) -> tuple[int, ...]:
        if wire.name == CHAT:
            assert self._chat is not None
            return tuple(self._chat.prompt(ask.messages, ask.tools))
        if ask.prompt is None:
            return tuple(self.lexicon.canonical(ask.text or ""))
        strange = next((token for token in ask.prompt if token not in self.lexicon), None)
        if strange is not None:
            raise BadAsk(f"token id {strange} is out of the vocabulary")
        return ask.prompt

    def _send(
        self, connection: Connection, job: _Job, told: Told, wire: Wire, *, scripted: bool
    ) -> None:
        broken = job.fault in BREAKS
        self._note(job, "cut" if broken else "served", told, scripted=scripted)
        body = msgspec.json.encode(wire.write(told))
        headers = {"content-type": "application/json", "x-request-id": job.request_id}
        if self.config.version is not None and wire.name != "sglang":
            headers["x-policy-version"] = self.config.version
        if job.fault == "reset":
            connection.reset()
        elif job.fault == "garbage":
            body = b"<html><body>Bad gateway</body></html>"
            connection.send(head(200, headers, len(body)) + body)
        elif broken:
            connection.send(head(200, headers, len(body)) + body[: len(body) // 2], last=False)
            connection.close()
        else:
            connection.send(head(200, headers, len(body)) + body)

    def _refuse(self, connection: Connection, job: _Job, refusal: Refusal) -> None:
        self._note(job, "refused", None, scripted=False)
        body = refusal_body(refusal, server_dialect(CHAT_ERRORS))
        headers = {"content-type": "application/json", "x-request-id": job.request_id}
        if refusal.status == 429:
            headers["retry-after"] = f"{self.config.faults.retry_after_s:g}"
        connection.send(head(refusal.status, headers, len(body)) + body)

    def _note(self, job: _Job, outcome: Outcome, told: Told | None, *, scripted: bool) -> None:
        known: dict[str, Any] = {}
        if told is not None:
            sampled = told.sampled
            known = {
                "prompt_ids": told.prompt,
                "sampled_ids": sampled.ids,
                "raw_logprobs": sampled.raw,
                "scaled_logprobs": sampled.scaled,
                "finish": sampled.finish,
                "temperature": told.ask.params.temperature,
                "scripted": scripted,
            }
        self._log.add(
            Truth(
                n=job.n,
                request_id=job.request_id,
                call_id=job.call_id,
                route=job.route,
                outcome=outcome,
                fault=job.fault,
                **known,
            )
        )

    def _tell(self, connection: Connection, request: Incoming) -> None:
        """The list of models, and the ids of texts; neither counted nor logged."""
        status, form = 200, dict[str, Any]()
        if request.path == "/tokenize":
            asked = msgspec.json.decode(request.body)
            form = {"tokens": self.lexicon.canonical(asked.get("prompt") or asked["content"])}
        elif request.path.endswith(("/models", "/health")):
            form = {"object": "list", "data": [{"id": "toy", "object": "model"}]}
        else:
            status = 404
        body = msgspec.json.encode(form)
        connection.send(head(status, {"content-type": "application/json"}, len(body)) + body)


@dataclass(frozen=True)
class _Job:
    """One request on its way."""

    n: int
    request_id: str
    route: str
    call_id: str | None
    fault: str | None = None


if __name__ == "__main__":
    from hermes_rl.testing.exact_engine_program import main

    main()
