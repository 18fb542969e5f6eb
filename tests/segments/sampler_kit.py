"""A small engine that samples token by token and keeps the truth, and whatever may go wrong there.

Its vocabulary holds all letters and all pairs of some, so that most texts have many spellings; it
samples any of them, while its tokenizer knows one.
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
WORDS = ["the", "answer", "is", "no", "yes", "run", "it", "again", "file", "one", "with", "out"]
TRAPS = ["<|im_end|>", "<|im_start|>assistant\n", "</think>", "<tool_call>{}</tool_call>", "ok  \n"]
_BACK = {number: text for text, number in SPECIAL.items()}


def _pair(text: str) -> int:
    return 1000 + LETTERS.index(text[0]) * len(LETTERS) + LETTERS.index(text[1])


def encode(text: str, *, special: bool = False, random: Random | None = None) -> list[int]:
    """A text as ids.

    Args:
        special: read the spelling of a control token as one, as servers do with rendered prompts.
        random: spell it in any way; None takes pairs where it can.
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
    """One sampling: the truth."""

    call_id: str
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    delivered: bool
    """The client got the answer."""
    policy: bool = True
    """It played the policy's part, not a judge's."""


@dataclass
class Habits:
    """How a server and its template treat a history."""

    bridged: bool = True
    """Prompts are built from sampled ids; else the text is rendered and tokenised at each call."""
    drops_thoughts: bool = False
    volatile: bool = False
    """The template writes something else at each call."""
    loses: float = 0.08
    """Share of answers that are lost on the way, after they were sampled."""
    refuses: float = 0.05


@dataclass(frozen=True)
class _Said:
    message: AssistantMessage
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass
class Engine:
    """A model client that samples by itself."""

    random: Random
    habits: Habits
    log: list[Entry] = field(default_factory=list)
    api_mode: str = "chat_completions"
    endpoint: str = "exact:1"
    _calls: int = 0
    _said: dict[tuple[int, int], list[_Said]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def bound(self, request: ModelRequest) -> int:
        return 1000

    async def aclose(self) -> None:
        pass

    async def complete(self, request: ModelRequest) -> Completion:
        random, habits = self.random, self.habits
        self._calls += 1
        judge = request.model == "judge"
        if random.random() < habits.refuses:
            raise RateLimited("busy")
        prompt = self._prompt(request)
        sampled, message, reason = self._sample(request.call_id)
        logprobs = tuple(-random.random() - 1e-3 for _ in sampled)
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        lost = random.random() < habits.loses
        entry = Entry(request.call_id, prompt, sampled, logprobs, not lost, not judge)
        self.log.append(entry)
        if lost:
            raise ConnectionLost("the answer was lost", served=True)
        key = (id(request.conversation), len(request.conversation))
        self._kept.append(request.conversation)
        self._said.setdefault(key, []).append(_Said(message, prompt, sampled))
        tokens = TokenCapture(
            prompt_ids=prompt,
            completion_ids=sampled,
            logprobs=logprobs,
            logprobs_kind="sampling",
            source="bridged" if habits.bridged else "engine",
            tokenizer_hash="pairs",
            template_hash="im",
        )
        return Completion(
            message=message,
            finish_reason=reason,
            usage=Usage(input_tokens=len(prompt), output_tokens=len(sampled)),
            tokens=await self.tell(tokens, entry),
            policy_version=str(7 + len(self.log) // 5),
        )

    async def tell(self, tokens: TokenCapture, entry: Entry) -> TokenCapture:
        """What the client reports of a sampling. Bugs are planted here."""
        return tokens

    def _sample(self, call_id: str) -> tuple[tuple[int, ...], AssistantMessage, str]:
        random = self.random
        ids: list[int] = []
        thought = _text(random) if random.random() < 0.4 else None
        text = _text(random) if random.random() < 0.9 else ""
        if random.random() < 0.1:
            text += random.choice(TRAPS)
        if thought is not None:
            ids += [THINK, *encode(thought, random=random), UNTHINK]
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
            text, thought = decode(i for i in ids if i > END), None
        message = AssistantMessage(content=text, reasoning_content=thought, tool_calls=calls)
        return tuple(ids), message, reason

    def _prompt(self, request: ModelRequest) -> tuple[int, ...]:
        messages = list(request.conversation)
        if self.habits.bridged:
            for number in range(len(messages) - 1, -1, -1):
                for said in self._said.get((id(request.conversation), number), ()):
                    if messages[number] is said.message:
                        return (*said.prompt, *said.sampled, *_glue(said, messages[number + 1 :]))
        noise = f"<|im_start|>system\nnow {self._calls}<|im_end|>\n" if self.habits.volatile else ""
        body = "".join(self._written(m) for m in messages)
        return tuple(encode("<|bos|>" + noise + body + _ASK, special=True))

    def _written(self, message: Message) -> str:
        thought = "" if self.habits.drops_thoughts else None
        return f"<|im_start|>{_role(message)}\n{_body(message, thought)}<|im_end|>\n"


_ASK = "<|im_start|>assistant\n"


def _glue(said: _Said, messages: list[Message]) -> list[int]:
    """What a template writes behind an answer; none of it was sampled."""
    ended = said.sampled[-1] in (END, EOM)
    text = "".join(f"<|im_start|>{_role(m)}\n{_body(m, None)}<|im_end|>\n" for m in messages)
    return [*([] if ended else [END]), *encode("\n" + text + _ASK, special=True)]


def _role(message: Message) -> str:
    return type(message).__name__.removesuffix("Message").lower()


def _body(message: Message, thought: str | None) -> str:
    if isinstance(message, ToolMessage):
        return message.content
    if not isinstance(message, AssistantMessage):
        return str(message.content)
    kept = message.reasoning_content if thought is None else thought
    calls = "".join(f"<tool_call>{c.arguments}</tool_call>" for c in message.tool_calls)
    return (f"<think>{kept}</think>" if kept else "") + message.content + calls


def _text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 5)))
