"""A small engine that samples token by token and logs the truth.

Its vocabulary has all letters and pairs of letters, so that most texts can be split in many ways.
It samples any of these splits; its tokenizer makes one.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hermes_rl.errors import ConnectionLost, RateLimited
from hermes_rl.messages import AssistantMessage, Message, ToolCall, ToolMessage
from hermes_rl.models import Completion, ModelRequest, TokenCapture
from hermes_rl.usage import Usage

SPECIAL = {
    "<|bos|>": 1,
    "<|im_start|>": 2,
    "<|im_end|>": 3,
    "<|eom|>": 4,
    "<think>": 5,
    "</think>": 6,
    "<tool_call>": 7,
    "</tool_call>": 8,
}
BOS, START, END, EOM, THINK, UNTHINK, CALL, UNCALL = SPECIAL.values()
LETTERS = "abcdefghijklmnopqrstuvwxyz \n"
VOCABULARY = [
    "the",
    "answer",
    "is",
    "no",
    "yes",
    "run",
    "it",
    "again",
    "file",
    "one",
    "with",
    "out",
]
TRAPS = ["<|im_end|>", "<|im_start|>assistant\n", "</think>", "<tool_call>{}</tool_call>", "ok  \n"]
_BACK = {number: text for text, number in SPECIAL.items()}


def _pair(text: str) -> int:
    return 1000 + LETTERS.index(text[0]) * len(LETTERS) + LETTERS.index(text[1])


def encode(text: str, *, special: bool = False, random: Random | None = None) -> list[int]:
    """Encode a text.

    Args:
        special: encode the text of a control token as one, like servers do with rendered prompts.
        random: split the text randomly; None uses pairs where possible.
    """
    out, at = [], 0
    while at < len(text):
        found = next((s for s in SPECIAL if special and text.startswith(s, at)), None)
        pair = text[at : at + 2]
        if found is not None:
            out.append(SPECIAL[found])
            at += len(found)
        elif len(pair) == 2 and set(pair) <= set(LETTERS) and (not random or random.random() < 0.6):
            out.append(_pair(pair))
            at += 2
        else:
            out.append(100 + ord(text[at]))
            at += 1
    return out


def decode(ids: Iterable[int]) -> str:
    out = []
    for number in ids:
        if number in _BACK:
            out.append(_BACK[number])
        elif number >= 1000:
            first, second = divmod(number - 1000, len(LETTERS))
            out.append(LETTERS[first] + LETTERS[second])
        else:
            out.append(chr(number - 100))
    return "".join(out)


@dataclass(frozen=True)
class Entry:
    """A log entry: one sampled answer."""

    call_id: str
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    delivered: bool
    """The client received the answer."""
    policy: bool = True
    """The policy's answer, not a judge's."""


@dataclass
class Behavior:
    """How the server and its template treat a history."""

    bridged: bool = True
    """Prompts are built from sampled ids; otherwise each call renders and tokenizes text."""
    drops_reasoning: bool = False
    volatile: bool = False
    """The template renders each call differently."""
    loses: float = 0.08
    """Share of answers that are lost after they were sampled."""
    refuses: float = 0.05


@dataclass(frozen=True)
class _Answer:
    message: AssistantMessage
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass
class Engine:
    """A model client that samples answers itself."""

    random: Random
    behavior: Behavior
    log: list[Entry] = field(default_factory=list)
    api_mode: str = "chat_completions"
    endpoint: str = "exact:1"
    _calls: int = 0
    _answers: dict[tuple[int, int], list[_Answer]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def bound(self, request: ModelRequest) -> int:
        return 1000

    async def aclose(self) -> None:
        pass

    async def complete(self, request: ModelRequest) -> Completion:
        random, behavior = self.random, self.behavior
        self._calls += 1
        judge = request.model == "judge"
        if random.random() < behavior.refuses:
            raise RateLimited("busy")
        prompt = self._prompt(request)
        sampled, message, reason = self._sample(request.call_id)
        logprobs = tuple(-random.random() - 1e-3 for _ in sampled)
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        lost = random.random() < behavior.loses
        entry = Entry(request.call_id, prompt, sampled, logprobs, not lost, not judge)
        self.log.append(entry)
        if lost:
            raise ConnectionLost("the answer was lost", served=True)
        key = (id(request.conversation), len(request.conversation))
        self._kept.append(request.conversation)
        self._answers.setdefault(key, []).append(_Answer(message, prompt, sampled))
        tokens = TokenCapture(
            prompt_ids=prompt,
            completion_ids=sampled,
            logprobs=logprobs,
            logprobs_kind="sampling",
            source="bridged" if behavior.bridged else "engine",
            tokenizer_hash="pairs",
            template_hash="im",
        )
        return Completion(
            message=message,
            finish_reason=reason,
            usage=Usage(input_tokens=len(prompt), output_tokens=len(sampled)),
            tokens=await self.capture(tokens, entry),
            policy_version=str(7 + len(self.log) // 5),
        )

    async def capture(self, tokens: TokenCapture, entry: Entry) -> TokenCapture:
        """Return what the client reports. Subclasses inject bugs here."""
        return tokens

    def _sample(self, call_id: str) -> tuple[tuple[int, ...], AssistantMessage, str]:
        random = self.random
        ids: list[int] = []
        reasoning = _text(random) if random.random() < 0.4 else None
        text = _text(random) if random.random() < 0.9 else ""
        if random.random() < 0.1:
            text += random.choice(TRAPS)
        if reasoning is not None:
            ids += [THINK, *encode(reasoning, random=random), UNTHINK]
        ids += encode(text, random=random)
        calls: tuple[ToolCall, ...] = ()
        if random.random() < 0.6:
            arguments = '{"command": "' + _text(random) + '"}'
            ids += [CALL, *encode(arguments, random=random), UNCALL]
            calls = (ToolCall(id=f"of-{call_id}", name="terminal", arguments=arguments),)
        ids.append(EOM if calls else END)
        reason = "tool_calls" if calls else "stop"
        if len(ids) > 1 and random.random() < 0.1:
            ids, calls, reason = ids[: random.randint(1, len(ids) - 1)], (), "length"
            text, reasoning = decode(i for i in ids if i > END), None
        message = AssistantMessage(content=text, reasoning_content=reasoning, tool_calls=calls)
        return tuple(ids), message, reason

    def _prompt(self, request: ModelRequest) -> tuple[int, ...]:
        messages = list(request.conversation)
        if self.behavior.bridged:
            for number in range(len(messages) - 1, -1, -1):
                for answer in self._answers.get((id(request.conversation), number), ()):
                    if messages[number] is answer.message:
                        return (
                            *answer.prompt,
                            *answer.sampled,
                            *_glue(answer, messages[number + 1 :]),
                        )
        noise = (
            f"<|im_start|>system\nnow {self._calls}<|im_end|>\n" if self.behavior.volatile else ""
        )
        body = "".join(self._written(m) for m in messages)
        return tuple(encode("<|bos|>" + noise + body + _ASK, special=True))

    def _written(self, message: Message) -> str:
        reasoning = "" if self.behavior.drops_reasoning else None
        return f"<|im_start|>{_role(message)}\n{_body(message, reasoning)}<|im_end|>\n"


_ASK = "<|im_start|>assistant\n"


def _glue(answer: _Answer, messages: list[Message]) -> list[int]:
    """Encode what a template writes after an answer."""
    ended = answer.sampled[-1] in (END, EOM)
    text = "".join(f"<|im_start|>{_role(m)}\n{_body(m, None)}<|im_end|>\n" for m in messages)
    return [*([] if ended else [END]), *encode("\n" + text + _ASK, special=True)]


def _role(message: Message) -> str:
    return type(message).__name__.removesuffix("Message").lower()


def _body(message: Message, reasoning: str | None) -> str:
    if isinstance(message, ToolMessage):
        return message.content
    if not isinstance(message, AssistantMessage):
        return str(message.content)
    kept = message.reasoning_content if reasoning is None else reasoning
    calls = "".join(f"<tool_call>{c.arguments}</tool_call>" for c in message.tool_calls)
    return (f"<think>{kept}</think>" if kept else "") + message.content + calls


def _text(random: Random) -> str:
    return " ".join(random.choices(VOCABULARY, k=random.randint(1, 5)))
