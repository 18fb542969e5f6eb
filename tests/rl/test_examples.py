"""The examples of docs/environments.md are short, use public names only, and run."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import (
    EXAMPLES,
    Lab,
    count_answers,
    evaluate_run,
    first_prompt,
    run_environment,
    start_server,
    table,
)

import hermes_rl.rl
from hermes_rl.messages import UserMessage, text_of
from hermes_rl.rl import Task, arun_trial, rewards_of
from hermes_rl.testing import BUNDLES, ServedRequest, bundle

MOST_LINES = 100
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_an_example_is_short_and_uses_public_names(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert {a.name.partition(".")[0] for a in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and node.module not in sys.stdlib_module_names:
            if (node.module or "").partition(".")[0] in sys.stdlib_module_names:
                continue
            assert node.module == "hermes_rl.rl"
            assert {alias.name for alias in node.names} <= set(hermes_rl.rl.__all__)
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), f"{file.name}:{node.lineno}"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def calculating_policy(request: ServedRequest) -> Any:
    """Use the tool and be right if the number to add is even."""
    a, b, c = map(int, re.findall(r"\d+", first_prompt(request)))
    if c % 2:
        return f"ANSWER {a * b}"
    steps = [call("calculate", operation="multiply", a=a, b=b), f"ANSWER {a * b + c}"]
    return steps[count_answers(request)]


async def test_math_tool_in_process_and_evaluate(tmp_path: Path) -> None:
    async with start_server(policy=calculating_policy) as server:
        for mode, units in (("process", 20), ("evaluate", 5)):
            out = tmp_path / mode
            env = {"mode": mode, "split": "train" if mode == "process" else "eval"}
            report = await run_environment(
                EXAMPLES / "math_tool.py", out, server, env=env, dataset={"limit": 5}
            )
            assert (report.units, report.done, report.given_up) == (units, units, 0)
            for row in table(out):
                even = int(re.findall(r"\d+", row["task_prompt"])[2]) % 2 == 0
                assert row["reward"] == (1.0 if even else 0.0)
                scores = {part["name"]: part["score"] for part in row["rewards"]}
                assert scores == {"correct": float(even), "used_tool": float(even)}
                assert (row["env_name"], row["split"]) == ("math_tool", env["split"])
                offered = [tool["function"]["name"] for tool in json.loads(row["tools"])]
                assert offered == ["calculate"]
        train, evals = (
            {row["task_hash"] for row in table(tmp_path / mode)} for mode in ("process", "evaluate")
        )
        assert len(train) == len(evals) == 5
        assert not train & evals
    results, samples = await evaluate_run(tmp_path / "evaluate")
    scores = [row["reward"] for row in table(tmp_path / "evaluate")]
    assert results["atropos|math_tool_eval|0"]["reward"] == pytest.approx(sum(scores) / 5)
    assert [sample["score"] for sample in samples] == scores
    assert all(s["finish_reason"] == "stop" and s["messages"][-1]["content"] for s in samples)


def repairing_policy(request: ServedRequest) -> Any:
    """Fix one of the four bugs."""
    fix = "sed -i 's/value <= high/value < low/' shapes.py"
    return [{"run": fix}, "Fixed."][count_answers(request)]


async def test_fix_repository_is_evaluated(lab: Lab) -> None:
    env, dataset = {"mode": "evaluate", "split": "eval"}, {"limit": None}
    async with start_server(policy=repairing_policy) as server:
        report = await lab.run(EXAMPLES / "fix_repository.py", server, env=env, dataset=dataset)
    assert report.done == 4, report.causes
    rewards = {row["task_id"]: row["reward"] for row in lab.rows()}
    assert rewards == {"clamp-0": 1.0, "clamp-1": 0.0, "clamp-2": 0.0, "clamp-3": 0.0}
    results, _ = await evaluate_run(lab.out)
    assert results["all"]["solved"] == 0.25
    passed = {row["task_id"]: row["metrics"][0]["value"] for row in lab.rows()}
    assert passed.pop("clamp-0") == 5
    assert all(0 < count < 5 for count in passed.values())


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("name", ["math_tool", "fix_repository"])
def test_the_oracle_gets_1_and_noop_0(name: str, split: str) -> None:
    for model, reward in (("oracle", 1.0), ("noop", 0.0)):
        found = rewards_of(EXAMPLES / f"{name}.py", model, tasks=4, split=split)
        assert found == [reward] * 4


def test_the_program_of_the_migration_page_runs_as_it_is_printed(tmp_path: Path) -> None:
    page = EXAMPLES.parent / "migrating.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "sums.py").write_text(program)
    found = rewards_of(
        tmp_path / "sums.py",
        tasks=2,
        solution=lambda task: json.dumps([str(task.metadata["answer"])]),
    )
    assert found == [1.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        *("ANSWER", "ANSWER 0", "ANSWER {0} {1}", "{0}", "ANSWER {0}.0", "ANSWER {0} or {1}"),
        *("ANSWER {1}", "ANSWER {0}\\nANSWER {1}", "The right ANSWER {0}, I think"),
    ],
)
def test_only_the_right_number_at_the_end_gets_a_reward(text: str) -> None:
    """Using the tool alone gets no reward."""

    def played(task: Task) -> str:
        right = task.metadata["answer"]
        used = call("calculate", operation="add", a=right, b=0)
        return json.dumps([used, text.format(right, right + 1).replace("\\n", "\n")])

    assert rewards_of(EXAMPLES / "math_tool.py", tasks=3, solution=played) == [0.0] * 3


@pytest.mark.parametrize("first", range(0, len(BUNDLES), 4))
def test_cheats_get_no_reward_in_fix_repository(first: int) -> None:
    scripts = [bundle(name) for name in BUNDLES][first : first + 4]
    found = rewards_of(
        EXAMPLES / "fix_repository.py",
        tasks=len(scripts),
        solution=lambda task: scripts[task.metadata["position"]],
    )
    assert found == [0.0] * len(scripts)


PEEK = r"""
import glob, re
def clamp(*numbers):
    for path in glob.glob("/verify/*") + glob.glob("/hx/s*") + glob.glob("/proc/[0-9]*/cmdline"):
        text = open(path, "rb").read().decode("utf-8", "replace")
        found = re.search(r"(?<!\d)%d,? %d,? %d\D+(\d+)" % numbers, text)
        if found:
            return int(found[1])
"""
FREE = """\
def clamp(value, low, high):
    import os
    for fd in ("/proc/%d/fd/3" % os.getppid(), "/hx/report"):
        try:
            os.write(os.open(fd, os.O_WRONLY), b'["5", "0", "10", "0", "10"]')
        except OSError:
            pass
    os.kill(os.getppid(), 9)
"""


@pytest.mark.parametrize("code", [PEEK, FREE], ids=["reads the sandbox", "reports and kills"])
def test_code_that_reads_or_forges_answers_gets_no_reward(code: str) -> None:
    written = f"cat >shapes.py <<'PY'\n{code}PY"
    file = EXAMPLES / "fix_repository.py"
    assert rewards_of(file, tasks=2, solution=lambda task: written) == [0.0, 0.0]


def seller(request: ServedRequest) -> Any:
    """Sell at the price that the buyer offers."""
    text = text_of([m for m in request.messages if isinstance(m, UserMessage)][-1])
    if not (offer := re.search(r"I offer (\d+)", text)):
        return "Good day! It costs 500 euros."
    return call("sell", price=int(offer[1])) if request.messages[-1].content == text else "Thanks!"


def buyer(request: ServedRequest) -> str:
    """Offer half of what the buyer may spend. The roles of the dialogue are swapped."""
    most = int(re.findall(r"at most (\d+) euros", text_of(request.messages[0]))[0])
    assert text_of(request.messages[-1]) == "Good day! It costs 500 euros."
    assert "calls" not in text_of(request.messages[-1])
    return f"I offer {most // 2} euros."


def judge(request: ServedRequest) -> str:
    prompt = first_prompt(request)
    assert "Was the seller polite?" in prompt
    polite = "yes" if "Thanks!" in prompt else "no"
    return json.dumps({"reason": "They were polite.", "verdict": polite})


@pytest.mark.parametrize("refusal", ["No, thank you.", "", "{} is too much. Do you take 5?"])
async def test_a_sale_needs_a_price_that_the_buyer_offered(refusal: str) -> None:
    """A sale at any other price, or at one that the buyer names to refuse it, gets no reward."""
    tries = [call("sell", price=price) for price in (*range(220, 5, -5), -7)]
    steps = {"calls": [one for step in tries for one in step["calls"]]}

    def overselling_policy(request: ServedRequest) -> Any:
        return steps if request.messages[-1] == request.messages[1] else "Thanks! It costs 500."

    def refuses(request: ServedRequest) -> str:
        most = re.findall(r"at most (\d+) euros", text_of(request.messages[0]))[0]
        return refusal.format(most)

    async with start_server(policy=overselling_policy, buyer=refuses, critic=judge) as server:
        rows = await arun_trial(
            EXAMPLES / "haggling.py",
            "policy",
            tasks=2,
            sections={
                "endpoint": {"base_url": server.base_url, "tokens": "off"},
                "env": {"user": {"name": "buyer"}, "judge": {"name": "critic"}},
            },
        )
    assert [(row.reward, row.error) for row in rows] == [(0.0, None)] * 2


async def test_haggling_has_a_judge_and_different_buyers(lab: Lab) -> None:
    env = {"judge": {"name": "critic", "temperature": 0}, "user": {"name": "buyer"}}
    async with start_server(policy=seller, buyer=buyer, critic=judge) as server:
        report = await lab.run(
            EXAMPLES / "haggling.py",
            server,
            env={"split": "eval", **env},
            dataset={"limit": 3},
        )
        assert report.done == 12, report.causes
        assert sum(entry.call_id is not None for entry in server.entries) == 5 * 12
    rows = lab.rows()
    for row in rows:
        price, polite = row["rewards"]
        assert 0.4 <= price["score"] <= 0.5
        detail = json.loads(polite["detail"])
        assert (polite["score"], detail["verdict"], detail["judge"]) == (1, "yes", "critic")
        assert len(detail["prompt_sha256"]) == 64
        assert detail["usage"]["input_tokens"] > 0
        purposes = [c["purpose"] for c in row["calls"]]
        assert purposes == ["agent", "user", "agent", "agent", "judge"]
        assert row["usage"]["input_tokens"] == sum(c["input_tokens"] for c in row["calls"])
        assert row["turns"] == 3
    prices = [re.findall(r'"price":(\d+)', "".join(row["messages"]))[0] for row in rows]
    assert len(set(prices[:4])) > 1
