"""A model whose tool calls no parser reads is reported at the start."""

import pytest
from engines_kit import client_at, config_of, engine_at, played, request_of, script, user_turn
from render_kit import GLM_LIKE

from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.messages import UserMessage
from hermes_rl.models import Conversation, Endpoint
from hermes_rl.models.providers import Probe
from hermes_rl.models.tokens import find_parser, load_renderer, token_client
from hermes_rl.wiring import reach

UNREAD = "no parser here reads tool calls as this model's template writes them: '<tool_call>look_up"
SILENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "why", "advice"),
    [
        (GLM_LIKE, UNREAD, "endpoint.tokens=chat"),
        (SILENT, "writes no tool calls", "offer no tools"),
        ("{% if tools %}{{ tools | tojson }}{% endif %}" + SILENT, "writes no tool calls", ""),
    ],
    ids=["unread", "unwritten", "tools written and no calls"],
)
async def test_tools_are_refused_if_calls_cannot_be_parsed_or_rendered(
    tmp_path, template, why, advice
):
    """Rollouts would break at the first call: the next prompt could not show it."""
    async with engine_at(tmp_path / "t") as engine:
        at = Endpoint(engine.base_url)
        renderer = load_renderer(engine.config.tokenizer, template=template)
        with pytest.raises(UserError, match=rf"endpoint\.tokens=vllm: .*{why}") as raised:
            await Probe(at, "toy", renderer).plan("vllm")
        assert advice in str(raised.value)
        assert not engine.truth
        assert (await Probe(at, "toy", renderer).plan("auto")).way == "chat"
        plan = await Probe(at, "toy", renderer, tools=False).plan("vllm")
        assert plan.way == "vllm"
        assert any(why in line for line in plan.lines())
        client = token_client(at, renderer, "vllm")
        with pytest.raises(UserError, match=why):
            await client.complete(request_of(Conversation(user_turn("Say."))))
        answer = await client.complete(request_of(Conversation(user_turn("Say.")), tools=()))
        assert answer.tokens.completion_ids == engine.truth[-1].sampled_ids
        await client.aclose()
        custom = token_client(at, renderer, "vllm", parser=find_parser("hermes"))
        assert await custom.complete(request_of(Conversation(user_turn("Say."))))
        await custom.aclose()


async def test_auto_reports_unreadable_calls(tmp_path):
    async with engine_at(tmp_path / "u", chat_ids="none") as engine:
        renderer = load_renderer(engine.config.tokenizer, template=GLM_LIKE)
        plan = await Probe(Endpoint(engine.base_url), "toy", renderer).plan("auto")
        assert not plan.exact
        assert UNREAD in plan.why


async def test_probe_depends_on_toolsets(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        (tmp_path / "t" / "chat_template.jinja").write_text(GLM_LIKE, encoding="utf-8")
        endpoint = {"tokens": "vllm", "tokenizer": str(engine.config.tokenizer)}
        form = config_of(engine, endpoint=endpoint)
        with pytest.raises(UserError, match=UNREAD):
            await reach(parse_config(form))
        form["agent"]["toolsets"] = []
        assert (await reach(parse_config(form))).tokens.way == "vllm"


@pytest.mark.parametrize(
    ("family", "text", "end", "header", "lead"),
    [
        (
            "llama3",
            '{"name": "terminal", "parameters": {"command": "ls"}}',
            "<|eom_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            0,
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls"}, "id": "abcdefgh1"'
            "}]",
            "</s>",
            "[/",  # of [/INST], [/AVAILABLE_TOOLS] and [/TOOL_RESULTS]: it opens no turns
            1,
        ),
    ],
)
async def test_episode_without_call_tags_keeps_its_ids(tmp_path, family, text, end, header, lead):
    fields = {"family": family, "header": header, "end": end, "split": "random"}
    steps = ["never"] * lead + [{"raw": text, "end": end}, "Done."]
    async with client_at("vllm", tmp_path / "t", **fields) as (engine, client):
        prompt = [UserMessage(content=script(*steps) + "Now.")]
        _, answers = await played(client, prompt)
    assert [bool(answer.message.tool_calls) for answer in answers] == [True, False]
    (call,) = answers[0].message.tool_calls
    assert (call.name, call.arguments) == ("terminal", '{"command": "ls"}')
    first, second = (answer.tokens for answer in answers)
    assert first.completion_ids == engine.truth[0].sampled_ids
    path = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(path)] == path
    if family == "mistral":
        assert call.id == "abcdefgh1"
        renderer = load_renderer(engine.config.tokenizer)
        assert '"call_id": "abcdefgh1"' in renderer.decode(second.prompt_ids)
