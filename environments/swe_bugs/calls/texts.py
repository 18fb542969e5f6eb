"""Calls of the modules about texts, tables, records and versions."""

from __future__ import annotations

from environments.swe_bugs.calls.given import given as _

CREW = [
    {"name": "Ann", "age": 31, "port": "Bergen"},
    {"name": "Bo", "age": 25, "port": "Oslo"},
    {"name": "Cy", "age": 40, "port": "Bergen"},
    {"name": "Di", "age": 25},
    {"name": "Ed", "port": "Tromso", "pay": 7},
]
PORTS = [{"port": "Bergen", "quay": 3}, {"port": "Oslo", "quay": 9}, {"port": "Oslo", "name": "X"}]
PROSE = "the quick brown fox jumps over the extraordinarily lazy dog"
CELLS = [["id", "name", "n"], ["1", "anchor", "12"], ["2", "rope"], ["3", "oar", "7", "x"]]

_LAYOUT = {
    "wrap": [_(PROSE, 20), _("a b c", 3), _("", 5), _(PROSE, 10), _(PROSE, 20, 4), _("ab cd", 5)]
    + [_("ab cd", 4), _(PROSE, width=15, indent=2), _("abc", 1), _("  a   b ", 9), _(PROSE)]
    + [_("aa bb cc dd", 7, 2), _("x" * 40 + " y " + "z " * 30, 30)],
    "align": [_("ab", 5), _("ab", 5, "right"), _("ab", 5, "centre"), _("abc", 6, "centre")]
    + [_("abcdef", 3), _("ab", 6, "left", "."), _("ab", 6, "right", "."), _("a", 4, "middle")]
    + [_("", 2, "centre", "-"), _("ab", 2), _("abc", 2, "right"), _("a", 4, fill="*")],
    "shorten": [_("hello world", 8), _("hello", 5), _("hello", 4), _("hello", 3), _("hello", 2)]
    + [_("hello", 0), _("hello world", 9), _("hello world", 9, "~"), _("ab", 3), _("a b c d", 6)]
    + [_("hello world again", 9, ".."), _("abcdef", 1, "~"), _("abcdef", 5)],
    "table": [_([["a", "bb"], ["ccc", "d"]]), _([["x"]]), _([]), _([["a"], ["b", "c", "d"]])]
    + [_([["a", "b"], ["c", "d"]], 1), _([["", "b"], ["c", ""]]), _([["a", "b"]], gap=0)]
    + [_([["long one", "z"], ["s", "zz"]]), _([[], ["q", "r"]]), _([["1", "22", "333"], ["4444"]])],
    "dedent": [_(["  a", "    b"]), _(["a", " b"]), _([]), _(["", "  a", " "]), _(["    a", "  "])]
    + [_(["   x", "", "  y"]), _([" a ", "  b "]), _(["  ", " "])],
}
_LINES = {
    "split": [
        _("a,b,c"),
        _('a,"b,c"'),
        _(""),
        _(" a , b "),
        _('"a""b"'),
        _('" a "'),
        _('"a'),
        _("a;b", ";"),
    ]
    + [
        _('a,"",c'),
        _("a,,c"),
        _('"x" y,z'),
        _('ab"c,d'),
        _(","),
        _("'a,b',c", ",", "'"),
        _('  "q" ,r'),
    ]
    + [_('"a",b'), _('"a"""'), _("a\tb", "\t"), _('"","'), _(' "a,b"')],
    "join": [
        _(["a", "b"]),
        _(["a,b", "c"]),
        _([""]),
        _([" a"]),
        _(['say "x"']),
        _([]),
        _(["a", ""], ";"),
    ]
    + [_(["a;b", "c,d"], ";"), _(["it's"], ",", "'"), _(["b "]), _(["a b", "c"])],
    "typed": [
        _("12"),
        _("1.5"),
        _("TRUE"),
        _("false"),
        _(""),
        _("007"),
        _("0"),
        _("0.5"),
        _("-3"),
        _("+4"),
    ]
    + [
        _("-0.25"),
        _("1."),
        _(".5"),
        _("a1"),
        _("1e3"),
        _("-"),
        _("00"),
        _("1.2.3"),
        _("-07"),
        _("12a"),
    ],
    "columns": [
        _(CELLS),
        _([["a"], ["1"]]),
        _([]),
        _(CELLS, False),
        _([["a", "b"]]),
        _([["x", "y"], ["1"]]),
    ]
    + [
        _([["1"], ["2", "3"]], names=False),
        _([[], ["1"]]),
        _([["a", "b"], ["1", "2", "3"], ["4"]]),
    ],
    "summary": [
        _(["1", "2", "x"]),
        _(["1.5", "-2"]),
        _([]),
        _(["a", ""]),
        _(["true", "3"]),
        _(["007", "5"]),
    ]
    + [
        _(["10", "20", "60"]),
        _(["0"]),
        _(["-1", "-5"]),
        _(["false", "true"]),
        _(["4", "4", "1.0"]),
    ],
}
_RECORDS = {
    "where": [
        _(CREW, age=25),
        _(CREW, port="Bergen"),
        _(CREW),
        _(CREW, age__min=31),
        _(CREW, age__max=31),
    ]
    + [
        _(CREW, age__min=26, age__max=35),
        _(CREW, port__in=["Oslo", "Tromso"]),
        _(CREW, name__has="N"),
    ]
    + [
        _(CREW, pay=7),
        _(CREW, pay__min=8),
        _(CREW, nope=1),
        _(CREW, age=25, port="Oslo"),
        _([], age=1),
    ]
    + [_(CREW, name__has="d"), _(CREW, port__has="o"), _(CREW, age__in=[40, 41])],
    "ordered": [
        _(CREW, "name"),
        _(CREW, "age", "name"),
        _(CREW, "-age"),
        _(CREW, "port", "-age"),
        _(CREW),
    ]
    + [
        _(CREW, "-name"),
        _(CREW, "pay"),
        _(CREW, "-port", "age"),
        _([], "a"),
        _(CREW, "age", "-name"),
    ],
    "page": [_(["a", "b", "c", "d", "e"], 1, 2), _(["a", "b"], 1), _([], 1), _(["a"], 2, 5)]
    + [
        _(["a", "b", "c", "d", "e"], 3, 2),
        _(["a", "b", "c", "d"], 2, 2),
        _(["a"], 0),
        _(["a"], 1, 0),
    ]
    + [
        _(list(range(25)), 2),
        _(list(range(25)), 3),
        _(list(range(20)), 2),
        _(["a"], -1, 3),
        _([1], 1, 1),
    ]
    + [_([1, 2], 2, size=1), _(list(range(11)), 1)],
    "grouped": [
        _(CREW, "port"),
        _(CREW, "age"),
        _(CREW, "port", "age"),
        _(CREW, "nope"),
        _([], "a"),
    ]
    + [
        _(CREW, "age", of="pay"),
        _(CREW, "port", of="pay"),
        _(PORTS, "port"),
        _(PORTS, "port", "quay"),
    ],
    "joined": [
        _(CREW, PORTS, "port"),
        _(PORTS, CREW, "port"),
        _(CREW, [], "port"),
        _(CREW, [], "age", True),
    ]
    + [_(CREW, PORTS, "port", True), _(CREW, PORTS, "quay", keep=True), _([], PORTS, "port")]
    + [_(CREW, CREW, "age"), _(PORTS, PORTS, "port", keep=True)],
}
_VERSIONS = {
    "parse": [
        _("1.4.0"),
        _("2.0.0-rc.1"),
        _("v1.2"),
        _("7"),
        _("1.2.3.4"),
        _("1.x"),
        _(""),
        _(" 1.0 "),
    ]
    + [_("v"), _("1.2.3-"), _("1-beta"), _("10.20.30"), _("-1")],
    "compare": [_("1.2.0", "1.10.0"), _("2.0.0", "2.0.0-rc.1"), _("1.0", "1.0.0"), _("2", "1.9.9")]
    + [
        _("1.0-a", "1.0-b"),
        _("1.0-rc.2", "1.0-rc.10"),
        _("1.0-rc", "1.0-rc.1"),
        _("1.0-2", "1.0-b"),
    ]
    + [_("1.0-rc.1", "1.0"), _("1.0-b", "1.0-a"), _("1.0-rc.1.1", "1.0-rc.1"), _("1.0-9", "1.0-10")]
    + [_("1.0-10", "1.0-9"), _("0.0.1", "0.0.2"), _("3.1-x", "3.1-x"), _("1.0-a.b", "1.0-a.c")],
    "bump": [
        _("1.4.2"),
        _("1.4.2", "minor"),
        _("1.4.2", "major"),
        _("1.4.2-rc.1"),
        _("0.9", "minor"),
    ]
    + [_("0.0.0"), _("1.4.2", "middle"), _("2.0.0-a", "major"), _("2.1.0-a", part="minor")]
    + [_("9.9.9"), _("v3", "patch"), _("1.2.3-b", "patch")],
    "satisfies": [
        _("1.4.0", ">=1.2,<2"),
        _("2.0.0", ">=1.2,<2"),
        _("1.2", ">=1.2"),
        _("1.1", ">=1.2"),
    ]
    + [_("1.5.0", "!=1.5"), _("1.5.1", "!=1.5"), _("1.4.0", "==1.4"), _("1.4.1", "==1.4")]
    + [_("1.9", "^1.2"), _("1.2", "^1.2"), _("2.0", "^1.2"), _("1.1", "^1.2"), _("0.9", "^1.2")]
    + [_("1.0", "1.0"), _("2.0", "<=2.0"), _("2.0.1", "<=2"), _("2", "<2"), _("3", ">2,!=3")]
    + [
        _("3", ">2"),
        _("2", ">2"),
        _("1.3", "^1.2, !=1.3"),
        _("1.3", "^1.2,<1.3"),
        _("1", ">=1 , <1.1"),
    ],
    "newest": [_(["1.0", "1.2", "1.1"]), _(["2.0-a", "1.0"]), _([]), _(["2.0-a", "1.0"], True)]
    + [_(["1.0-a"]), _(["1.0-a", "1.0-b"], pre=True), _(["1.10", "1.9"]), _(["1.0", "1.0.0"])]
    + [_(["3", "2", "1"]), _(["1.0", "1.0-rc.1"], pre=True)],
}

CALLS = {
    "layout": _LAYOUT,
    "lines": _LINES,
    "records": _RECORDS,
    "versions": _VERSIONS,
}
"""Module -> function -> arguments."""
