"""The tolerant matching of `patch`, from strict to tolerant."""

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hermes_rl.tools import STRATEGIES, find, replace

LINES = st.lists(st.text("ab (){}=.\t'é", max_size=8), min_size=1, max_size=8)


def patched(content: str, old: str, new: str) -> tuple[str, str]:
    found = find(content, old)
    assert found is not None, f"not found: {old!r}"
    assert len(found.spans) == 1
    return replace(content, found, old, new), found.strategy


@given(LINES, LINES, LINES, st.text("xyz\n ", max_size=9))
def test_an_exact_quote_is_replaced_and_nothing_else(
    before: list[str], quoted: list[str], after: list[str], new: str
) -> None:
    old = "\n".join(quoted)
    content = "\n".join([*before, old, *after])
    assume(old and content.count(old) == 1)
    found = find(content, old)
    assert found is not None
    assert found.strategy == "exact"
    if len(found.spans) == 1:
        assert replace(content, found, old, new) == content.replace(old, new, 1)


@given(LINES, st.text("ab (){}=.\n\\n\t'é", min_size=1, max_size=30))
def test_whatever_is_found_lies_in_the_content_in_order(lines: list[str], old: str) -> None:
    content = "\n".join(lines)
    found = find(content, old)
    if found is None:
        return
    at = 0
    kept = []
    for span in found.spans:
        assert at <= span.start <= span.end <= len(content)
        kept.append(content[at : span.start])
        at = span.end
    kept.append(content[at:])
    result = replace(content, found, old, "\0")
    # All that lies outside the spans is still there, byte for byte, in order.
    place = 0
    for piece in kept:
        place = result.index(piece, place) + len(piece)


@given(LINES, st.integers(0, 8), st.sampled_from(["  ", "\t", "    "]))
def test_a_block_quoted_at_another_depth_is_found(lines: list[str], depth: int, unit: str) -> None:
    block = ["start of it", *[line.strip() for line in lines], "end of it"]
    content = "\n".join(["head", *(unit * depth + x if x else x for x in block), "tail"])
    changed, _ = patched(content, "\n".join(block), "start of it\nnew")
    assert changed == "\n".join(
        ["head", unit * depth + "start of it", unit * depth + "new", "tail"]
    )


CASES = [
    ("exact", "a = 1\nb = 2\n", "b = 2", "b = 3", "a = 1\nb = 3\n"),
    (
        "line_trimmed",
        "def f():\n    x = 1  \n    y = 2\n",
        "x = 1\ny = 2",
        "x = 1\nz = 3",
        "def f():\n    x = 1\n    z = 3\n",
    ),
    ("whitespace", "if  (a   ==  b):\n  go()\n", "if (a == b):", "if a:", "if a:\n  go()\n"),
    (
        "escapes",
        'print("a")\nprint("b")\n',
        'print(\\"a\\")\\nprint(\\"b\\")',
        'print(\\"c\\")',
        'print("c")\n',
    ),
    ("boundary_trimmed", "x = call(1) + 2\n", "\n call(1) \n", "call(3)", "x = call(3) + 2\n"),
    ("boundary_trimmed", "f(call(1))\n", "  call(1)\n", "  call(3)\n", "f(call(3))\n"),
    # A quote of whole lines takes their newline: no blank line is left, none is added.
    ("line_trimmed", "a\n  x\nb\n", "x \n", "", "a\nb\n"),
    ("line_trimmed", "a\n  x\nb\n", "x \n", "y\n", "a\n  y\nb\n"),
    ("line_trimmed", "a\n  x  ", "    x\n", "    y\n", "a\n  y\n"),
    ("escapes", "  a\n  b\nc\n", "  a\\n  b", "  d\\n\\te", "  d\n\te\nc\n"),
    (
        "unicode",
        "say(\u201chello\u201d) \u2013 now\n",
        'say("hello") - now',
        'say("bye")',
        'say("bye")\n',
    ),
    (
        "block_anchor",
        "def f(a):\n    total = compute(a, 1)\n    log(total)\n    return total\n",
        "def f(a):\n    total = compute(a,1)\n    log( total )\n    return total",
        "def f(a):\n    return 0",
        "def f(a):\n    return 0\n",
    ),
    (
        "context_aware",
        "first\nvalue_one = get_the_value(source, 1)\nvalue_two = other\nlast\n",
        "value_one = get_the_value(source, 2)\nvalue_two = other",
        "value = 0",
        "first\nvalue = 0\nlast\n",
    ),
]


@pytest.mark.parametrize(("strategy", "content", "old", "new", "after"), CASES)
def test_each_strategy(strategy: str, content: str, old: str, new: str, after: str) -> None:
    assert patched(content, old, new) == (after, strategy)


def test_all_strategies_are_shown_here() -> None:
    assert {name for name, _ in STRATEGIES} == {case[0] for case in CASES}


@pytest.mark.parametrize(
    ("content", "old"),
    [
        ("a = 1\n", "b = 2"),
        ("a = 1\n", "a = 1\nb = 2\nc = 3"),
        ("", "a"),
        ("\n\n\n", "   \n  "),
        ("def f():\n    return 1\n", "def g():\n    return 2\n"),
        ("start\nalpha beta gamma\nend\n", "start\nsomething quite different\nend"),
        # Two blocks alike: neither is taken on likeness alone.
        (
            "x_value = compute(1)\nsame line here\n--\nx_value = compute(3)\nsame line here\n",
            "x_value = compute(2)\nsame line here",
        ),
    ],
)
def test_what_is_not_there_is_not_found(content: str, old: str) -> None:
    assert find(content, old) is None


def test_several_places_are_all_found() -> None:
    found = find("  a\nb\n a\n", "a")
    assert found is not None
    assert len(found.spans) == 2
    assert replace("  a\nb\n a\n", found, "a", "c") == "  c\nb\n c\n"


def test_large_files_take_no_long_time() -> None:
    content = "\n".join(f"    line {n % 97} = call({n % 13})" for n in range(20_000))
    start = time.process_time()
    assert find(content, "nothing like it\nat all\nin here") is None
    assert find(content, "    line 5 = call(99)\n    wholly new text of this block\n") is None
    assert time.process_time() - start < 5
