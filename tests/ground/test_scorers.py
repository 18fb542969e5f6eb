"""Scorers of task rows: right answers score 1, forged ones 0, and none can hang or crash a run."""

import asyncio
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from hermes_rl.errors import TaskFault, VerifierFault
from hermes_rl.scorers import CHILD, OPTIONS, READERS, ScorerPool, extract_code, parse_scores
from hermes_rl.tasks import parse_row
from hermes_rl.testing import answer_cheats

CHOICES = ["London", "Paris", "Rome", "Oslo"]
SCORES: dict[str, dict[str, Any]] = {
    "exact": {"type": "exact", "target": ["Paris", "paris"]},
    "includes": {"type": "includes", "target": "Paris", "excludes": CHOICES[:1]},
    "regex": {"type": "regex", "pattern": r"ANSWER: (\w+)", "target": "Paris"},
    "choice": {"type": "choice", "target": "B", "choices": CHOICES},
    "number": {"type": "number", "target": "1,234.5", "tolerance": 0.01},
    "json": {"type": "json", "fields": {"city.name": "Paris", "n.0": 2}},
    "math": {"type": "math", "target": r"\frac{1}{2}"},
}
RIGHT = [
    ("exact", " Paris\n"),
    ("includes", "It is paris."),
    ("regex", "I think so. ANSWER: Paris"),
    ("choice", "B"),
    ("choice", "A is wrong.\nThe answer is **(B)** because A is wrong."),
    ("choice", r"So \boxed{\text{B}}."),
    ("choice", "Answer: Paris"),
    ("number", "6 * 7 gives #### 1234.5"),
    ("number", "The answer is x = $1,234.50."),
    ("number", r"\boxed{\frac{2469}{2}}"),
    ("number", "1 and 2 make 1234.505"),
    ("number", r"\boxed{1234\frac{1}{2}}"),
    ("number", r"\boxed{1.2345 \times 10^{3}}"),
    ("number", r"Answer: 1234.5^\circ, which is 6 * 7"),
    ("number", "Answer: 1234.5, 2 more than 1232.5"),
    ("number", "Answer: 1234.5; since 1000 + 234.5 = 1234.5"),
    ("number", "Answer: 1234.5 dollars and 3 cents"),
    ("number", "Final Answer: The final answer is **1 234.5**."),
    ("number", "**Answer:**\n\n1234.5\n\nNote that 3 is prime."),
    ("number", r"\boxed{1{,}234.5}"),
    ("number", "The answer is:\n\n\\[ 1234.5 \\]\n\nIt has 5 digits."),
    ("number", "Answer:\n$$\nx = 1234.5\n$$\nwith x > 7"),
    ("number", "The answer is:\n\nSince 1000 + 234.5 is that, 1234.5"),
    ("choice", "The correct answer is:\n\n**B) Paris**\n\nLondon is not in France."),
    ("choice", "The answer is:\n\\[ \\text{B} \\]"),
    ("choice", "Answer:\n\n**B**\n\nA is wrong."),
    ("json", '{"city": {"name": "Paris"}, "n": [2]}'),
    ("json", 'Hm:\n```python\n1\n```\n```JSON\r\n{"city": {"name": "Paris"}, "n": [2]}\r\n```\r\n'),
    ("json", '```\n{"city": {"name": "Paris"}, "n": [2], "x": "```"}\n```'),
    ("json", 'Here:\n```json\n{"city": {"name": "Paris"}, "n": [2.0]}\n```'),
    ("math", r"so \boxed{0.5}"),
    ("math", r"\boxed{\frac{2}{4}} and again \boxed{1/2}"),
    ("math", "Final Answer: The final answer is $0.5$. I hope it is correct."),
]
WRONG = [
    ("exact", "Paris is it"),
    ("includes", "London or Paris"),
    ("includes", "Parisian"),
    ("regex", "ANSWER: Rome ANSWER: Paris"),
    ("choice", "Answer: A\nAnswer: B"),
    ("choice", "Answer: B or C"),
    ("choice", "A) London B) Paris C) Rome D) Oslo"),
    ("choice", "Answer:\nA) London\nB) Paris"),
    ("choice", "It could be B. It could be C."),
    ("number", r"\boxed{1234.5} \boxed{7}"),
    ("number", "answer: 1\nanswer: 1234.5"),
    ("number", "1234.5 1235.5"),
    ("number", r"\boxed{-\frac{2469}{2}}"),
    ("number", r"\boxed{- 1234.5}"),
    ("number", r"\boxed{1234.5\pi}"),
    ("number", r"\boxed{\sqrt{1234.5}}"),
    ("number", r"\boxed{1234.5 + 1}"),
    ("number", "Answer: 12,34.5"),
    ("number", "Answer: 1234.5 or 1235.5"),
    ("number", "Answer: either 1234.5 or 7"),
    ("number", r"\boxed{1234.5, 1235.5}"),
    ("number", "Answer: 1234.5; 1235.5"),
    ("number", "The answer is 1234.5 and 7."),
    ("number", r"\boxed{\pm 1234.5}"),
    ("number", "NaN inf 1e9999999"),
    ("number", "Answer: 1234.5. Answer: 1235.5"),
    ("number", "#### 1234.5 #### 1235.5"),
    ("number", "Answer: 1234.5 (or 1235.5)"),
    ("number", "Answer: 1234.5\u20131235.5"),
    ("number", "Answer: 1234.5 through 1235.5"),
    ("number", "Answer: x = 7 or x = 1234.5"),
    ("number", "Answer: 1234.5k"),
    ("number", "Answer: 1234.5\u00b2"),
    ("number", "The answer is not 1234.5"),
    ("choice", "Answer: B. Answer: A"),
    ("json", '{"city": {"name": "Rome", "name": "Paris"}, "n": [2]}'),
    ("json", '{"city": {"name": "Paris"}, "n": [true]}'),
    ("json", '```\n{"city": {"name": "Paris"}, "n": [2]}\n```\n```\n{}\n```'),
    ("json", "[" * 100_000),
    (
        "json",
        '```\n{"city": {"name": "Paris"}, "n": [2]}\n```\n```\n{"n": [2]}\n```',
    ),
    ("math", r"\boxed{0.5} or \boxed{0.6}"),
    ("math", r"\boxed{\{0.5, 1, 2\}}"),
    ("math", "0.4, 0.5, 0.6"),
    ("math", r"\boxed{9^{9^{9^{9}}}}"),
    ("math", ""),
]


@pytest.fixture
async def process() -> AsyncIterator[ScorerPool]:
    made = ScorerPool(cpu_s=1.0)
    yield made
    await made.aclose()


async def test_a_slow_answer_delays_no_other() -> None:
    endless = ScorerPool(cpu_s=1e6)
    slow = asyncio.create_task(endless.score("regex", {"pattern": "(a+)+$"}, "a" * 60 + "b"))
    await asyncio.sleep(0)  # it begins first
    async with asyncio.timeout(60):  # without end otherwise
        for _ in range(3):
            assert (await endless.score("regex", {"pattern": "b"}, "b")).value == 1.0
    assert not slow.done()
    slow.cancel()
    await endless.aclose()
    with pytest.raises(asyncio.CancelledError):
        await slow


async def score(process: ScorerPool, form: dict[str, Any], answer: str) -> float:
    (scorer,) = parse_scores(form)
    if scorer.type in READERS:
        return READERS[scorer.type](scorer.options, answer).value
    return (await process.score(scorer.type, scorer.options, answer)).value


async def test_right_answers(process: ScorerPool) -> None:
    wrong = [case for case in RIGHT if await score(process, SCORES[case[0]], case[1]) != 1.0]
    assert wrong == []


async def test_wrong_and_forged_answers_score_zero(process: ScorerPool) -> None:
    forged = [
        (kind, answer)
        for kind, form in SCORES.items()
        for answer in answer_cheats({"prompt": "London or Paris?", "score": form}).values()
    ]
    cases = [*WRONG, *forged]
    assert [c for c in cases if await score(process, SCORES[c[0]], c[1]) == 1.0] == []


async def test_json_has_no_number_beyond_all_floats(process: ScorerPool) -> None:
    form = {"type": "json", "schema": {"type": "number", "minimum": 0}}
    assert await score(process, form, "1e308") == 1.0
    assert await score(process, form, "1e999") == 0.0
    same = {"type": "json", "target": {"a": 1}}
    assert await score(process, same, '```\n{"a": 1}\n```\n```\n{"a": true}\n```') == 0.0


def test_a_number_is_not_included_in_a_longer_one() -> None:
    form = {"target": "42"}
    found = [READERS["includes"](form, f"It is {a}").value for a in ("42.", "4.42", "42.5", "142")]
    assert found == [1.0, 0.0, 0.0, 0.0]


async def test_catastrophic_patterns_are_ended(process: ScorerPool) -> None:
    slow = {"pattern": "(a+)+$"}
    found = await process.score("regex", slow, "a" * 60 + "b")
    assert found.value == 0.0
    assert "CPU time" in found.reason
    schema = {"schema": {"properties": {"x": slow}}}
    assert (await process.score("json", schema, f'{{"x": "{"a" * 60}b"}}')).value == 0.0
    assert (await process.score("regex", {"pattern": "b"}, "b")).value == 1.0, "it starts again"


FUNCTIONS = """
import asyncio, os
def length(answer, row):
    print("noise on standard output")
    return len(answer) / row["longest"], f"{len(row['messages'])} messages"
async def later(answer, row):
    await asyncio.sleep(0)
    return answer == row["metadata"]["want"]
def broken(answer, row):
    return 1 / 0
def nan(answer, row):
    return float("nan")
def dies(answer, row):
    os._exit(3)
"""


async def test_functions_of_users(process: ScorerPool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    row = {"messages": [{}], "metadata": {"want": "x"}}

    async def call(name: str, **options: Any) -> Any:
        options_of = {"function": f"{tmp_path}/mine.py:{name}", "options": options}
        return await process.score("python", options_of, "x", row)

    assert (await call("length", longest=2))[:2] == (0.5, "1 messages")
    assert (await call("later")).value == 1.0
    assert (await call("dies")).value == 0.0
    for name, why in [("broken", "ZeroDivisionError"), ("nan", "not finite"), ("none", "none")]:
        with pytest.raises(VerifierFault, match=why):
            await call(name)


@hypothesis.given(st.sampled_from(sorted(READERS)), st.text(max_size=300))
def test_readers_take_any_text(kind: str, answer: str) -> None:
    (scorer,) = parse_scores(SCORES[kind])
    assert READERS[kind](scorer.options, answer).value in (0.0, 1.0)


def test_a_solution_as_target_is_shown_by_its_result() -> None:
    (scorer,) = parse_scores({"type": "math", "target": r"It is $x=3$, so \boxed{\frac{7}{2}}."})
    assert list(scorer.compared()) == [r'target: "\\frac{7}{2}"']


def test_the_scorers_are_those_of_the_design() -> None:
    assert set(OPTIONS) == {*READERS, *CHILD, "code", "judge", "python"}


def test_code_is_taken_from_the_answer() -> None:
    two = "```python\ndef f(): return 1\n```\ntext\n```\nprint(f())\n```\n"
    assert extract_code(two, ("f",)) == "def f(): return 1\n"
    assert extract_code(two) == "print(f())\n"
    assert extract_code("def f():\n    return 1", ("f",)) is not None
    assert extract_code("def f(", ("f",)) is None
    assert extract_code("Just words") is None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert extract_code("def f(): return 1if 1else 0", ("f",)) is not None
    assert found == [], "they fill the terminal of the run"
    assert extract_code("```js\nf()\n```") is None


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("exact", "'score' must be an object with 'type', or a list of such objects"),
        ([], "'score' must be an object with 'type', or a list of such objects"),
        ({"type": "fuzzy"}, "'score.type' is 'fuzzy' (known: exact, includes, "),
        ({"type": "exact"}, "'score' (exact) has no 'target': text, or a list of texts"),
        ({"type": "exact", "target": 3}, "'score.target' must be text, or a list of texts"),
        ({"type": "exact", "target": "a", "x": 1}, "'score' (exact) has the unknown key 'x'"),
        ({"type": "regex", "pattern": "("}, "'score.pattern' must be a regular expression"),
        ({"type": "regex", "pattern": ""}, "'score.pattern' must be a regular expression"),
        ({"type": "number", "target": "many"}, "'score.target' must be a number"),
        ({"type": "json"}, "'score' (json) needs 'schema', 'fields' or 'target'"),
        ({"type": "json", "schema": {"type": 3}}, "'score.schema' must be a JSON schema"),
        ({"type": "choice", "target": "Z", "choices": ["a", "b"]}, "'score.target' is neither"),
        ({"type": "code", "tests": "assert ("}, "'score.tests' must be Python source"),
        ([{"type": "exact", "target": "a", "weight": 0}], "'score.0.weight' must be above 0"),
        (
            [{"type": "exact", "target": "a"}, {"type": "exact", "target": "b", "name": "exact"}],
            "'score.1.name': 'exact' is the name of another scorer",
        ),
        ({"type": "exact", "target": "a", "name": "verify"}, "'score.name' is that of the verif"),
    ],
)
def test_a_bad_score_is_a_bad_row(value: Any, error: str) -> None:
    row = parse_row({"prompt": "x", "score": value}, 0, "row")
    assert row.error is not None
    assert row.error.startswith(error)


def test_a_number_called_score_is_metadata() -> None:
    task = parse_row({"prompt": "x", "score": 0.5}, 0, "row").task
    assert task is not None
    assert (task.score, task.metadata) == ((), {"score": 0.5})


def test_absent_keys_of_parquet_and_equal_types() -> None:
    twice = [{"type": "exact", "target": "a", "pattern": None}, {"type": "exact", "target": "b"}]
    task = parse_row({"prompt": "x", "score": twice}, 0, "row").task
    assert task is not None
    assert [scorer.name for scorer in task.score] == ["exact", "exact-2"]


def test_answers_of_white_space_and_fences_take_linear_time() -> None:
    # Each took minutes or hours in the process of the run, which did nothing else meanwhile.
    size = 190_000
    blank = " " * size
    hidden = [f"\\boxed{{{head}{blank}9}}" for head in ("", "option", "1^", "1^{")]
    for kind in ("number", "choice"):
        (scorer,) = parse_scores(SCORES[kind])
        for answer in (
            f"answer is{blank}\n",
            "answer is " * 19_000,
            "answer:" * 27_000,
            *hidden[1:],
            f"answer{'*' * size}",
            blank,
        ):
            assert READERS[kind](scorer.options, answer).value == 0.0
    assert extract_code("```a\n" * 100_000) is None


def test_long_and_many_numbers_take_little_time() -> None:
    long = "1" * 190_000
    listed = "\n".join(f"#### {n}e9999" for n in range(1, 9_000))
    started = time.process_time()
    for answer in (
        long,
        f"\\boxed{{{long}}}",
        f"\\frac{{{long[:90_000]}}}{{{'7' * 90_000}}}",
        listed,
    ):
        assert READERS["number"]({"target": 42}, answer).value == 0.0
    assert time.process_time() - started < 3.0, "it took more than ten seconds of the whole run"


def test_a_tolerance_is_the_decimal_number_that_was_written() -> None:
    (scorer,) = parse_scores({"type": "number", "target": 1, "tolerance": 0.3})
    assert READERS["number"](scorer.options, "1.3").value == 1.0


@pytest.mark.parametrize(
    "form",
    [
        {"type": "number", "target": 10**400},
        {"type": "number", "target": 1, "weight": 10**400},
        {"type": ["number"], "target": 1},
        {"type": "judge", "rubric": "Good?", "scores": {"yes": 1, "Yes": 0}},
        {"type": "judge", "rubric": "Good?", "scores": {"no_commitment": 1, "no": 0}},
        {"type": "choice", "target": "29", "choices": [str(n) for n in range(30)]},
    ],
)
def test_odd_scorers_are_refused_in_one_line(form: dict[str, Any]) -> None:
    with pytest.raises(TaskFault, match=r"must be|score\.type"):
        parse_scores(form)


@pytest.mark.parametrize(
    ("target", "answer", "expected"),
    [
        ("5000000", "Answer: 5 million", 1.0),
        ("5", "Answer: 5 million", 0.0),
        ("1.5 billion", "It cost $1,500,000,000", 1.0),
        ("1500", "Answer: 1.5 thousand dollars", 1.0),
        ("0.75", "Answer: 3/4 million", 0.0),
        ("750000", "Answer: 3/4 million", 1.0),
        ("2500000", "Answer: 2 1/2 million", 1.0),
        ("2.5", "Answer: 2 1/2 million", 0.0),
        ("7 1/3 thousand", "It is 22000/3 in all.", 1.0),
        ("5", "Answer: 5 millionaires", 1.0),
    ],
)
def test_words_of_scale_are_part_of_a_number(target: str, answer: str, expected: float) -> None:
    assert READERS["number"]({"target": target}, answer).value == expected


async def test_a_false_equation_is_no_answer(process: ScorerPool) -> None:
    form = {"type": "math", "target": "2"}
    assert await score(process, form, r"\boxed{1=2}") == 0
    assert await score(process, form, r"\boxed{1+1=2}") == 1
    assert await score(process, form, r"\boxed{x=2}") == 1
    rounded = {"type": "math", "target": "0.333"}
    assert await score(process, rounded, r"\boxed{\frac{1}{3}=0.333}") == 1


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"$ref": "https://example.com/other"}, False),
        ({"$ref": "#/$defs/absent"}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#b"}}}}, False),
        ({"$ref": "#/x", "x": {"$ref": "#/y"}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#"}}}}, True),
        ({"$ref": "#b", "$defs": {"a": {"$anchor": "b"}}}, True),
        ({"const": {"$ref": "#/absent"}, "properties": {"$ref": {"type": "string"}}}, True),
    ],
)
def test_a_schema_whose_reference_leads_nowhere_is_a_bad_row(
    schema: dict[str, Any], good: bool
) -> None:
    form = {"type": "json", "schema": schema}
    if good:
        assert parse_scores(form)
    else:
        with pytest.raises(TaskFault, match=r"'score.schema' must be .* references lead into it"):
            parse_scores(form)
