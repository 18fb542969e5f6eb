"""Tracked text is in plain English, and names no machine and no package index.

`banned_words.toml` lists the words to avoid and what to write instead. `word_counts.toml` holds how
often each package still uses them: a count may shrink, never grow. After a clean-up,
`python tests/house/test_words.py` lowers the counts.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
import warnings
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BANNED = Path(__file__).with_name("banned_words.toml")
COUNTS = Path(__file__).with_name("word_counts.toml")
SLACK = 5  # a count this far below its entry is worth lowering the entry

# Written in halves, so that this file passes its own test.
FORBIDDEN = [
    r"pypi\." + "org",
    "python" + "hosted",
    r"registry\.npm" + "js",
    r"deb\.deb" + "ian",
    "/work/" + r"(main|shared|\.library)",
    "/root/" + r"(\.pyenv|\.cache)",
    "/opt/" + "(pypi|wheels)",
    r"\bfarm" + r"-[a-z]+",
    r"file:///(opt|root|home|work)" + "/",
]
PATTERN = re.compile("|".join(FORBIDDEN))

# Text by other people, data that is recorded or generated, and the lists themselves.
NOT_PROSE = re.compile(
    r"locks/|LICENSE|NOTICE|.*error_bodies\.jsonl|.*\.(gguf|png|bin|pem|key|bpf)$"
    r"|tests/house/(banned_words\.toml|word_counts\.toml)|hermes_rl/models/.*prices.*\.json"
    r"|docs/prompts\.md"
)


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths of the committed files, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    return tuple(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def read_text(name: str) -> str:
    return (ROOT / name).read_bytes().decode("utf-8", errors="replace")


def package_of(name: str) -> str:
    """'hermes_rl/models/calls/x.py' -> 'hermes_rl/models', 'docs/examples/a.py' -> 'docs'."""
    top, *rest = name.split("/")
    if not rest:
        return "."
    return f"{top}/{rest[0]}" if top in ("hermes_rl", "tests") and len(rest) > 1 else top


def split_names(text: str) -> str:
    """Lower case, with camelCase split, so that a pattern sees each part of a name."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower()


def python_names(text: str) -> str:
    """The source without comments and strings, so that only names are left."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return ""
    lines: list[list[str]] = [[]]
    for token in tokens:
        if token.type == tokenize.NAME or token.type == tokenize.OP:
            lines[-1].append(token.string)
        elif token.type == tokenize.NEWLINE:
            lines.append([])
    return "\n".join(" ".join(line).replace(" (", "(").replace("@ ", "@") for line in lines)


class Rule:
    """One entry of banned_words.toml."""

    def __init__(self, word: str, entry: dict[str, object]) -> None:
        self.word = word
        self.advice = str(entry["write"])
        self.names_only = entry.get("in") == "names"
        find = f"{entry.get('find', word)}"
        self.is_phrase = " " in find
        self.find = re.compile(rf"(?<![a-z])(?:{find})(?![a-z])")
        allowed = entry.get("allowed", [])
        assert isinstance(allowed, list)
        self.allowed = re.compile("|".join(map(str, allowed))) if allowed else None

    def lines(self, text: str) -> list[int]:
        """The line number of each use in text that split_names has prepared."""
        if self.find.search(text) is None:
            return []
        if self.allowed:
            text = self.allowed.sub(" ", text)
        return [text.count("\n", 0, match.start()) + 1 for match in self.find.finditer(text)]


def rules() -> list[Rule]:
    return [Rule(w, entry) for w, entry in tomllib.loads(BANNED.read_text("utf-8")).items()]


@cache
def banned_uses() -> dict[str, dict[str, list[str]]]:
    """Package -> word -> the places where it is used."""
    uses: dict[str, dict[str, list[str]]] = {}
    every = rules()
    single, phrases = ([r for r in every if r.is_phrase == wanted] for wanted in (False, True))
    any_phrase = re.compile("|".join(rule.find.pattern for rule in phrases))
    against: dict[str, list[Rule]] = {}
    """Token -> the rules that it breaks."""
    for name in tracked_files():
        if NOT_PROSE.match(name):
            continue
        text = read_text(name)
        prose = split_names(text)
        broken = set(phrases) if any_phrase.search(prose) else set()
        for token in {*re.findall("[a-z]+", prose)}:
            if token not in against:
                against[token] = [rule for rule in single if rule.find.fullmatch(token)]
            broken.update(against[token])
        by_name = name.endswith(".py") and any(rule.names_only for rule in broken)
        names = split_names(python_names(text)) if by_name else ""
        for rule in (rule for rule in every if rule in broken):
            places = rule.lines(names if rule.names_only else prose)
            shown = [name if rule.names_only else f"{name}:{line}" for line in places]
            if shown:
                uses.setdefault(package_of(name), {}).setdefault(rule.word, []).extend(shown)
    return uses


def recorded_counts() -> dict[str, dict[str, int]]:
    return tomllib.loads(COUNTS.read_text("utf-8"))


def lower_counts() -> None:
    """Write word_counts.toml with each count at most what it was."""
    known = recorded_counts() if COUNTS.is_file() else None
    lines = ["# Uses of banned words that are left, per package. Counts may only shrink."]
    for package, words in sorted(banned_uses().items()):
        lines.append(f'\n["{package}"]')
        for word, places in sorted(words.items()):
            limit = len(places) if known is None else known.get(package, {}).get(word, 0)
            lines += [f"{word} = {min(len(places), limit)}"] if limit else []
    COUNTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_banned_words_do_not_increase() -> None:
    known = recorded_counts()
    advice = {rule.word: rule.advice for rule in rules()}
    more = [
        f"{package}: '{word}' is used {len(places)} times, {limit} at most; write: {advice[word]}."
        f" In {', '.join(sorted(set(places), key=places.index)[:12])}"
        for package, words in banned_uses().items()
        for word, places in words.items()
        if len(places) > (limit := known.get(package, {}).get(word, 0))
    ]
    assert not more, "\n".join(
        [*more, "If you moved text, move its count in word_counts.toml too."]
    )


def test_counts_of_banned_words_are_lowered() -> None:
    uses = banned_uses()
    behind = [
        f"{package}: {word} {limit} -> {count}"
        for package, words in recorded_counts().items()
        for word, limit in words.items()
        if limit - (count := len(uses.get(package, {}).get(word, []))) >= SLACK
    ]
    if behind:
        command = "lower them with: python tests/house/test_words.py"
        warnings.warn("; ".join([*behind, command]), stacklevel=1)


def test_a_banned_word_is_found_in_names_and_prose() -> None:
    rule = Rule("door", {"write": "entry point", "find": "doors?", "allowed": ["next door"]})
    assert rule.lines(split_names("open_door\nfrontDoor Doors\nindoor, next door")) == [1, 2, 2]


def test_rules_for_names_ignore_prose() -> None:
    source = 'given = 1  # given\n"""given"""\n@given(x)\ndef f(): ...\n'
    rule = Rule("given", {"write": "value", "in": "names", "allowed": ["@given"]})
    assert len(rule.lines(split_names(python_names(source)))) == 1


def found_in(name: str) -> list[str]:
    return [
        f"{name}:{number}: {match.group()}"
        for number, line in enumerate(read_text(name).splitlines(), 1)
        for match in PATTERN.finditer(line)
    ]


def test_no_hosts_and_no_machine_paths() -> None:
    assert [place for name in tracked_files() for place in found_in(name)] == []


def test_lock_files_name_no_package_index() -> None:
    for lock in sorted((ROOT / "locks").glob("*.txt")):
        lines = lock.read_text(encoding="utf-8").splitlines()
        assert lines
        for line in lines:
            stripped = line.strip()
            assert stripped.startswith("--hash=sha256:") or "==" in stripped, (lock.name, line)


if __name__ == "__main__":
    lower_counts()
    sys.exit(0)
