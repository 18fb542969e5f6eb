"""After the loop: the summary at the turn limit, and the result."""

from __future__ import annotations

from dataclasses import replace

from hermes_rl.agent.parts import AgentResult, RunState
from hermes_rl.agent.prompt import SUMMARY_REQUEST
from hermes_rl.agent.verdicts import Tries
from hermes_rl.errors import ContextOverflow, PayloadTooLarge
from hermes_rl.messages import UserMessage


async def finalise(run: RunState, end_reason: str) -> AgentResult:
    """The result of a run. Raises: ModelError of the summary's call."""
    if end_reason == "max_turns" and run.parts.policy.summary_on_limit and run.turn:
        await _summarise(run)
    return run.result(end_reason)


async def _summarise(run: RunState) -> None:
    """Ask once without tools; calls that the model makes all the same are recorded, not run."""
    turns = run.turn
    run.add(UserMessage(content=SUMMARY_REQUEST), synthetic=True)
    request = replace(run.request, tools=())
    try:
        completion = await run.parts.caller.call(request, turn=turns + 1, purpose="summary")
    except (ContextOverflow, PayloadTooLarge):
        return  # the window is full: the run ends without a summary
    run.count(completion.usage)
    run.turn = turns + 1
    run.tries = Tries()  # the summary is the answer, not parts of a cut one
    run.add(completion.message)
    run.turn = turns
