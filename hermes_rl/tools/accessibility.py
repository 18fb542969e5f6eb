"""The accessibility tree of a page as text: a line for each element, with references to act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

MAX_NAME_CHARS = 300
MAX_DEPTH = 24
"""Levels of indentation."""

_ACTIVE = frozenset(
    (
        *("button", "link", "textbox", "searchbox", "combobox", "listbox", "option", "checkbox"),
        *("radio", "switch", "slider", "spinbutton", "menuitem", "menuitemcheckbox", "Iframe"),
        *("menuitemradio", "tab", "treeitem", "gridcell", "Date", "DateTime", "InputTime"),
        *("ColorWell", "DisclosureTriangle", "DisclosureTriangleGrouped"),
    )
)
"""Roles of what can be used; anything else only if it takes the focus."""
_FLAT = frozenset(
    (
        *("generic", "none", "paragraph", "LabelText", "MenuListPopup", "group", "Section"),
        *("strong", "emphasis", "code", "mark", "insertion", "deletion", "subscript", "time"),
        *("superscript", "Abbr", "rowgroup"),
    )
)
"""Roles that say nothing without a name: only what is in them is shown."""
_SKIPPED = frozenset(("InlineTextBox", "ListMarker", "LineBreak"))
_STATES = (
    "checked",
    "pressed",
    "selected",
    "expanded",
    "disabled",
    "required",
    "invalid",
    "focused",
    "level",
)


class _Value(msgspec.Struct):
    value: Any = None


class _Property(msgspec.Struct):
    name: str
    value: _Value


class Node(msgspec.Struct):
    """A node of the tree, as the protocol gives it."""

    nodeId: str
    ignored: bool = False
    role: _Value = msgspec.field(default_factory=_Value)
    name: _Value = msgspec.field(default_factory=_Value)
    value: _Value = msgspec.field(default_factory=_Value)
    properties: list[_Property] = []
    childIds: list[str] = []
    backendDOMNodeId: int = 0


class Refs:
    """Names nodes of a page by references; a node keeps its own in all snapshots of the page.

    Args:
        known: node -> reference, of earlier snapshots; new ones are added.
    """

    def __init__(self, known: dict[int, str], first: int) -> None:
        self.shown: dict[str, int] = {}
        self._known, self.next = known, first

    def of(self, node: int) -> str:
        """The reference of a node."""
        if node not in self._known:
            self._known[node] = f"e{self.next}"
            self.next += 1
        self.shown[self._known[node]] = node
        return self._known[node]


def lines_of(
    nodes: Sequence[Node], refs: Refs, frames: Mapping[int, Sequence[Node]], *, full: bool = False
) -> Iterator[str]:
    """A tree as lines, indented by depth.

    Args:
        nodes: the tree of the page, its root first.
        frames: frame element -> the tree in it.
        full: give every element a reference.
    """
    todo = [(f"m{node.nodeId}", 0, "") for node in nodes[:1]]
    by_id = {f"m{node.nodeId}": node for node in nodes}
    for number, tree in frames.items():
        by_id |= {f"{number}.{node.nodeId}": node for node in tree}
    while todo:
        key, depth, above = todo.pop()
        node = by_id.pop(key, None)  # each once, whatever the page claims
        if node is None or node.role.value in _SKIPPED:
            continue
        name = _cut(node.name.value)
        flat = node.role.value in _FLAT and not (name and full)
        hidden = node.ignored or flat or node.role.value == "RootWebArea"
        if node.role.value == "StaticText":
            if name.strip() and name not in above:
                ref = f" [ref={refs.of(node.backendDOMNodeId)}]" if full else ""
                yield f"{'  ' * depth}- text{ref}: {name}"
            continue
        if not hidden:
            yield "  " * depth + _line(node, name, refs, full=full)
            above, depth = f"{name} {node.value.value}", min(depth + 1, MAX_DEPTH)
        prefix = "m" if key.startswith("m") else key.partition(".")[0] + "."
        below = [(prefix + child, depth, above) for child in node.childIds]
        if inner := frames.get(node.backendDOMNodeId):
            below.append((f"{node.backendDOMNodeId}.{inner[0].nodeId}", depth, ""))
        todo += reversed(below)


def _line(node: Node, name: str, refs: Refs, *, full: bool) -> str:
    role = str(node.role.value or "element").removeprefix("LayoutTable").lower()[:40] or "table"
    states = {p.name: p.value.value for p in node.properties}
    if role != "heading":
        states.pop("level", None)
    text = f"- {role}"
    if name:
        text += f' "{name}"'
    usable = node.role.value in _ACTIVE or bool(states.get("focusable"))
    if node.backendDOMNodeId and (usable or full):
        text += f" [ref={refs.of(node.backendDOMNodeId)}]"
    for state in _STATES:
        value = states.get(state)
        if value is True or value == "true":
            text += f" [{state}]"
        elif not (value is None or value is False or value == "false"):
            text += f" [{state}={_cut(value)}]"
    if url := states.get("url"):
        text += f" -> {_cut(url)}"
    if (value := node.value.value) not in (None, ""):
        text += f": {_cut(value)}"
    return text


def _cut(value: Any) -> str:
    if not isinstance(value, str):
        value = "" if value is None else str(value)
    text = " ".join(value[: 4 * MAX_NAME_CHARS].split())
    return text if len(text) <= MAX_NAME_CHARS else text[:MAX_NAME_CHARS] + "..."
