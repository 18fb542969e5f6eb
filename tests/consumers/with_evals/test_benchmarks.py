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
    for row in load_benchmark(name).rows:
        print(json.dumps(row))
"""
Run = Any


@pytest.fixture(scope="module")
def in_producer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program in our environment, which finds bfcl-eval in this one and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None
    assert spec.submodule_search_locations
    packages = Path(spec.submodule_search_locations[0]).parent
    for path in packages.glob("bfcl_eval*"):
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
    """The leaderboard's functions, without the clients of providers and the parsers of Java."""
    stubs: dict[str, dict[str, Any]] = {
        "constants.model_config": {
            "MODEL_CONFIG_MAPPING": {"m": SimpleNamespace(underscore_to_dot=False)}
        },
        "model_handler.parser.java_parser": {"parse_java_function_call": None},
        "model_handler.parser.js_parser": {"parse_javascript_function_call": None},
    }
    for name, content in stubs.items():
        module = ModuleType(f"bfcl_eval.{name}")
        vars(module).update(content)
        sys.modules[module.__name__] = module
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return SimpleNamespace(
        handling=importlib.import_module("bfcl_eval.model_handler.utils"),
        data=importlib.import_module("bfcl_eval.utils"),
        check=checker.ast_checker,
        python=importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON,
    )


def changed(answer: str) -> Iterator[str]:
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
    yield from (
        "",
        "[]",
        "[f]",
        "None",
        "I cannot do that.",
        "[f()]",
        "[f(a=g(b=1), c=h(2), d=x[1])]",
    )


def test_calls_are_judged_as_on_the_leaderboard(
    in_producer: Run, leaderboard: SimpleNamespace
) -> None:
    tasks = in_producer(LOAD)
    assert len(tasks) == 1240 + 2251
    rows = [
        {**task["score"]["options"], "answer": answer}
        for task in tasks[::3]
        for answer in changed(json.loads(task["oracle"])[0])
    ]
    found = in_producer(SCORE.format(module="bfcl", function="calls"), rows)
    right = 0
    for row, (value, why) in zip(rows, found, strict=True):
        assert value == verdict(leaderboard, row), (row, why)
        right += int(value)
    assert 0.1 * len(rows) < right < 0.9 * len(rows)


def verdict(leaderboard: SimpleNamespace, row: dict[str, Any]) -> bool:
    category = row["category"]
    try:
        calls = leaderboard.handling.default_decode_ast_prompting(row["answer"])
    except Exception:
        return "irrelevance" in category
    if "relevance" in category:
        return leaderboard.data.is_empty_output(calls) == ("irrelevance" in category)
    if not leaderboard.data.is_function_calling_format_output(calls):
        return False
    try:
        found = leaderboard.check(
            row["functions"], calls, row["ground_truth"], leaderboard.python, category, "m"
        )
    except Exception:
        return False
    return bool(found["valid"])


def test_prompts_are_those_of_the_leaderboard(
    in_producer: Run, leaderboard: SimpleNamespace
) -> None:
    tasks = {task["id"]: task for task in in_producer(LOAD)}
    for category in ("simple_python", "parallel_multiple", "live_multiple", "live_relevance"):
        for entry in leaderboard.data.load_dataset_entry(category):
            prompt = leaderboard.handling.system_prompt_pre_processing_chat_model(
                entry["question"][0], entry["function"], entry["id"]
            )
            task = tasks[entry["id"]]
            assert prompt == [{"role": "system", "content": task["system"]}, *task["prompt"]]
