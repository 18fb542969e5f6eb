"""How runs end, and answers that cannot be used as they are: cut, empty, or with calls that
cannot be read."""

from typing import Any

import pytest

from hermes_rl.agent import EMPTY, LATEST, PRESETS, WORDINGS, Limits
from hermes_rl.models import Completion, ModelRequest, Sampling
from hermes_rl.models.calls import ModelCaller, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.tools import Tool, ToolContext, ToolResult

TEXTS = WORDINGS[LATEST].messages
CHAT, DATAGEN, RL = (PRESETS[name] for name in ("interactive", "datagen", "rl"))

LONG = "This is the beginning of a long text, and it goes on for quite a while. " * 4
NOTHING = {"text": ""}
THOUGHT = {"text": "\n", "reasoning": "It must be 4."}
NOTE = TEXTS.thoughts_note("It must be 4.")
LS = {"run": "ls"}
BIG = {"run": "echo " + "x" * 400}
CUT_CALL = {"run": "touch made", "finish": "length"}
CUT_CALL_AND_TEXT = {"text": "Now I write it.", **CUT_CALL}
ITEM = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
INCOMPLETE = {"reasoning": "Hm.", "details": [ITEM], "finish": "length"}
BROKEN_OFF = {"calls": [{"arguments": '{"command": "touch ma'}]}
NO_JSON = {"calls": [{"arguments": '{"command": "touch made",,}'}]}
STREAM_CUT = {"text": LONG, "fault": "cut"}
NO_TOOL = {"calls": [{"name": "nope"}]}
NOT_JSON, EMPTY_AGAIN = "tool call without JSON arguments", "empty answer"


def cut(text: str) -> dict[str, Any]:
    return {"text": text, "finish": "length"}


def without(**switches: Any) -> Any:
    return DATAGEN.switched(switches)


def only(**switches: Any) -> Any:
    """The rl preset with some switches on."""
    return RL.switched(switches)


def observe(ran: Any) -> dict[str, Any]:
    """What a case may expect; `outline` has one letter per message, capital where the harness
    wrote it."""
    row = ran.row()
    assert row.final_response == ran.result.final_response
    assert row.turns == len({start.turn for start, _ in ran.calls() if start.purpose == "agent"})
    return {
        "end": ran.result.end_reason,
        "final": ran.result.final_response,
        "turns": ran.result.turns,
        "outline": ran.outline(),
        "calls": len(ran.calls()),
        "discarded": [(error or "").removeprefix("discarded: ") for error in ran.errors()],
        "output_limits": ran.limits(),
        "metrics": ran.result.metrics,
        "harness": [event.message.content for event in ran.added() if event.synthetic],
        "outcomes": [end.outcome for _, end in ran.calls()],
    }


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # name: (steps of the model, what differs from the preset `datagen`, what is observed)
    "the rest of a cut text is asked for with twice the limit": (
        (cut("One, "), cut("two, "), cut("three, "), "four."), {},
        {"end": "answered", "final": "One, two, three, four.", "turns": 4, "outline": "suaUaUaUa",
         "harness": [TEXTS.cut_text] * 3, "output_limits": [None, 8192, 16384, 32768],
         "metrics": {"continued_answers": 3.0}, "discarded": [""] * 4},
    ),
    "the fourth cut ends with the joined parts": (
        tuple(cut(f"{n} ") for n in range(9)), {},
        {"end": "output_truncated", "final": "0 1 2 3 ", "turns": 4, "outline": "suaUaUaUa"},
    ),
    "a requested limit is doubled": (
        (cut("x"),) * 4, {"sampling": Sampling(max_tokens=1000)},
        {"output_limits": [1000, 2000, 4000, 8000]},
    ),
    "doubling has an upper bound": (
        (cut("x"),) * 4, {"sampling": Sampling(max_tokens=20_000)},
        {"output_limits": [20_000, 32_768, 32_768, 32_768]},
    ),
    "a higher requested limit is kept": (
        (cut("x"),) * 4, {"sampling": Sampling(max_tokens=50_000)}, {"output_limits": [50_000] * 4},
    ),
    "the limit is restored after a whole answer, and text before a call is left out": (
        (cut("Let me see. "), {"run": "echo 1"}, cut("It is "), "one."), {},
        {"output_limits": [None, 8192, None, 8192], "final": "It is one.", "outline": "suaUataUa"},
    ),
    "no continuation without the switch": (
        (cut("One, "), "two"), {"policy": without(continue_output=False)},
        {"end": "output_truncated", "final": "One, ", "outline": "sua", "calls": 1},
    ),
    "no continuation with rl": (
        (cut("One, "), "two"), {"policy": RL},
        {"end": "output_truncated", "final": "One, ", "outline": "sua", "calls": 1},
    ),
    "a turn limit ends a continuation before the harness speaks": (
        (cut("1 "), cut("2 "), "3"),
        {"limits": Limits(max_turns=2), "policy": without(summary_on_limit=False)},
        {"end": "max_turns", "final": "1 2 ", "outline": "suaUa"},
    ),
    "a summary replaces the parts": (
        (cut("1 "), cut("2 "), "All."), {"limits": Limits(max_turns=2)},
        {"end": "max_turns", "final": "All.", "outline": "suaUaUa"},
    ),
    "a summary is asked for although the last answer was discarded": (
        (cut("1 "), [CUT_CALL] * 5, "All."), {"limits": Limits(max_turns=2)},
        {"end": "max_turns", "final": "All.", "outline": "suaUAUa"},
    ),
    "a token limit ends a continuation": (
        (cut("x" * 80),) * 9, {"limits": Limits(max_tokens=1)},
        {"end": "token_limit", "outline": "sua"},
    ),
    "an empty answer behind parts ends with the parts": (
        (cut("All of it."), {"text": " "}), {},
        {"end": "answered", "final": "All of it.", "outline": "suaUa"},
    ),
    "and is an empty response without the switch": (
        (cut("Part."), NOTHING), {"policy": without(keep_given_text=False)},
        {"end": "empty_response", "final": "Part."},
    ),
    "an incomplete response of reasoning alone is continued": (
        ([INCOMPLETE, "Here."],), {},
        {"end": "answered", "final": "Here.", "outline": "suaUa", "output_limits": [None, 8192],
         "harness": [TEXTS.thoughts_note("Hm.")]},
    ),
    "but not with rl": ((INCOMPLETE, "never"), {"policy": RL}, {"end": "output_truncated"}),
    "a cut call is asked for again with a higher limit": (
        ([CUT_CALL] * 4 + [LS], "done"), {},
        {"end": "answered", "turns": 2, "outline": "suata",
         "output_limits": [None, 8192, 16384, 32768, 32768, None],
         "discarded": ["cut tool call"] * 4 + [""] * 2, "metrics": {"discarded_answers": 4.0}},
    ),
    "then smaller calls are asked for": (
        ([CUT_CALL_AND_TEXT] * 5, LS, "done"), {},
        {"end": "answered", "outline": "suaUata", "harness": [TEXTS.cut_call]},
    ),
    "then the run ends": (
        (CUT_CALL_AND_TEXT,) * 9, {}, {"end": "output_truncated", "calls": 8},
    ),
    "a cut call without text has a placeholder": (
        (CUT_CALL, LS, "done"), {},
        {"outline": "suAUata", "final": "done", "harness": [EMPTY, TEXTS.cut_call],
         "discarded": ["cut tool call"] * 5 + [""] * 2},
    ),
    "a cut call ends the run without the switch": (
        (CUT_CALL, "done"), {"policy": without(reask_cut_calls=False)},
        {"end": "output_truncated", "calls": 1},
    ),
    "a cut call ends the run with rl": (
        (CUT_CALL, "done"), {"policy": RL},
        {"end": "output_truncated", "calls": 1, "outline": "sua"},
    ),
    "arguments that break off are a cut call": (
        ([BROKEN_OFF, LS], "done"), {},
        {"outline": "suata", "discarded": ["cut tool call", "", ""]},
    ),
    "arguments that break off are reported to the model with rl": (
        (BROKEN_OFF, "done"), {"policy": RL}, {"outline": "suata", "calls": 2},
    ),
    "arguments that break off are invalid JSON without the switch": (
        (BROKEN_OFF, "done"), {"policy": without(reask_cut_calls=False)},
        {"outline": "suata", "calls": 4},
    ),
    "arguments without JSON are asked for again": (
        ([NO_JSON, NO_JSON, LS], "done"), {},
        {"end": "answered", "outline": "suata", "discarded": [NOT_JSON, NOT_JSON, "", ""],
         "output_limits": [None] * 4},
    ),
    "and reported to the model the third time": (
        (NO_JSON, "done"), {}, {"outline": "suata", "calls": 4},
    ),
    "and at once without the switch": (
        (NO_JSON, "done"), {"policy": without(reask_arguments=False)},
        {"outline": "suata", "calls": 2},
    ),
    "and at once with rl": ((NO_JSON, "done"), {"policy": RL}, {"outline": "suata", "calls": 2}),
    "arguments that never were JSON are not a cut call": (
        ({"calls": [{"arguments": "ls -la"}]}, "done"), {},
        {"outline": "suata", "calls": 4, "output_limits": [None] * 4},
    ),
    "a stream that breaks within a call asks for smaller calls": (
        ({"text": "I write it. ", **BIG, "fault": "cut"}, "done"), {"stream": True, "policy": CHAT},
        {"outline": "suaUa", "harness": [TEXTS.cut_call]},
    ),
    "a stream that breaks before a text is asked for again": (
        ([{**BIG, "reasoning": "x" * 200, "fault": "cut"}, "done"],),
        {"stream": True, "policy": CHAT}, {"outline": "sua", "outcomes": ["cut", "ok"]},
    ),
    "a stream that is reset before a text is asked for again": (
        ([{**BIG, "reasoning": "x" * 200, "fault": "reset"}, "done"],),
        {"stream": True, "policy": CHAT}, {"outline": "sua", "outcomes": ["cut", "ok"]},
    ),
    "a broken stream is asked for again without the switch": (
        ([STREAM_CUT, "whole"],), {"stream": True},
        {"outline": "sua", "final": "whole", "outcomes": ["cut", "ok"]},
    ),
    "a broken stream is asked for again with rl": (
        ([STREAM_CUT, "whole"],), {"stream": True, "policy": RL},
        {"outline": "sua", "final": "whole", "outcomes": ["cut", "ok"]},
    ),
    "at most three broken streams are continued": (
        (STREAM_CUT, STREAM_CUT, STREAM_CUT, [STREAM_CUT, "end"]), {"stream": True, "policy": CHAT},
        {"outline": "suaUaUaUa", "outcomes": ["cut"] * 4 + ["ok"]},
    ),
    "an empty answer is asked for again within its turn": (
        ([NOTHING] * 3 + ["there"],), {},
        {"end": "answered", "turns": 1, "outline": "sua", "discarded": [EMPTY_AGAIN] * 3 + [""]},
    ),
    "after three retries it is an empty response": (
        (NOTHING, "never"), {},
        {"end": "empty_response", "final": "", "outline": "sua",
         "discarded": [EMPTY_AGAIN] * 3 + [""]},
    ),
    "an empty answer ends the run with rl": (
        (NOTHING, "never"), {"policy": RL}, {"end": "empty_response", "calls": 1, "harness": []},
    ),
    "reasoning alone ends the run with rl": (
        (LS, THOUGHT, "never"), {"policy": RL},
        {"end": "empty_response", "calls": 2, "harness": []},
    ),
    "an empty answer after tool results is nudged": (
        (LS, NOTHING, "There is nothing."), {},
        {"end": "answered", "turns": 3, "outline": "suatAUa", "harness": [EMPTY, TEXTS.nudge],
         "discarded": ["", EMPTY_AGAIN, ""], "metrics": {"nudges": 1.0, "discarded_answers": 1.0}},
    ),
    "once": (
        (LS, NOTHING, NOTHING), {"policy": only(nudge_empty=True)},
        {"end": "empty_response", "outline": "suatAUa"},
    ),
    "and again after further results": (
        (LS, NOTHING, {"run": "pwd"}, NOTHING, "done"), {"policy": only(nudge_empty=True)},
        {"end": "answered", "outline": "suatAUatAUa"},
    ),
    "no nudge without tool results": (
        (NOTHING, "never"), {"policy": only(nudge_empty=True)},
        {"end": "empty_response", "outline": "sua"},
    ),
    "a limit comes before the nudge": (
        (LS, NOTHING, "x"), {"limits": Limits(max_turns=2), "policy": only(nudge_empty=True)},
        {"end": "max_turns", "outline": "suat", "discarded": ["", EMPTY_AGAIN]},
    ),
    "reasoning alone is continued from": (
        ([THOUGHT, THOUGHT, "4"],), {},
        {"end": "answered", "final": "4", "outline": "suaUaUa", "discarded": [""] * 3,
         "harness": [NOTE, NOTE]},
    ),
    "twice, and then asked for again": (
        (THOUGHT, "never"), {}, {"end": "empty_response", "outline": "suaUaUa", "calls": 6},
    ),
    "twice with that switch alone": (
        (THOUGHT, THOUGHT, THOUGHT, "x"), {"policy": only(prefill_reasoning=True)},
        {"outline": "suaUaUa", "calls": 3},
    ),
    "retries do not count as active time": (
        ([{"text": "", "latency_s": 0.2}] * 2 + ["done"],), {"limits": Limits(max_seconds=0.1)},
        {"end": "answered"},
    ),
    "retries end at the token limit": (
        (NOTHING,), {"limits": Limits(max_tokens=30)}, {"end": "token_limit", "outline": "su"},
    ),
    "blanks are an empty answer": (
        ({"text": " \n"},), {}, {"end": "empty_response", "final": " \n", "outline": "sua"},
    ),
    "a refusal ends the run": (
        ({"text": "I won't.", "finish": "refusal"},), {}, {"end": "refused", "final": "I won't."},
    ),
    "refusing words are an answer": (
        ("I'm sorry, I can't help with that.",), {}, {"end": "answered"},
    ),
    "a context that overflows ends the run": (
        (LS, {"fault": "context_overflow"}), {},
        {"end": "context_overflow", "turns": 2, "outcomes": ["ok", "refused"]},
    ),
    "a request that is too large does too": (
        (LS, {"fault": "too_large"}), {},
        {"end": "context_overflow", "turns": 2, "outcomes": ["ok", "refused"]},
    ),
    "the turn limit ends the run without a summary": (
        (LS,) * 9, {"limits": Limits(max_turns=3), "policy": without(summary_on_limit=False)},
        {"end": "max_turns", "outline": "suatatat", "turns": 3, "calls": 3},
    ),
    "or with one, which does not count as a turn": (
        (LS, LS, "The summary."), {"limits": Limits(max_turns=2)},
        {"end": "max_turns", "final": "The summary.", "outline": "suatatUa", "turns": 2,
         "calls": 3},
    ),
    "a summary that does not fit is left out": (
        (LS, {"fault": "context_overflow"}), {"limits": Limits(max_turns=1)},
        {"end": "max_turns", "outline": "suatU"},
    ),
    "rl asks for no summary": (
        (LS, LS), {"limits": Limits(max_turns=1), "policy": RL},
        {"end": "max_turns", "outline": "suat", "calls": 1},
    ),
    "three turns without a valid call end the run": (
        (NO_TOOL,) * 3 + ("never",), {},
        {"end": "invalid_tool_calls", "turns": 3, "outline": "suatatat"},
    ),
    "one valid call is enough to continue": (
        (NO_TOOL, NO_TOOL, {"calls": NO_TOOL["calls"] + [{"arguments": {"command": "true"}}]},
         NO_TOOL, NO_TOOL, "done"), {},
        {"end": "answered"},
    ),
    "a loop of one call is stopped": ((LS,) * 9, {}, {"end": "tool_loop", "turns": 5}),
    "with rl a loop of one call continues": (
        (*(LS,) * 8, "done"), {"policy": RL}, {"end": "answered"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_an_unusable_answer_is_repaired_as_the_policy_says(rig: Any, name: str) -> None:
    steps, changes, expected = CASES[name]
    ran = await rig.play(*steps, **changes)
    observed = observe(ran)
    assert {key: observed[key] for key in expected} == expected
    made = await rig.sandbox.run("ls", timeout_s=30)
    assert made.output == ""  # no call that was cut or could not be read ran


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "think"])
@pytest.mark.parametrize("policy", [DATAGEN, RL])
async def test_an_exhausted_thinking_budget_ends_at_once(rig: Any, field: str, policy: Any) -> None:
    step = {"reasoning": "Hm, let me see.", "field": field, "finish": "length"}
    ran = await rig.play(step, "never", policy=policy)
    assert (ran.result.end_reason, ran.outline(), len(ran.calls())) == (
        "output_truncated",
        "sua",
        1,
    )
    assert ran.result.metrics == {"thinking_budget_exhausted": 1.0}


@pytest.mark.parametrize("policy", [DATAGEN, RL])
async def test_the_model_is_told_which_arguments_cannot_be_read(rig: Any, policy: Any) -> None:
    ran = await rig.play(
        {"calls": [*NO_JSON["calls"], {"arguments": {"command": "echo 1"}}]}, "done", policy=policy
    )
    bad, good = (event.message.content for event in ran.results())
    assert "not valid JSON" in bad
    assert '"output":"1\\n"' in good


async def test_a_broken_stream_is_continued(rig: Any) -> None:
    heard: list[str] = []
    steps = (STREAM_CUT, "the end.")
    ran = await rig.play(*steps, stream=True, on_delta=heard.append, policy=CHAT)
    first = ran.result.messages[2].content
    assert first
    assert LONG.startswith(first)
    assert ran.result.final_response == first + "the end." == "".join(heard)
    assert ran.outline() == "suaUa"
    assert ran.result.messages[3].content == TEXTS.cut_stream
    assert [end.outcome for _, end in ran.calls()] == ["cut", "ok"]
    assert ran.errors()[0].startswith("AnswerInterrupted: ")
    assert ran.row().usage.unknown_calls == 1


class Caller:
    """A caller that notes the seeds, and may have more routes."""

    def __init__(self, caller: Any, others: int = 0) -> None:
        self.caller, self.others = caller, others
        self.seeds: list[int | None] = []

    def fall_back(self) -> bool:
        self.others -= 1
        return self.others >= 0

    async def call(self, request: ModelRequest, **more: Any) -> Completion:
        self.seeds.append(request.sampling.seed)
        answer: Completion = await self.caller.call(request, **more)
        return answer


@pytest.mark.parametrize(
    ("seed", "seen"),
    [(5, [5, 6, 7, 5]), (2**31 - 1, [2**31 - 1, 0, 1, 2**31 - 1]), (None, [None] * 4)],
)
async def test_each_retry_has_another_seed(rig: Any, seed: int | None, seen: list[Any]) -> None:
    caller = Caller(rig.parts().caller)
    await rig.play([NOTHING, NOTHING, LS], "done", caller=caller, sampling=Sampling(seed=seed))
    assert caller.seeds == seen


@pytest.mark.parametrize(("others", "calls"), [(0, 4), (1, 8), (2, 12)])
async def test_other_routes_come_last(rig: Any, others: int, calls: int) -> None:
    parts = rig.parts()
    ran = await rig.play(NOTHING, caller=Caller(parts.caller, others))
    assert ran.result.end_reason == "empty_response"
    assert len(rig.server.entries) == calls
    off = Caller(parts.caller, others)
    await rig.play(NOTHING, caller=off, policy=without(fall_back_when_empty=False))
    assert off.others == others


async def test_a_fallback_model_answers_in_its_place(rig: Any) -> None:
    parts = rig.parts()
    routes = [Route.single(name, rig.client, Limiter(8)) for name in ("one", "two")]
    caller = ModelCaller(routes, rig.log)
    ran = await rig.play([NOTHING] * 4 + ["There."], caller=caller, recorder=parts.recorder)
    assert (ran.result.end_reason, ran.result.final_response) == ("answered", "There.")
    assert [e.model for e in rig.server.entries] == ["one"] * 4 + ["two"]


def test_long_reasoning_is_quoted_in_part() -> None:
    assert len(TEXTS.thoughts_note("word " * 10_000)) < 17_000
    assert TEXTS.thoughts_note(" ") == TEXTS.thoughts_note(None)


def tool(name: str) -> dict[str, Tool]:
    async def handler(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult("ok")

    return {name: Tool(name, "", {"type": "object"}, handler, "x", needs_sandbox=False)}


@pytest.mark.parametrize(
    ("name", "text", "policy", "end"),
    [
        ("todo", "It is 4.", CHAT, "answered"),
        ("todo", "It is 4.", RL, "empty_response"),
        ("todo", "", only(reuse_prior_text=True), "empty_response"),
        ("look", "It is 4.", only(reuse_prior_text=True), "empty_response"),
    ],
)
async def test_text_before_nothing_but_housekeeping_is_the_answer(
    rig: Any, name: str, text: str, policy: Any, end: str
) -> None:
    step = {"text": text, "calls": [{"name": name}]}
    ran = await rig.play(step, NOTHING, "never", tools=tool(name), policy=policy)
    assert ran.result.end_reason == end
    if end == "answered":
        assert ran.row().final_response == ran.result.final_response == "It is 4."
        assert ran.outline() == "suata"
