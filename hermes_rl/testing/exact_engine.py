"""A fake inference engine with exact tokens: real sockets, five wires, and a log of every id.

    python -m hermes_rl.testing.exact_engine --tokenizer FOLDER --log truth.jsonl

prints one JSON line, `{"port": N, "base_url": ...}`, and serves until SIGTERM or SIGINT, or until
its standard input closes when `--until-eof` is given. In a test:

    async with ExactEngine(ExactConfig(tokenizer=folder)) as engine:
        client = token_client(Endpoint(engine.base_url), ...)

It speaks vLLM's `/v1/completions`, `/inference/v1/generate` and Chat Completions with ids, SGLang's
`/generate`, and llama.cpp's `/completion`. It samples from a toy policy, or plays a script,
tokenized in unusual ways on request (`exact_engine_model`). Its log has the ids that it was sent
and that it sampled, also for answers that it lost on purpose. Answers can be aborted and paused,
and weights replaced (`exact_engine_running`). An answer that was cut off is remembered: a prompt
that ends with its tokens gets the rest of it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, Self

import msgspec

from hermes_rl.errors import BadRequest, UserError
from hermes_rl.messages import AssistantMessage, from_openai, to_openai
from hermes_rl.models.tokens import Renderer, find_parser, load_renderer
from hermes_rl.testing.dialects.chat import ChatServer
from hermes_rl.testing.exact_engine_model import (
    END_LOGIT,
    AnswerTokenizer,
    LogprobsOf,
    Policy,
    PromptView,
    Sampled,
    ScriptedAnswer,
    Speaker,
    Split,
    Vocabulary,
    sample,
    scripted,
)
from hermes_rl.testing.exact_engine_running import CONTROLS, Generation, Running
from hermes_rl.testing.exact_engine_wires import (
    CHAT,
    WIRES,
    EngineAnswer,
    EngineRequest,
    InvalidRequest,
    StreamForm,
    Wire,
    read_request,
)
from hermes_rl.testing.faults import (
    BREAKS,
    FaultPlan,
    Refusal,
    plan_from_json,
    refusal_body,
    refusal_for,
)
from hermes_rl.testing.http_server import (
    Connection,
    Incoming,
    Server,
    head,
    program_parser,
    serve,
)
from hermes_rl.testing.server_logs import LineLog, Truth

_BLOCK = 16
"""Tokens of a block of the prefix cache; whole blocks are reused, as in vLLM."""


@dataclass(frozen=True)
class ExactConfig:
    """Configuration of the engine."""

    tokenizer: Path
    """A folder with `tokenizer.json`, or that file. Byte-level BPE."""
    end: str = "<|im_end|>"
    """The end-of-turn token."""
    ends: tuple[str, ...] = ("<|endoftext|>",)
    """Further tokens that it stops at, if the vocabulary has them."""
    end_logit: float = END_LOGIT
    """Of the end token in free answers: lower means longer ones."""
    whole_characters: bool = False
    """Free answers have no token with a part of a character."""
    header: str = "<|im_start|>assistant\n"
    """The text that opens an assistant turn in a prompt."""
    seed: int = 0
    logprobs: LogprobsOf = "raw"
    split: Split = "canonical"
    """How scripted texts are tokenized, unless a step tells."""
    routes: frozenset[str] = frozenset(WIRES)
    """Other routes are answered with 404."""
    chat_ids: Literal["vllm", "sglang", "none"] = "vllm"
    """The engine whose field names Chat Completions use for ids; `none` returns none, as hosted
    providers."""
    window: int | None = None
    """Tokens of prompt and answer together."""
    version: str | None = None
    """Of the weights."""
    version_by: Literal["token", "answer", "none"] = "token"
    """What answers name: the versions of their tokens; the one at their end; none at all."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    latency_s: float = 0.0
    """Duration of each answer."""
    token_s: float = 0.0
    """Further duration per token."""
    stream_form: StreamForm = "cumulative"
    """What the events of SGLang's streams repeat."""
    close_every: float | None = None
    """Connections are closed within answers, after this number of tokens on average."""
    close_anywhere: bool = False
    """A closed stream ends after any of its bytes; every other one as if it were complete."""
    refuse_paused: bool = False
    """Refuse requests during a pause with 503."""
    log: Path | None = None
    """Appended to, one JSON line per request."""
    port: int = 0


class ExactEngine(Server):
    """The engine, as an async context manager. The same requests in the same order get the same
    answers.

    Args:
        speaker: chooses the answers; by default the scripts in prompts.
        chat: for Chat Completions; None answers them with 404.
    """

    def __init__(
        self, config: ExactConfig, speaker: Speaker = scripted, chat: RenderedChat | None = None
    ) -> None:
        super().__init__(config.port)
        self.config = config
        self.vocabulary = read_vocabulary(config.tokenizer)
        self.faults = config.faults
        """The faults from now on."""
        self._chat, self._speaker = chat, speaker
        self._log = LineLog[Truth]()
        added = self.vocabulary.added
        end = added[config.end]
        self._ends = frozenset((end, *(added[text] for text in config.ends if text in added)))
        self._answers = AnswerTokenizer(self.vocabulary, end, config.split)
        self._policy = Policy(
            self.vocabulary, config.seed, end, config.end_logit, whole=config.whole_characters
        )
        self._prompt_counts: Counter[bytes] = Counter()
        self._cached: set[bytes] = set()
        self._remainders: dict[bytes, list[tuple[Sampled | None, float]]] = {}
        """Prompt and tokens of an answer that was cut off -> its other tokens if it was scripted,
        else None: they are drawn again; and the rest of its latency."""
        self.running = Running[_Job](config.version, self._ended)
        """The answers in progress."""

    async def __aenter__(self) -> Self:
        self._log = LineLog(self.config.log)
        return await super().__aenter__()

    async def aclose(self) -> None:
        """Stop listening, and close every connection and the log."""
        self.running.close()
        await super().aclose()
        self._log.close()

    @property
    def truth(self) -> list[Truth]:
        """The log so far, in order."""
        return self._log.entries

    def handle(self, connection: Connection, request: Incoming) -> None:
        """Answer a request, after the configured latency."""
        if request.method == "GET" or request.path == "/tokenize":
            self._answer_query(connection, request)
            return
        if request.path in CONTROLS:
            self.running.control(request.path, msgspec.json.decode(request.body or b"{}"))
            connection.send(head(200, {"content-type": "application/json"}, 2) + b"{}")
            return
        self.requests += 1
        call_id = request.headers.get("x-hermes-call-id")
        job = Truth(
            n=self.requests,
            request_id=f"{self._prefix}-{self.requests}",
            call_id=call_id,
            route=request.path,
            outcome="refused",
        )
        self._serve(connection, request, job)

    def lost(self, connection: Connection) -> None:
        """Do nothing: an answer to a lost client is still sampled and logged."""

    def _serve(self, connection: Connection, request: Incoming, job: Truth) -> None:
        wire = WIRES.get(request.path)
        unknown = wire is None or request.path not in self.config.routes
        if unknown or (wire is not None and wire.name == CHAT and self._chat is None):
            self._refuse(
                connection, job, Refusal(404, "not_found_error", None, f"No route {request.path}")
            )
            return
        assert wire is not None
        if self.running.paused and self.config.refuse_paused:
            self._refuse(connection, job, Refusal(503, "server_error", None, "Loading weights"))
            return
        fault = self.faults.draw((job.call_id or str(job.n)).encode())
        if fault is not None and (refusal := refusal_for(fault, "chat_completions")):
            self._refuse(connection, msgspec.structs.replace(job, fault=fault), refusal)
            return
        try:
            answer, scripted = self._answer(read_request(wire, request.body), job, wire)
        except (ValueError, BadRequest) as error:
            self._refuse(connection, job, Refusal(400, "invalid_request_error", None, str(error)))
            return
        job = msgspec.structs.replace(job, fault=fault or (scripted.fault if scripted else None))
        if job.fault and (refusal := refusal_for(job.fault, "chat_completions")):
            self._refuse(connection, job, refusal)
            return
        tokens = drawn = len(answer.sampled.ids)
        latency_s, remainders = self.config.latency_s, self._remainders.get(_key(answer.prompt))
        by_script = scripted is not None
        if remainders:
            drawn, (rest, latency_s) = 0, remainders.pop(0)
            by_script = rest is not None
        seconds = latency_s + self.config.token_s * tokens
        job = msgspec.structs.replace(job, scripted=by_script, drawn=drawn)
        what = _Job(connection, wire, job, answer)
        self.running.start(Generation(what, tokens, seconds))

    def _ended(
        self, generation: Generation[_Job], tokens: int, how: Literal["complete", "abort", "close"]
    ) -> None:
        """Send an answer with its tokens so far."""
        what, every = generation.what, self.config.close_every
        if every and how == "complete":
            chance = Random(f"{self.config.seed} {what.job.n} close")
            if (most := int(chance.expovariate(1 / every))) < tokens:
                how, tokens = "close", most
        versions = tuple((v, min(end, tokens)) for v, end in generation.spans)
        answer = replace(what.answer, versions=versions, version=self._named_version())
        job = what.job
        if how != "complete":
            whole = answer.sampled
            key = _key((*answer.prompt, *whole.ids[:tokens]))
            if tokens or not job.drawn:
                left = self.config.latency_s * (1 - tokens / max(1, generation.tokens))
                rest = whole.part(tokens, None) if job.scripted else None
                self._remainders.setdefault(key, []).append((rest, left))
            else:  # it had not begun: the next request draws another one
                job = msgspec.structs.replace(job, drawn=0)
            part = msgspec.structs.replace(whole.part(0, tokens), finish="abort", stop_id=None)
            answer = replace(answer, sampled=part)
        if how == "close":
            job = msgspec.structs.replace(job, fault="reset")
        self._send(what.connection, job, answer, what.wire)

    def _named_version(self) -> str | None:
        return None if self.config.version_by == "none" else self.running.version

    def _answer(
        self, request: EngineRequest, job: Truth, wire: Wire
    ) -> tuple[EngineAnswer, ScriptedAnswer | None]:
        """Sample. Raises: InvalidRequest, InvalidScript, ValueError."""
        prompt = self._prompt(request, wire)
        self._check_window(request, len(prompt), wire)
        sampled, scripted = self._sample(request, prompt, job)
        ids = request.ids and (wire.name != CHAT or self.config.chat_ids != "none")
        answer = EngineAnswer(
            request=replace(request, ids=ids),
            prompt=prompt,
            sampled=sampled,
            vocabulary=self.vocabulary,
            kind=self.config.logprobs,
            request_id=job.request_id,
            cached=self._remember(prompt, sampled.ids),
            version=self._named_version(),
            by_token=self.config.version_by == "token",
            spelling=self.config.chat_ids,
        )
        if wire.name != CHAT or self._chat is None:
            return answer, scripted
        shown = replace(answer, request=replace(request, skip_special=False)).text
        return replace(answer, message=self._chat.message(shown, request.tools)), scripted

    def _sample(
        self, request: EngineRequest, prompt: tuple[int, ...], job: Truth
    ) -> tuple[Sampled, ScriptedAnswer | None]:
        """Return the tokens of an answer, and its script; None if the policy sampled freely."""
        params, window = request.params, self.config.window
        limits = [params.max_tokens, None if window is None else window - len(prompt)]
        key = struct.pack(f"<{len(prompt)}Iq", *prompt, (params.seed or 0) % (1 << 62))
        remainders = self._remainders.get(_key(prompt))
        if remainders and remainders[0][0] is not None:
            return remainders[0][0], None
        times = self._prompt_counts[key]
        self._prompt_counts[key] += 1
        say = self._speaker(
            PromptView(prompt, self.vocabulary, self.config.header, times, job.n, job.call_id)
        )
        random = Random(f"{self.config.seed} {key.hex()} {times}")
        wanted = None if say is None else self._answers.tokens(say, random)
        limits.append(None if say is None else say.cut)
        most = min((limit for limit in limits if limit is not None), default=None)
        params = replace(params, max_tokens=most, stop_ids=params.stop_ids | self._ends)
        top = request.top or 0
        sampled = sample(self._policy, prompt, params, random, wanted=wanted, top=top)
        if say is not None and say.finish is not None:
            sampled = msgspec.structs.replace(sampled, finish=say.finish)
        return sampled, say

    def _remember(self, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> int:
        """Return the prompt tokens that are cached, and cache the new ones."""
        whole, state, known = (*prompt, *sampled), bytes(16), 0
        for start in range(0, len(whole) - _BLOCK + 1, _BLOCK):
            block = whole[start : start + _BLOCK]
            state = self._policy.start((*struct.unpack("<4I", state), *block))
            if state in self._cached and known == start and start + _BLOCK < len(prompt):
                known += _BLOCK
            self._cached.add(state)
        return known

    def _check_window(self, request: EngineRequest, prompt: int, wire: Wire) -> None:
        """Raises: InvalidRequest for a prompt beyond the window; vLLM and SGLang also refuse more
        tokens than the window has, where llama.cpp samples fewer."""
        window, most = self.config.window, request.params.max_tokens
        if window is None:
            return
        if prompt >= window:
            raise InvalidRequest(
                f"This model's maximum context length is {window} tokens. However, your "
                f"request has {prompt} input tokens."
            )
        if most is not None and window < prompt + most and wire is not WIRES["/completion"]:
            raise InvalidRequest(
                f"'max_tokens' or 'max_completion_tokens' is too large: {most}. This model's "
                f"maximum context length is {window} tokens and your request has {prompt} input "
                f"tokens ({most} > {window} - {prompt})."
            )

    def _prompt(self, request: EngineRequest, wire: Wire) -> tuple[int, ...]:
        if wire.name == CHAT:
            assert self._chat is not None
            return tuple(self._chat.prompt(request.messages, request.tools))
        if request.prompt is None:
            return tuple(self.vocabulary.canonical(request.text or ""))
        strange = next((token for token in request.prompt if token not in self.vocabulary), None)
        if strange is not None:
            raise InvalidRequest(f"token id {strange} is out of the vocabulary")
        return request.prompt

    def _send(
        self,
        connection: Connection,
        job: Truth,
        answer: EngineAnswer,
        wire: Wire,
    ) -> None:
        broken, sampled = job.fault in BREAKS, answer.sampled
        lost = broken or (answer.request.stream and wire.leaves_out(answer))
        served = msgspec.structs.replace(
            job,
            outcome="cut" if lost else "served",
            prompt_ids=answer.prompt,
            sampled_ids=sampled.ids,
            raw_logprobs=sampled.raw,
            scaled_logprobs=sampled.scaled,
            finish=sampled.finish,
            temperature=answer.request.params.temperature,
            versions=answer.versions,
        )
        self._log.add(served)
        body = msgspec.json.encode(wire.write(answer))
        headers = {"content-type": "application/json", "x-request-id": job.request_id}
        if answer.version is not None and wire.name != "sglang":
            headers["x-policy-version"] = answer.version
        closed = job.fault == "reset" and sampled.finish == "abort"  # others come before a token
        if answer.request.stream and (job.fault is None or closed):
            self._stream(connection, wire, answer, headers, whole=job.fault is None)
        elif job.fault == "reset":
            connection.reset()
        elif job.fault == "garbage":
            body = b"<html><body>Bad gateway</body></html>"
            connection.send(head(200, headers, len(body)) + body)
        elif broken:
            connection.send(head(200, headers, len(body)) + body[: len(body) // 2], last=False)
            connection.close()
        else:
            connection.send(head(200, headers, len(body)) + body)

    def _stream(
        self, connection: Connection, wire: Wire, answer: EngineAnswer,
        headers: dict[str, str], *, whole: bool,
    ) -> None:  # fmt: skip
        """Send events; a stream that breaks off has those of the tokens so far."""
        events = wire.events(answer, self.config.stream_form, whole=whole)
        body = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        sent, clean = {**headers, "content-type": "text/event-stream"}, False
        if whole:
            body += b"" if wire.name == "llamacpp" else b"data: [DONE]\n\n"
        elif self.config.close_anywhere:
            random = Random(f"{self.config.seed} {answer.request_id}")
            body, clean = body[: random.randint(0, len(body))], random.random() < 0.5
        size = len(body) + (not whole and not clean)
        connection.send(head(200, sent, size) + body, last=whole)
        if not whole:
            connection.close()

    def _refuse(self, connection: Connection, job: Truth, refusal: Refusal) -> None:
        self._log.add(job)
        body = refusal_body(refusal, ChatServer())
        headers = {"content-type": "application/json", "x-request-id": job.request_id}
        if refusal.status == 429:
            headers["retry-after"] = f"{self.config.faults.retry_after_s:g}"
        connection.send(head(refusal.status, headers, len(body)) + body)

    def _answer_query(self, connection: Connection, request: Incoming) -> None:
        """Answer the list of models, or tokenize a text; neither is counted or logged."""
        status, form = 200, dict[str, Any]()
        if request.path == "/tokenize":
            model_request = msgspec.json.decode(request.body)
            form = {
                "tokens": self.vocabulary.canonical(
                    model_request.get("prompt") or model_request["content"]
                )
            }
        elif request.path.endswith(("/models", "/health")):
            form = {"object": "list", "data": [{"id": "toy", "object": "model"}]}
        else:
            status = 404
        body = msgspec.json.encode(form)
        connection.send(head(status, {"content-type": "application/json"}, len(body)) + body)


@dataclass(frozen=True)
class _Job:
    """One request whose answer is known."""

    connection: Connection
    wire: Wire
    job: Truth
    answer: EngineAnswer


def _key(prompt: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(prompt)}I", *prompt)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary of a folder or file. Raises: UserError."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path}: no tokenizer.json")
    return Vocabulary(Tokenizer.from_file(str(file)))


# Chat Completions


class RenderedChat:
    """The template and the parser of an engine's Chat Completions.

    A request's history is text. Each turn renders and tokenizes it again, so a history that was
    sampled in another spelling does not continue what was sampled.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer, self._parser = renderer, find_parser(renderer.parser_name)

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> Sequence[int]:
        """Render a conversation."""
        return self._renderer.render([from_openai(form) for form in messages], tools)

    def message(self, text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Parse a sampled text."""
        salt = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        parsed = self._parser.parse(
            text, tools, opened=self._renderer.opens_reasoning, salt=salt
        ).message(text)
        shown = AssistantMessage(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=parsed.tool_calls,
        )
        return to_openai(shown)


def chat_of(folder: Path) -> RenderedChat:
    """Return the chat side of a model's files. Raises: UserError."""
    return RenderedChat(load_renderer(folder))


# The program

_ABOUT = "A fake inference engine with exact tokens and a log of every id."


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("exact_engine", _ABOUT)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of a model's files")
    parser.add_argument("--seed", type=int, default=0, help="each seed is another model")
    parser.add_argument("--logprobs", choices=("raw", "scaled", "processed"), default="raw")
    parser.add_argument("--split", choices=("canonical", "random"), default="canonical")
    parser.add_argument("--chat-ids", choices=("vllm", "sglang", "none"), default="vllm")
    parser.add_argument("--window", type=int, help="tokens of prompt and answer together")
    parser.add_argument("--version", help="of the weights")
    parser.add_argument("--route", dest="routes", help="the only one that it serves")
    parser.add_argument("--end-logit", type=float, default=END_LOGIT, help="low: long answers")
    parser.add_argument("--whole-characters", action="store_true", help="sample no parts of them")
    parser.add_argument("--close-every", type=float, help="tokens, until a connection is closed")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds of each token")
    return parser


def main() -> None:
    """Serve until a signal, or the end of stdin."""
    arguments = vars(_parser().parse_args())
    until_eof = arguments.pop("until_eof")
    arguments |= {
        "faults": plan_from_json(arguments["faults"]),
        "latency_s": arguments.pop("latency"),
        "routes": frozenset((arguments["routes"],)) if arguments["routes"] else frozenset(WIRES),
    }
    engine = ExactEngine(ExactConfig(**arguments), chat=chat_of(arguments["tokenizer"]))
    asyncio.run(serve(engine, until_eof=until_eof))


if __name__ == "__main__":
    main()
