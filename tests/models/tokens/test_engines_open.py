"""Whatever an engine says, in whatever tokens: the ids are its own."""

import asyncio
from itertools import pairwise

from engines_kit import agree, client_at, continues, request_of, script, user_turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.messages import SystemMessage, UserMessage
from hermes_rl.models import Conversation

text = st.text(st.characters(codec="utf-8"), max_size=30)
steps = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "text": text,
            "reasoning": text,
            "plain": st.sampled_from(["<|im_end|>", "<tool_call>", "</think>", "é\u200d🙂"]),
            "run": text,
            "lookalike": st.booleans(),
            "end": st.sampled_from([True, True, False, "<|endoftext|>"]),
            "cut": st.integers(1, 40),
            "split": st.sampled_from(["canonical", "random"]),
        },
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, family=st.sampled_from(["chatml", "coder", "text_arguments"]))
def test_ids_equal_those_of_the_engine_for_any_conversation(tmp_path, steps, family):
    async def episode() -> None:
        async with client_at("vllm", tmp_path / family, family=family) as (engine, client):
            conversation = Conversation(
                [SystemMessage(content="S"), *user_turn(script(*steps))[1:]]
            )
            answers = []
            for number in range(len(steps)):
                answers.append(await client.complete(request_of(conversation, number)))
                conversation.append(answers[-1].message)
                conversation.append(UserMessage(content="Continue. <|im_start|>"))
        agree(answers, engine.truth)
        for before, after in pairwise(answers):
            assert continues(after, before)

    asyncio.run(episode())
