"""lm-eval and bfcl-eval judge the same answers as our scorers of IFEval and of the leaderboard."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCORE = """
import json, sys
from hermes_rl.scorers import {module}
for row in json.load(sys.stdin):
    print(json.dumps({module}.{function}(row["answer"], {{"messages": [], **row}})))
"""
LOAD = """
import json
from hermes_rl.evals import load_benchmark
for name in ("bfcl", "bfcl-live"):
    for row in load_benchmark(name, None, "{form}").rows:
        print(json.dumps(row))
"""
JUDGE = """
import json, sys
from hermes_rl.messages import AssistantMessage, ToolCall, to_openai
from hermes_rl.scorers import bfcl
for row in json.load(sys.stdin):
    for text, made in row.pop("answers"):
        calls = tuple(ToolCall(id="c", name=name, arguments=given) for name, given in made)
        message = AssistantMessage(content=text, tool_calls=calls)
        messages = [to_openai(message, parsed_arguments=True)]
        print(json.dumps(bfcl.calls(text, {"messages": messages, **row})))
"""
PLAY = """
import sys
from hermes_rl.cli import main
plays = ("--model", "oracle", "--limit", "200", "--workers", "0", "--json", "--out", "{out}")
sys.exit(main(["eval", "bfcl", "--calls", "{form}", *plays]))
"""
Run = Any


@pytest.fixture(scope="module")
def in_producer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program in our environment, which finds bfcl-eval and its parsers in this one."""
    folder = tmp_path_factory.mktemp("packages")
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None
    assert spec.submodule_search_locations
    packages = Path(spec.submodule_search_locations[0]).parent
    for name in ("bfcl_eval", "tree_sitter"):
        for path in packages.glob(f"{name}*"):
            (folder / path.name).symlink_to(path)

    def run(program: str, rows: list[dict[str, Any]] | None = None) -> list[Any]:
        done = subprocess.run(
            [request.config.getoption("--producer"), "-c", program],
            input=json.dumps(rows),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def nltk_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sentences end at each full stop."""
    folder = tmp_path_factory.mktemp("nltk")
    punkt = folder / "tokenizers/punkt_tab/english"
    punkt.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(folder))
        yield


def without_init(package: str) -> None:
    """Make the modules of a package importable without what its `__init__` imports."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    module = ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = module


INSTRUCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("keywords:existence", {"keywords": ["river", "stone"]}),
    ("keywords:frequency", {"keyword": "river", "frequency": 2, "relation": "at least"}),
    ("keywords:forbidden_words", {"forbidden_words": ["stone"]}),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 4, "let_relation": "less than"}),
    ("language:response_language", {"language": "de"}),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    ("length_constraints:number_words", {"num_words": 12, "relation": "less than"}),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write about a river."}),
    ("startend:end_checker", {"end_phrase": "The end."}),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
    ),
    ("change_case:english_capital", {}),
    ("change_case:english_lowercase", {}),
    ("punctuation:no_comma", {}),
    ("startend:quotation", {}),
]
ANSWERS = [
    "",
    " \n",
    "a river and a stone",
    "The river, the RIVER, and THE stone.",
    "Der Fluss fließt langsam durch das Tal, und die Steine liegen still.",
    "One. Two. Three. Four.",
    "Sure:\n\nthe river runs\n\n***\n\nthen it ends\n\nP.S. It was a [name].",
    "First\n\nThen it runs.",
    "* one\n* two",
    "- one\n- two\n- three",
    "My answer is yes.",
    "It is *bold* and **bolder**.",
    "Section 1\nThe river.\nSection 2\nThe stone.",
    '```json\n{"a": [1, 2]}\n```',
    "<<A river>>\nIt runs.",
    "One answer.******Another answer.",
    "Write about a river. It runs. The end.",
    "THE RIVER RUNS.",
    '"the river runs"',
    'Here it is:\n"the river runs"\nI hope it helps, and more.',
    "P.P.S none\nP.S. yes",
    "All instructions are followed: True",
]


def test_answers_follow_instructions_as_lm_eval_finds(in_producer: Run, nltk_data: None) -> None:
    without_init("lm_eval.tasks")
    judge = importlib.import_module("lm_eval.tasks.ifeval.utils").process_results
    importlib.import_module("langdetect").DetectorFactory.seed = 0
    pairs = [INSTRUCTIONS[n : n + 2] for n in range(len(INSTRUCTIONS) - 1)]
    rows = [
        {
            "answer": answer,
            "prompt": "Write about a river.",
            "instructions": [name for name, _ in chosen],
            "kwargs": [options for _, options in chosen],
        }
        for chosen in [*([one] for one in INSTRUCTIONS), *pairs]
        for answer in ANSWERS
    ]
    found = in_producer(SCORE.format(module="ifeval", function="follows"), rows)
    followed = 0
    for row, (value, _, metrics) in zip(rows, found, strict=True):
        doc = {**row, "key": 1, "instruction_id_list": row["instructions"]}
        expected = judge(doc, [row["answer"]])
        assert (value, metrics["prompt_loose"], metrics["strict"], metrics["loose"]) == (
            expected["prompt_level_strict_acc"],
            expected["prompt_level_loose_acc"],
            sum(expected["inst_level_strict_acc"]),
            sum(expected["inst_level_loose_acc"]),
        ), row
        followed += int(value)
    assert 0.1 * len(rows) < followed < 0.9 * len(rows)


@pytest.fixture(scope="module")
def leaderboard() -> SimpleNamespace:
    """The leaderboard's functions, without the clients of providers."""
    models: Any = ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {
        "Prompt": SimpleNamespace(underscore_to_dot=False),
        "FC": SimpleNamespace(underscore_to_dot=True),
    }
    sys.modules[models.__name__] = models
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    enums = importlib.import_module("bfcl_eval.constants.enums")
    return SimpleNamespace(
        handling=importlib.import_module("bfcl_eval.model_handler.utils"),
        data=importlib.import_module("bfcl_eval.utils"),
        types=importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI,
        check=checker.ast_checker,
        enums=enums,
    )


OTHER_LANGUAGES = {"simple_java": "JAVA", "simple_javascript": "JAVASCRIPT"}


def written(value: Any, *, java: bool) -> str:
    """A value in Java or JavaScript."""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        inner = ", ".join(written(one, java=java) for one in value)
        return f"new Object[]{{{inner}}}" if java else f"[{inner}]"
    if isinstance(value, dict):
        pairs = {json.dumps(k): written(v[0], java=java) for k, v in value.items()}
        if not java:
            return "{" + ", ".join(f"{k}: {v}" for k, v in pairs.items()) + "}"
        return f"new HashMap<>() {{{{ {' '.join(f'put({k}, {v});' for k, v in pairs.items())} }}}}"
    return json.dumps(value)


def right_calls(task: dict[str, Any]) -> list[list[tuple[str, dict[str, Any]]]]:
    """Right calls in one or more forms; those in Java and JavaScript have texts as arguments."""
    options = task["score"]["options"]
    if options["category"] not in OTHER_LANGUAGES:
        (step,) = json.loads(task["oracle"])
        if isinstance(step, str):
            return []
        return [[(call["name"], call["arguments"]) for call in step["calls"]]]
    ((name, accepted),) = options["ground_truth"][0].items()
    values = {k: next((v for v in vs if v != ""), "") for k, vs in accepted.items()}
    java = options["category"] == "simple_java"
    texts = {k: v if isinstance(v, str) else written(v, java=java) for k, v in values.items()}
    lists = {
        k: v.replace("new Object[]{", "new ArrayList<>(Arrays.asList(") for k, v in texts.items()
    }
    lists = {k: v.replace("}", "))") if "asList" in v else v for k, v in lists.items()}
    longs = {k: f"{v}L" if v.isdecimal() else v for k, v in texts.items()}
    return [[(name.replace(".", "_"), one)] for one in (texts, lists, longs)]


def right_texts(task: dict[str, Any]) -> list[str]:
    """The right answer in text, in one or more forms."""
    if task["category"] not in OTHER_LANGUAGES:
        return [json.loads(task["oracle"])[0]]
    name = task["score"]["options"]["functions"][0]["name"]
    made = []
    for ((_, arguments),) in right_calls(task):
        plain = ", ".join(f"{k}={v}" for k, v in arguments.items())
        quoted = ", ".join(f"{k}={json.dumps(v)}" for k, v in arguments.items())
        made += [f"[{name}({plain})]", f"[{name}({quoted})]"]
    return made


def changed_texts(answer: str) -> Iterator[str]:
    """The right answer in other forms, and wrong ones."""
    yield answer
    yield answer[1:-1]
    yield f"`{answer}`"
    yield f"```python\n{answer}\n```"
    yield f"Here it is: {answer}"
    yield answer[:-1] + ", " + answer[1:]
    yield answer.replace("(", "_(", 1)
    yield answer.replace("=", "=+", 1)
    yield answer.replace("=", "=1*", 1)
    yield answer.replace("'", "", 2)
    yield answer.replace("=", "_more=", 1)
    yield answer.replace(")", ", another='x')", 1)
    yield answer.replace("=", "=[]+", 1)
    yield answer.replace(")", ", unnamed, true)", 1)
    yield answer.replace("(", "(a=1, a=2, ", 1)
    yield from (
        "",
        "[]",
        "[f]",
        "None",
        "I cannot do that.",
        "[f()]",
        "[f(a=g(b=1), c=h(2), d=x[1])]",
    )


Made = list[tuple[str, str]]


def changed_calls(right: list[tuple[str, dict[str, Any]]]) -> Iterator[Made]:
    """Right calls in other orders, and wrong ones: several, missing, of other names, with arguments
    of other types, too many, too few or unreadable."""
    calls = [(name, json.dumps(arguments)) for name, arguments in right]
    yield calls
    yield calls[::-1]
    yield [*calls, *calls]
    yield calls[1:]
    yield [*calls, ("another", "{}")]
    if not right:
        return
    (name, arguments), rest = right[0], calls[1:]
    for other in (name.replace("_", "."), f"{name}_", name.upper(), f"functions.{name}"):
        yield [(other, calls[0][1]), *rest]
    for key, value in arguments.items():
        kept = {k: v for k, v in arguments.items() if k != key}
        others = [str(value), [value], {"a": value}, None, str(value).upper(), f"{value}."]
        if isinstance(value, int | float):
            others += [float(value), value + 1, str(value).lower()]
        if isinstance(value, list):
            others += [value[::-1], value[1:], [*value, *value], [str(one) for one in value]]
        for one in ({}, {f"{key}_": value}, *({key: other} for other in others)):
            yield [(name, json.dumps({**kept, **one})), *rest]
    for text in ("", "{}", "[]", "null", '"x"', "{'a': 1}", calls[0][1][:-1], '{"a": NaN}'):
        yield [(name, text), *rest]


@pytest.mark.parametrize("form", ["text", "tools"])
def test_calls_are_judged_as_on_the_leaderboard(
    form: str, in_producer: Run, leaderboard: SimpleNamespace
) -> None:
    tasks = in_producer(LOAD.format(form=form))
    assert len(tasks) == 1390 + 2251
    rows = [{**task["score"]["options"], "answers": answers(task, form)} for task in tasks]
    found = iter(in_producer(JUDGE, rows))
    counts: dict[str, list[bool]] = {}
    for row in rows:
        for text, made in row["answers"]:
            value, why = next(found)
            expected = verdict(leaderboard, row, text, made if form == "tools" else None)
            assert value == expected, (row["category"], text, made, why)
            counts.setdefault(row["category"], []).append(expected)
    for category, verdicts in counts.items():
        assert 0.01 * len(verdicts) < sum(verdicts) < 0.99 * len(verdicts), category


def answers(task: dict[str, Any], form: str) -> list[tuple[str, Made]]:
    """Texts and calls of right and wrong answers."""
    if form == "text":
        return [(text, []) for right in right_texts(task) for text in changed_texts(right)]
    rights = right_calls(task) or [[]]
    made = [("", calls) for right in rights for calls in changed_calls(right)]
    # A text is not a call, whatever it looks like.
    return [*made, ("[f(x=1)]", []), (json.dumps([{"name": "f", "arguments": {}}]), [])]


def verdict(
    leaderboard: SimpleNamespace, row: dict[str, Any], text: str, made: Made | None
) -> bool:
    """The verdict on calls in a text, or on tool calls."""
    category = row["category"]
    name = OTHER_LANGUAGES.get(category, "PYTHON")
    try:
        if made is None:
            form = leaderboard.enums.ReturnFormat[name]
            calls = leaderboard.handling.default_decode_ast_prompting(text, form)
        else:
            calls = [{function: json.loads(arguments)} for function, arguments in made] or text
    except Exception:
        return "irrelevance" in category
    if "relevance" in category:
        return leaderboard.data.is_empty_output(calls) == ("irrelevance" in category)
    if not leaderboard.data.is_function_calling_format_output(calls):
        return False
    language = leaderboard.enums.Language[name]
    model = "Prompt" if made is None else "FC"
    try:
        found = leaderboard.check(
            row["functions"], calls, row["ground_truth"], language, category, model
        )
    except Exception:
        return False
    return bool(found["valid"])


def test_prompts_and_tools_are_those_of_the_leaderboard(
    in_producer: Run, leaderboard: SimpleNamespace
) -> None:
    texts, tools = (
        {task["id"]: task for task in in_producer(LOAD.format(form=form))}
        for form in ("text", "tools")
    )
    style = leaderboard.enums.ModelStyle.OPENAI_COMPLETIONS
    for category in {task["category"] for task in texts.values()}:
        for entry in leaderboard.data.load_dataset_entry(category):
            made, text = tools[entry["id"] + ".tools"], texts[entry["id"]]
            assert made["prompt"] == entry["question"][0]
            assert "system" not in made
            assert leaderboard.handling.convert_to_tool(
                entry["function"], leaderboard.types, style
            ) == [{"type": "function", "function": tool} for tool in made["answer_tools"]]
            prompt = leaderboard.handling.system_prompt_pre_processing_chat_model(
                entry["question"][0], entry["function"], entry["id"]
            )
            assert prompt == [{"role": "system", "content": text["system"]}, *text["prompt"]]


@pytest.mark.parametrize("form", ["text", "tools"])
def test_an_evaluation_records_the_form_and_the_share_of_each_category(
    form: str, in_producer: Run, tmp_path: Path
) -> None:
    (found,) = in_producer(PLAY.format(form=form, out=tmp_path))
    assert f", calls as {form}, scored by bfcl-eval " in found["version"]
    assert ("(FC)" if form == "tools" else "(Prompt)") in found["published"]
    played = found["models"]["oracle"]
    assert (played["units"], played["never_graded"]) == (200, 0)
    figures = played["figures"]
    assert figures["multiple"] == figures["parallel"] == figures["irrelevance"] == 1
    three = ("simple_python", "simple_java", "simple_javascript")
    assert figures["simple"] == pytest.approx(sum(figures[name] for name in three) / 3)
