"""Guests by seed, a guest without a model, and rewards."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from checks import cheats, check_stream, failed_attempts
from hypothesis import given
from hypothesis import strategies as st

from environments.dialogue_booking import guest, rules
from environments.dialogue_booking.bookings import DAYS, TIMES
from hermes_rl.errors import UserError
from hermes_rl.messages import AssistantMessage, UserMessage, text_of
from hermes_rl.rl import Rollout, Task, ToolUse, arun_trial, first_tasks, rewards_of, run_trial
from hermes_rl.testing import FakeConfig, FakeServer, ServedRequest

NAME = "dialogue_booking"
ALL = 48
Steps = list[Any]
TASKS = first_tasks(NAME, ALL)


@pytest.mark.slow
def test_the_scene_stream_is_deterministic_and_its_splits_are_disjoint() -> None:
    check_stream(NAME)


def kinds(task: Task) -> list[str]:
    return [wish["kind"] for wish in task.metadata["wishes"]]


def test_every_kind_of_wish_is_drawn() -> None:
    assert {kind for t in TASKS for kind in kinds(t)} == {"book", "change", "cancel", "hand_over"}
    assert {len(kinds(t)) for t in TASKS} == {1, 2}
    assert any("full" in wish for t in TASKS for wish in t.metadata["wishes"])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_oracle_gets_1_for_every_kind_of_wish(split: str) -> None:
    assert rewards_of(NAME, "oracle", tasks=ALL, split=split) == [1.0] * ALL


def alter_oracle(change: Callable[[Steps], Steps]) -> Callable[[Task], str]:
    return lambda task: json.dumps(change(json.loads(str(task.oracle))))


def is_action(step: Any) -> bool:
    """Whether a step changes bookings, or hands over."""
    writing = {"book", "change", "cancel", "hand_over"}
    return isinstance(step, dict) and step["calls"][0]["name"] in writing


def claim_success(steps: Steps) -> Steps:
    return [s for s in steps if not is_action(s)]


def act_without_asking(steps: Steps) -> Steps:
    """Act without asking or announcing."""
    return [s for s in steps if is_action(s)]


def repeat_actions(steps: Steps) -> Steps:
    return [one for s in steps for one in ([s, s] if is_action(s) else [s])]


def other_time(steps: Steps) -> Steps:
    """Book another time than announced."""
    for step in steps:
        for call in step["calls"] if isinstance(step, dict) else ():
            if "time" in call["arguments"]:
                place = TIMES.index(call["arguments"]["time"])
                call["arguments"]["time"] = TIMES[place - 1]
    return steps


def announce_other_time(steps: Steps) -> Steps:
    """Announce and book another time than the guest wants."""
    texts = [json.dumps(step) for step in other_time(steps)]
    moved = {was: TIMES[place - 1] for place, was in enumerate(TIMES)}
    return [
        json.loads(re.sub("|".join(TIMES), lambda m: moved[m[0]], text))
        if text.startswith('"') and "Shall I" in text
        else json.loads(text)
        for text in texts
    ]


def skip_hand_over(steps: Steps) -> Steps:
    return [s for s in steps if "hand_over" not in json.dumps(s)]


def cancel_another_booking(task: Task) -> str:
    mine = {w.get("code") for w in task.metadata["wishes"]}
    other = next(b["code"] for b in task.metadata["bookings"] if b["code"] not in mine)
    step = {"calls": [{"name": "cancel", "arguments": {"code": other}}]}
    return json.dumps([step, *json.loads(str(task.oracle))])


@pytest.mark.parametrize(
    "solution",
    [
        alter_oracle(claim_success),
        alter_oracle(act_without_asking),
        cancel_another_booking,
        alter_oracle(lambda steps: [*steps, "Anything else?", "Goodbye."][:1]),
    ],
    ids=["only claims", "does not ask", "changes another booking", "asks and leaves"],
)
def test_only_completed_wishes_get_a_reward(solution: Callable[[Task], str]) -> None:
    rows = run_trial(NAME, tasks=12, solution=solution)
    assert [row.reward for row in rows] == [0.0] * 12


CHOICES = f"On {', '.join(DAYS)}, at {', '.join(TIMES)}, for 1, 2, 3, 4, 5, 6, 7 or 8 people?"


def list_all_options(steps: Steps) -> Steps:
    """List all options instead of announcing the action."""
    following = [*steps[1:], ""]
    return [CHOICES if is_action(after) else s for s, after in zip(steps, following, strict=True)]


def test_a_list_of_options_is_not_an_announcement() -> None:
    """The guest answers a list with its wish, but the agent did not announce the action."""
    rows = run_trial(NAME, tasks=ALL, solution=alter_oracle(list_all_options))
    found = [row.reward for row, t in zip(rows, TASKS, strict=True) if "book" in kinds(t)]
    assert len(found) > ALL / 4
    assert found == [0.0] * len(found)


def with_text_and_null_arguments(steps: Steps) -> Steps:
    """Numbers as text, and null for absent arguments."""
    for step in steps:
        for call in step["calls"] if isinstance(step, dict) else ():
            arguments = call["arguments"]
            if "people" in arguments:
                arguments["people"] = str(arguments["people"])
            if call["name"] == "change":
                call["arguments"] = {"day": None, "time": None, "people": None, **arguments}
    return steps


def test_arguments_may_be_text_or_null() -> None:
    rows = run_trial(NAME, tasks=ALL, solution=alter_oracle(with_text_and_null_arguments))
    assert [(row.reward, row.error) for row in rows] == [(1.0, None)] * ALL


def test_too_many_bookings_get_0_and_are_not_an_error() -> None:
    arguments = {"name": "X", "day": "Tuesday", "time": "19:00", "people": 1}
    calls = {"calls": [{"name": "book", "arguments": arguments} for _ in range(20)]}
    rows = run_trial(NAME, tasks=2, solution=lambda task: json.dumps([calls, "Done."]))
    assert [(row.reward, row.error) for row in rows] == [(0.0, None)] * 2


def test_manners_need_a_judge() -> None:
    with pytest.raises(UserError) as caught:
        run_trial(NAME, tasks=1, config={"manners": 0.2})
    assert str(caught.value) == (
        "environment dialogue_booking calls a model as judge: set env.judge.name, such as "
        "--set env.judge.name=MODEL"
    )


def test_cheats_get_no_reward_in_dialogues() -> None:
    """The cheats get a shell, which the environment does not have by default."""
    assert (
        failed_attempts(NAME, cheats(tasks=2), config={"sandboxed": True, "toolsets": ["terminal"]})
        == {}
    )


def share_without(task: Task, *left_out: str) -> float:
    found = kinds(task)
    return sum(kind not in left_out for kind in found) / len(found)


def has_time(task: Task) -> bool:
    """Whether a call of the solution has a time."""
    return '"time"' in "".join(json.dumps(s) for s in json.loads(str(task.oracle)) if is_action(s))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (repeat_actions, lambda t: 0.0 if {"book", "hand_over"} & set(kinds(t)) else 1.0),
        (other_time, lambda t: 0.0 if has_time(t) else 1.0),
        (announce_other_time, lambda t: 0.0 if has_time(t) else 1.0),
        (skip_hand_over, lambda t: share_without(t, "hand_over")),
    ],
)
def test_missing_and_wrong_actions_lower_the_reward(
    change: Callable[[Steps], Steps], wanted: Callable[[Task], float]
) -> None:
    """Unwanted changes give 0; otherwise each fulfilled wish gets its share."""
    rows = run_trial(NAME, tasks=ALL, solution=alter_oracle(change))
    assert [row.reward for row in rows] == [wanted(task) for task in TASKS]
    assert len({wanted(task) for task in TASKS}) > 1, "both results occur"


def test_doing_nothing_earns_nothing() -> None:
    assert rewards_of(NAME, "noop", tasks=20, split="eval") == [0.0] * 20


def test_rollouts_are_deterministic() -> None:
    def conversations(**how: Any) -> list[str]:
        return [str(row.messages) for row in run_trial(NAME, tasks=8, **how)]

    assert conversations() == conversations()


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("We will be 12.", True),
        ("There are twelve of us!", True),
        ("We will be 8, at 19:30.", False),
        ("The code is 9QK.", False),
        ("The code is 234.", False),
    ],
)
def test_a_code_is_not_taken_for_a_number_of_people(text: str, known: bool) -> None:
    before = [
        {"code": c, "name": "X", "day": "Friday", "time": "18:00", "people": 2}
        for c in ("9QK", "234")
    ]
    rollout = Rollout(
        task_id="",
        member=0,
        messages=({"role": "user", "content": text}, {"role": "assistant", "content": ""}),
        turn_of=(0, 1),
        final_response="",
        end_reason=None,
        turns=1,
        tool_calls=(ToolUse(1, "hand_over", {"reason": "large party"}, "", ok=True),),
    )
    found = rules.violations(rollout, before, "Tuesday")
    assert found == ([] if known else ["hand_over large party: without knowing"])


EVERYTHING = "he name is Berg, Friday please, at 19:30, we will be 4."
WISH = {
    "kind": "book",
    "says": "A table please.",
    "facts": {"name": "Berg", "day": "Friday", "time": "19:30", "people": 4},
    "wanted": {"name": "Berg", "day": "Friday", "time": "19:30", "people": 4},
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("What is your name?", "The name is Berg."),
        ("For how many people?", "We will be 4."),
        ("Friday at 19:30 for four, shall I?", "Yes, please."),
        (
            "Friday at 20:30 for 4 people?",
            f"No: t{EVERYTHING}",
        ),
        ("Hello?", f"T{EVERYTHING}"),
        ("It is booked.", None),
    ],
)
def test_a_guest_answers_questions(text: str, answer: str | None) -> None:
    assert guest.reply({"wish": 0, "answers": 0, "tone": 0}, [WISH], text) == answer


@given(st.lists(st.text(), max_size=20))
def test_a_guest_always_leaves_in_the_end(texts: list[str]) -> None:
    state = {"wish": 0, "answers": 0, "tone": 1}
    answers = [guest.reply(state, [WISH, WISH], text + "?") for text in texts]
    assert all(a is None for a in answers[guest.PATIENCE :])
    assert all(answers[: guest.PATIENCE])


def policy(request: ServedRequest) -> Any:
    """Play the oracle of the task with this guest."""
    prompt = next(text_of(m) for m in request.messages if isinstance(m, UserMessage))
    task = next(t for t in TASKS[:4] if t.prompt_text == prompt)
    turn = sum(isinstance(m, AssistantMessage) for m in request.messages)
    steps = json.loads(str(task.oracle))
    return steps[turn] if turn < len(steps) else "Goodbye."


def guest_model(request: ServedRequest) -> str:
    """Give all details, and leave when every wish is fulfilled."""
    persona = text_of(request.messages[0])
    facts = " ".join(re.findall(r"^\d\. (.*)$", persona, re.MULTILINE))
    settled = [m for m in request.messages if re.match("It is |A coll", text_of(m))]
    count = len(re.findall(r"^\d\. ", persona, re.MULTILINE))
    return guest.END if len(settled) >= count else f"Yes. {facts}"


async def test_models_can_play_the_guest_and_judge_manners() -> None:
    def critic(request: ServedRequest) -> str:
        return json.dumps({"reason": "Short and clear.", "verdict": "no"})

    plays = {"policy": policy, "guest": guest_model, "critic": critic}
    async with FakeServer(FakeConfig(plays=plays)) as server:
        rows = await arun_trial(
            NAME,
            "policy",
            tasks=4,
            config={"manners": 0.25},
            sections={
                "endpoint": {"base_url": server.base_url, "tokens": "off"},
                "env": {"user": {"name": "guest"}, "judge": {"name": "critic"}},
            },
        )
    assert [(row.reward, row.error) for row in rows] == [(0.75, None)] * 4
    for row in rows:
        assert {c.purpose for c in row.calls} == {"agent", "user", "judge"}
        assert [p.name for p in row.rewards] == ["wishes", "manners"]


def test_days_and_times_match_the_system_prompt() -> None:
    assert "Monday" not in DAYS
    assert (TIMES[0], TIMES[-1]) == ("17:00", "21:30")
