"""Write docs/prompts.md: every text that the harness can send to a model, read from the code.

python scripts/prompts_page.py [--check]

System prompts, messages and tool schemas come from their tables. All other texts are found in the
source: each text of a module below, but for docstrings, log lines and errors that only people read.
A new module of `agent`, `tools` or `models/prepare` is read without being named here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hermes_rl.agent import WORDINGS  # noqa: E402
from hermes_rl.models.local import SYSTEM_PROMPT  # noqa: E402

PAGE = ROOT / "docs" / "prompts.md"

SECTIONS = {
    "Notes joined to results, and results of calls that did not run": ("hermes_rl/agent/*.py",),
    "Tools": ("hermes_rl/tools/*.py", "hermes_rl/text.py"),
    "Repairs of histories": ("hermes_rl/models/prepare/*.py",),
    "Judges": ("hermes_rl/judging.py",),
    "`hermes-rl compress`, beside the request for a summary": ("hermes_rl/export/compressor.py",),
}
"""Heading -> where its texts are."""

NOT_READ = frozenset(
    f"hermes_rl/agent/{name}.py"
    for name in (
        *("__init__", "answers", "callbacks", "compression", "endings", "hooks", "names"),
        *("plugins", "policy", "prompt", "session"),
    )
) | {"hermes_rl/tools/toolsets.py", "hermes_rl/tools/__init__.py", "hermes_rl/tools/code_runner.py"}
"""Modules without texts for models, and `prompt`, whose tables are printed."""

_FOR_MODELS = frozenset({"ToolError"})
_SHELL = re.compile(r"\[\[|command |builtin|-path |-name |printf|\\x1b|realpath|^\^|\$PWD")
_PEOPLE = re.compile(r"Error$|Exception$|^Failed|Died$|Killed$|Fault$|Interrupted$|Stalled$|Full$")
_LEAST = 12
PROBES = "hermes_rl/models/providers/probe.py", ("_QUESTION", "_TOKENIZER_TEST")
"""What is sent to look at an endpoint."""

INTRODUCTION = """\
# Every text that a model can read

This page is made from the code by `python scripts/prompts_page.py`, and a test fails when it is not
up to date. `{...}` is a value. No text has a clock, a host name or a user name. What users, tasks,
tools, hooks and files contain is not listed. Short texts share a block, one in a line.
"""


def text_of(node: ast.AST) -> str | None:
    """The text of a literal; of an f-string, with its expressions in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for value in node.values:
        if isinstance(value, ast.FormattedValue):
            parts.append("{" + ast.unparse(value.value) + "}")
        elif isinstance(value, ast.Constant):
            parts.append(str(value.value))
    return "".join(parts)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def texts_in(node: ast.AST) -> Iterator[str]:
    """The texts below a node that a model may read, in the order of the source."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if (_PEOPLE.search(name) and name not in _FOR_MODELS) or _is_log(node.func):
            return
    text = text_of(node)
    if text is not None:
        plain = re.sub(r"\{[^{}]*\}", "", text)
        if len(text) >= _LEAST and " " in plain.strip() and not _SHELL.search(text):
            yield text
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and child is getattr(node, "annotation", None):
            continue
        yield from texts_in(child)


def _is_log(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and _name(function.value) == "_log"


def found(patterns: tuple[str, ...]) -> list[str]:
    """The texts of the modules, each once."""
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    read = [file for file in files if file.relative_to(ROOT).as_posix() not in NOT_READ]
    texts = (
        text for file in read for text in texts_in(ast.parse(file.read_text(encoding="utf-8")))
    )
    return list(dict.fromkeys(texts))


def quoted(text: str) -> str:
    """A text as a block."""
    fence = "````" if "```" in text else "```"
    return f"{fence}\n{text.strip(chr(10))}\n{fence}"


def blocks(texts: list[str]) -> Iterator[str]:
    """Texts as blocks, those of one line together."""
    lines = [text.strip() for text in texts if "\n" not in text.strip()]
    if lines:
        yield quoted("\n".join(lines))
    yield from (quoted(text) for text in texts if "\n" in text.strip())


def wordings() -> Iterator[str]:
    """The tables of `agent.prompt`, the latest version first."""
    for version in sorted(WORDINGS, reverse=True):
        wording = WORDINGS[version]
        yield f"## System prompts and messages, `wording` {version}"
        yield from ("With tools:", quoted(wording.with_tools))
        yield from ("Where no user can reply, followed by:", quoted(wording.unattended))
        yield from ("Without tools:", quoted(wording.without_tools))
        for name in wording.messages.__dataclass_fields__:
            yield from (f"`{name}`:", quoted(getattr(wording.messages, name)))
    yield from ("The embedded model with the tool `terminal` alone:", quoted(SYSTEM_PROMPT))
    source = ast.parse((ROOT / "hermes_rl/agent/prompt.py").read_text(encoding="utf-8"))
    others = [n for n in source.body if isinstance(n, ast.FunctionDef | ast.Assign | ast.AnnAssign)]
    known = {text for n in others if _target(n) == "WORDINGS" for text in texts_in(n)}
    notes = [t for n in others for t in texts_in(n) if t not in known]
    yield "Joined to the result of a tool:"
    yield from blocks(list(dict.fromkeys(notes)))


def _target(node: ast.stmt) -> str:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return str(getattr(targets[0], "id", ""))


def probes() -> Iterator[str]:
    """The texts that `doctor models` and runs with exact tokens send."""
    file, names = PROBES
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assigned = {_target(node): node for node in tree.body if isinstance(node, ast.Assign)}
    yield "## Probes of an endpoint"
    yield from (quoted(text_of(assigned[name].value) or "") for name in names)


def schemas() -> Iterator[str]:
    """The descriptions of the tools and their parameters."""
    read = json.loads((ROOT / "hermes_rl/tools/schemas.json").read_text(encoding="utf-8"))
    for version in sorted(read, key=int, reverse=True):
        yield f"## Schemas of the tools, `wording` {version}"
        for name, schema in read[version].items():
            lines = [f"{name}: {schema['description']}"]
            for parameter, form in schema["parameters"].get("properties", {}).items():
                lines.append(f"  {parameter}: {form.get('description', '')}".rstrip())
            yield quoted("\n".join(lines))


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.strip(), *wordings()]
    for heading, patterns in SECTIONS.items():
        parts += [f"## {heading}", *blocks(found(patterns))]
    return "\n\n".join([*parts, *probes(), *schemas()]) + "\n"


def main() -> int:
    made = page()
    if "--check" in sys.argv:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == made
        print("docs/prompts.md is up to date" if same else "run: python scripts/prompts_page.py")
        return 0 if same else 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
