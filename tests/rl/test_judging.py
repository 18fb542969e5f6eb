"""Verdicts of judges: no commitment gets the lowest score, and a failed judge gives no reward."""

import hashlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from runs import Lab, count_answers, first_prompt, start_server

from hermes_rl.messages import text_of
from hermes_rl.rl import NO_COMMITMENT, judge_prompt, parse_verdict
from hermes_rl.testing import ServedRequest

REPLIES: dict[str, list[Any]] = {
    "plain": ['{"reason": "It is.", "verdict": "good"}'],
    "fenced": ['Sure!\n```json\n{"reason": "so so", "verdict": " BAD "}\n```'],
    "uncommitted": ['{"reason": "I cannot tell.", "verdict": "no_commitment"}'],
    "null-then-null": ['{"verdict": null}', '{"verdict": "maybe"}'],
    "prose-then-good": ["I think that it is rather good.", '{"verdict": "good"}'],
    "halved": ['{"verdict": "good"}'],
    "quoted": ['It says {"verdict": "good"}, but it is bad.', '{"verdict": "bad"}'],
    "braces-before": ['{so} I think: {"reason": "{}", "verdict": "good"}'],
    "chatty": ['{"reason": "Yes.", "verdict": "good"}\nDoes that help?'],
    "prose-twice-then-bad": ["Good.", "Really good.", '{"verdict": "bad"}'],
    "prose-thrice": ["It is good.", "Again: good.", "Good!"],
    "cut-thrice": ['{"reason": "It is', '{"reason": "Well', '{"reason"'],
    "empty-thrice": ['{"verdict": ""}', '{"verdict": null}', '{"reason": "", "verdict": " "}'],
    "refused": [{"fault": "bad_request"}],
    "filtered": [{"text": "", "finish": "content_filter"}],
}
"""Task -> the replies of the judge, in order."""

ENV = """
uses = ("judge",)

def tasks(self, split, seed):
    for name in NAMES:
        yield make_task(f"Write {name}.", id=name, toolsets=["none"])

async def compute_reward(self, task, trajectory, ctx):
    half = "\\ud800\\n" if task.id == "halved" else ""
    verdict = await ctx.judge.verdict("Is this good?", {"text": half + trajectory.final_response},
                                      choices=("good", "bad"))
    return Rewards([verdict.part("quality", {"good": 1.0, "bad": 0.25}, turn=1)])
"""


def critic(request: ServedRequest) -> Any:
    """Reply as in REPLIES to the text inside the fence."""
    name = next(name for name in REPLIES if f"\n{name}\n" in first_prompt(request))
    return REPLIES[name][count_answers(request)]


def policy(request: ServedRequest) -> Any:
    return first_prompt(request).removeprefix("Write ").removesuffix(".")


async def test_verdicts_of_a_judge(lab: Lab) -> None:
    prompts: dict[str, str] = {}

    def record_prompts(request: ServedRequest) -> Any:
        if count_answers(request) == 0:
            texts = [text_of(message) for message in request.messages]
            name = next(name for name in REPLIES if f"\n{name}\n" in texts[-1])
            prompts[name] = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        return critic(request)

    env = lab.write(ENV, f"NAMES = {list(REPLIES)}").path
    judge = {"judge": {"name": "critic", "max_tokens": 200}}
    async with start_server(critic=record_prompts, policy=policy) as server:
        await lab.run(env, server, env=judge, dataset={"limit": None, "repeats": 1})
    graded = {row["task_id"]: row for row in lab.rows()}
    assert {name: row["reward"] for name, row in graded.items()} == {
        "plain": 1.0,
        "fenced": 0.25,
        "uncommitted": 0.25,
        "null-then-null": 0.25,
        "prose-then-good": 1.0,
        "halved": 1.0,
        "quoted": 0.25,
        "braces-before": 1.0,
        "chatty": 1.0,
        "prose-twice-then-bad": 0.25,
    }
    for row in graded.values():
        (part,) = row["rewards"]
        detail = json.loads(part["detail"])
        judge_calls = [call for call in row["calls"] if call["purpose"] == "judge"]
        assert (part["turn"], detail["asked"], detail["judge"]) == (1, len(judge_calls), "critic")
        assert detail["reply"] == REPLIES[row["task_id"]][-1]
        assert detail["usage"]["output_tokens"] == judge_calls[-1]["output_tokens"]
        assert all(call["outcome"] == "ok" and call["turn"] == 1 for call in judge_calls)
        if row["task_id"] != "halved":  # a lone surrogate cannot be sent unchanged
            assert detail["prompt_sha256"] == prompts[row["task_id"]]
    assert json.loads(graded["uncommitted"]["rewards"][0]["detail"])["verdict"] == NO_COMMITMENT
    failed = {row["task_id"]: row for row in lab.rows("failures")}
    assert set(failed) == {"prose-thrice", "cut-thrice", "empty-thrice", "refused", "filtered"}
    for row in failed.values():
        assert (row["cause"], row["reward"], row["owner"]) == ("verifier", None, "infrastructure")
        assert "the judge critic" in row["error"]
        assert [call for call in row["calls"] if call["purpose"] == "judge"], (
            "the paid calls are recorded"
        )


async def test_a_refused_judge_stops_the_run_which_can_be_resumed(lab: Lab) -> None:
    env, judge = lab.write(ENV, "NAMES = ['plain']").path, {"judge": {"name": "critic"}}
    async with start_server(critic=lambda request: {"fault": "auth"}, policy=policy) as server:
        report = await lab.run(env, server, env=judge)
    assert (report.stopped, report.given_up, report.done) == ("auth", 0, 0)
    assert report.resume == f"hermes-rl env process --config {lab.out}/run.yaml"
    async with start_server(critic=critic, policy=policy) as server:
        report = await lab.run(env, server, env=judge)
    assert (report.stopped, report.done) == (None, 4)


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=200), max_size=3))
def test_judged_text_cannot_contain_its_fence(data: dict[str, str]) -> None:
    system, prompt, key = judge_prompt("Is it?", data, ("yes", "no"))
    mark = next(word for word in system.split() if word.startswith("==")).rstrip(".")
    assert len(mark) == 18
    assert not any(mark in text for text in data.values())
    assert prompt.count(mark) == 2 * len(data)
    assert not any(key in text for text in data.values())
    assert f'"{key}": V' in system
    assert (system, prompt, key) == judge_prompt("Is it?", data, ("yes", "no"))


@given(st.text(max_size=80))
def test_any_reply_of_a_judge_is_parsed_or_refused(text: str) -> None:
    found = parse_verdict(text, ("yes", "no"))
    assert found is None or found[0] in ("yes", "no", NO_COMMITMENT, "")
