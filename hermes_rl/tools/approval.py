"""Which commands an agent may run: patterns of dangerous commands, and who decides about them.

Some commands are never run: they destroy a machine. Of other dangerous ones the mode decides. This
protects from accidents and not from malice: a script can hide what it does. What locks an agent in
is its sandbox.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

_log = logging.getLogger(__name__)

Mode = Literal["ask", "allow", "deny"]
Decision = Literal["allowed", "denied", "never"]
"""never: no mode allows it."""


@dataclass(frozen=True, kw_only=True)
class ApprovalRequest:
    """A dangerous command that is to be run."""

    tool: str
    command: str
    pattern: str
    """Name of the pattern that it matches."""
    reason: str
    """What is dangerous about it."""


Ask = Callable[[ApprovalRequest], bool | Awaitable[bool]]


@dataclass(frozen=True)
class Concern:
    """Why a command is dangerous."""

    pattern: str
    reason: str
    never: bool
    """It is never run."""


_START = (
    r"(?:^|[;&|(){}\n`!]|(?:(?<=\s)-c|\b(?:sudo|doas|env|exec|nohup|time|nice|xargs|then|do|else"
    r"|command|builtin|eval))\s+(?:-\S+\s+|\w+=\S*\s+){0,8})\s*(?:/(?:usr/)?s?bin/)?"
)
"""Where a command begins: not the arguments of `echo` or `grep`."""
_RECURSIVE_OPTION = r"(?:-[a-z]*r[a-z]*|--recursive)\s"
_RECURSIVE = rf"(?=(?>(?:(?!{_RECURSIVE_OPTION})-\S+\s+)*){_RECURSIVE_OPTION})(?>(?:-\S+\s+)+)"
"""All options, of which one is recursive. Atomic groups (`?>`) keep the search linear, whatever a
model repeats."""
_ARGUMENTS = r"(?:[^\s;&|]+\s+)*"
_SYSTEM = (
    r"(?:/\*?|/(?:bin|boot|dev|etc|home|lib|lib64|opt|proc|root|run|sbin|srv|sys|usr|var)(?:/\*?)?"
    r"|~(?:/\*?)?|\$\{?home\}?(?:/\*?)?)(?=\s|$|[;&|)])"
)
_DISK = r"/dev/(?:sd|hd|vd|xvd|nvme|mmcblk|disk|md|dm-|mapper/)"

_NEVER = {
    "remove system files": (
        rf"{_START}rm\s+{_RECURSIVE}{_ARGUMENTS}{_SYSTEM}",
        "it removes the root, a system or a home directory",
    ),
    "change modes of the system": (
        rf"{_START}(?:chmod|chown)\s+{_RECURSIVE}\S+\s+{_ARGUMENTS}{_SYSTEM}",
        "it changes the modes or owners of a system directory",
    ),
    "make a file system": (rf"{_START}mkfs(?:\.\w+)?\s", "it formats a disk"),
    "overwrite a disk": (
        rf"{_START}(?:dd\s[^;&|\n]*\bof=|wipefs\s[^;&|\n]*|blkdiscard\s[^;&|\n]*){_DISK}",
        "it overwrites a disk",
    ),
    "write to a disk": (rf">\s*{_DISK}", "it writes to a disk"),
    "fork bomb": (
        r"(?<!\w)(\w+|:)\s*\(\)\s*\{\s*\1\s*\|\s*\1\s*&\s*\}",
        "it starts processes endlessly",
    ),
    "end all processes": (
        rf"{_START}kill\s+(?:(?:-s\s+\w+|-\w+|--)\s+)+-1(?=\s|$|[;&|)])",
        "it ends all processes",
    ),
    "shut the machine down": (
        rf"{_START}(?:shutdown|reboot|halt|poweroff|telinit\s+[06]|init\s+[06]"
        r"|systemctl\s+(?:-\S+\s+)*(?:poweroff|reboot|halt|kexec))(?=\s|$|[;&|)])",
        "it shuts the machine down",
    ),
}
_DANGEROUS = {
    "recursive removal": (rf"{_START}rm\s+{_RECURSIVE}", "it removes directories"),
    "find and remove": (
        rf"{_START}find\s[^;|\n]*(?:-delete\b|-exec(?:dir)?\s+(?:/\S*/)?rm\b)",
        "it removes the files that it finds",
    ),
    "destroy content": (rf"{_START}(?:shred|truncate)\s", "it destroys the content of files"),
    "raw copy": (rf"{_START}dd\s[^;&|\n]*\bof=", "it overwrites a file or device"),
    "open permissions": (
        rf"{_START}chmod\s+(?:-\S+\s+)*(?:0?777|a\+\w*w\w*|\+w?rwx)",
        "it lets everyone change files",
    ),
    "change owner": (rf"{_START}chown\s+(?:-\S+\s+)*root", "it makes root the owner of files"),
    "run a download": (
        r"\b(?:curl|wget)\b[^;&\n]*\|\s*(?:sudo\s+)?(?:/\S*/)?(?:ba|z|da|k)?sh\b",
        "it runs a script from the network",
    ),
    "run a decoded text": (
        r"\b(?:base64\s+(?:-\S+\s+)*(?:-d|--decode)|xxd\s+-r)[^;&\n]*\|\s*(?:/\S*/)?(?:ba|z|da|k)?sh\b",
        "it runs encoded text, which cannot be checked",
    ),
    "change a database": (
        r"\b(?:drop\s+(?:table|database|schema)|truncate\s+table)\b"
        r"|\bdelete\s+from\s+\w+\s*(?:;|$)",
        "it deletes tables or all their rows",
    ),
    "discard work": (
        rf"{_START}git\s+(?:-\S+\s+)*(?:reset\s+[^;&|\n]*--hard|clean\s+(?:-\S+\s+)*-\w*f"
        r"|push\s+[^;&|\n]*(?:--force|\s-f\b)|branch\s+-d\s|checkout\s+(?:-f|--)\s)",
        "it discards work or rewrites a remote history",
    ),
    "change system files": (
        rf"(?:>>?\s*|\btee\s+(?:-a\s+)?|{_START}(?:cp|mv|ln|install)\s[^;&|\n]*\s)/(?:etc|boot|usr|lib)/",
        "it changes system files",
    ),
    "change login files": (
        r"(?:>>?\s*|\btee\s+(?:-a\s+)?)(?:~|\$\{?home\}?|/home/\w+|/root)/"
        r"\.(?:ssh/|bashrc|profile|bash_profile|zshrc|netrc|gitconfig)",
        "it changes files that run or are trusted at login",
    ),
    "become root": (rf"{_START}(?:sudo|doas|su)(?=\s|$)", "it runs as root"),
    "stop services": (
        rf"{_START}(?:systemctl\s+(?:-\S+\s+)*(?:stop|disable|mask)|service\s+\S+\s+stop)\b",
        "it stops services",
    ),
    "end processes by name": (rf"{_START}(?:killall|pkill)\s", "it ends processes by name"),
    "change users": (
        rf"{_START}(?:passwd|useradd|userdel|usermod|visudo)(?=\s|$)",
        "it changes users",
    ),
    "change the firewall": (rf"{_START}(?:iptables|nft|ufw)\s", "it changes the firewall"),
    "remove cron jobs": (rf"{_START}crontab\s+-r\b", "it removes all cron jobs"),
    "prune containers": (
        rf"{_START}(?:docker|podman)\s+(?:system|volume|container|image)\s+prune",
        "it removes containers, images or volumes",
    ),
}

_LINE_CHARS = 2_000
"""Characters of each line that are searched: the search must not hold up other agents."""
_HIDDEN = re.compile(r"\\\n|\$\{?ifs\}?")
_QUOTES = re.compile(r"""['"\\]|\$(?=['"])""")

SUSPECT = re.compile(
    r"rm|ch(?:mod|own)|mkfs|dd|wipefs|blkdiscard|/dev/|kill|shutdown|reboot|halt|poweroff|init"
    r"|\(\)\s*\{|find|shred|truncate|curl|wget|base64|xxd|drop|delete|git|/etc/|/boot/|/usr/|/lib/"
    r"|\.(?:ssh|bash|profile|zshrc|netrc)|su|doas|systemctl|service|passwd|user|iptables|nft|ufw"
    r"|crontab|docker|podman",
    re.IGNORECASE,
)
"""Matches in each command that `concern_of` may say something about, without the characters of
`PLAIN`: most commands are done with that."""
PLAIN = {ord(c): None for c in "'\"\\\n$"}


def concern_of(command: str) -> Concern | None:
    """What is dangerous about a command; None when it matches no pattern.

    Quotes, backslashes, case and other ways to write the same words are ignored.
    """
    text = _QUOTES.sub("", _HIDDEN.sub(" ", command.lower()))
    suspect = (line[:_LINE_CHARS] for line in text.splitlines() if SUSPECT.search(line))
    lines = dict.fromkeys(suspect)
    for never, patterns in ((True, _NEVER), (False, _DANGEROUS)):
        for name, (expression, reason) in patterns.items():
            if any(map(re.compile(expression).search, lines)):  # compiled once, on first use
                return Concern(name, reason, never)
    return None


@dataclass(frozen=True)
class Approval:
    """Decides about dangerous commands.

    Args:
        mode: `allow` and `deny` decide by themselves; `ask` asks, and denies without `ask`.
        ask: called with the request, in a thread unless it is async; True allows the command.
        timeout_s: seconds that it has; then, or when it fails, the command is denied.
        disposable: commands reach a sandbox alone, so that `never` does not hold: what a model
            does to its sandbox is its own action, and graded.
    """

    mode: Mode
    ask: Ask | None = None
    timeout_s: float = 60.0
    disposable: bool = False

    def asks(self, concern: Concern) -> bool:
        """Whether the callback decides about a command."""
        return self.mode == "ask" and self.ask is not None and not self._forbids(concern)

    def _forbids(self, concern: Concern) -> bool:
        return concern.never and not self.disposable

    async def decide(self, concern: Concern, tool: str, command: str) -> Decision:
        """The decision about a command."""
        if self._forbids(concern):
            return "never"
        if self.mode != "ask":
            return "allowed" if self.mode == "allow" else "denied"
        request = ApprovalRequest(
            tool=tool, command=command, pattern=concern.pattern, reason=concern.reason
        )
        return "allowed" if await self._consent(request) else "denied"

    async def _consent(self, request: ApprovalRequest) -> bool:
        if self.ask is None:
            return False
        try:
            async with asyncio.timeout(self.timeout_s):
                if inspect.iscoroutinefunction(self.ask):
                    return await self.ask(request) is True
                answer = await asyncio.to_thread(self.ask, request)
                return (await answer if inspect.isawaitable(answer) else answer) is True
        except TimeoutError:
            _log.warning("no answer to an approval request within %g s", self.timeout_s)
        except Exception:  # the callback is not ours: whatever it raises, the command is denied
            _log.exception("the approval callback failed")
        return False


def default_approval(sandboxed: bool, backend: object = None) -> Approval:
    """Return who decides by default: outside a sandbox each dangerous command needs consent.

    Args:
        backend: of the sandbox; its `workspace`, if it has one, is a folder of this machine.
    """
    if not sandboxed:
        return Approval("ask")
    return Approval("allow", disposable=getattr(backend, "workspace", None) is None)


def refusal(concern: Concern, decision: Decision) -> str:
    """What the model reads in the place of a result."""
    who = "This command is never allowed" if decision == "never" else "This command was denied"
    return (
        f"{who}: {concern.reason} ({concern.pattern}). It was not run. Do the task in another way, "
        "or say what you could not do."
    )
