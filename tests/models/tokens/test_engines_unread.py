"""A model whose tool calls no parser here reads: said at the start, not found out later."""

import pytest
from engines_kit import asked, client_of, engine_at, played, request_of, script
from render_kit import GLM_LIKE

from hermes_rl.config import parse_config
from hermes_rl.errors import UserError
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Conversation
from hermes_rl.models.endpoint import Endpoint
from hermes_rl.models.providers.probe import TokenSearch
from hermes_rl.models.tokens.client import token_client
from hermes_rl.models.tokens.parsers import parser_named
from hermes_rl.models.tokens.renderer import Renderer, load_renderer
from hermes_rl.wiring import reach

UNREAD = "no parser here reads tool calls as this model's template writes them: '<tool_call>look_up"
SILENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def renderer_at(engine) -> Renderer:
    return load_renderer(engine.config.tokenizer, template=GLM_LIKE)


async def test_a_client_refuses_tools_whose_calls_it_cannot_read(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        client = token_client(Endpoint(engine.base_url), renderer_at(engine), "vllm")
        with pytest.raises(UserError, match=UNREAD):
            await client.complete(request_of(Conversation(asked("Say."))))
        assert not engine.truth
        answer = await client.complete(request_of(Conversation(asked("Say.")), tools=()))
        assert answer.tokens.completion_ids == engine.truth[-1].sampled_ids
        await client.aclose()
        own = token_client(
            Endpoint(engine.base_url), renderer_at(engine), "vllm", parser=parser_named("hermes")
        )
        assert await own.complete(request_of(Conversation(asked("Say."))))
        await own.aclose()


async def test_a_way_that_was_named_is_refused_at_the_start_where_there_are_tools(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        at, renderer = Endpoint(engine.base_url), renderer_at(engine)
        with pytest.raises(UserError, match=f"endpoint.tokens=vllm: {UNREAD}") as raised:
            await TokenSearch(at, "toy", renderer).plan("vllm")
        assert "endpoint.tokens=chat" in str(raised.value)
        assert not engine.truth
        plan = await TokenSearch(at, "toy", renderer, tools=False).plan("vllm")
        assert plan.way == "vllm"
        assert any(UNREAD in line for line in plan.lines())


@pytest.mark.parametrize("tools_told", [False, True])
async def test_a_template_without_tool_calls_is_refused_where_there_are_tools(tmp_path, tools_told):
    """Its rollouts would break at the first call: the next prompt could not tell it. Also where it
    writes the offered tools, but no call."""
    silent = "{% if tools %}{{ tools | tojson }}{% endif %}" * tools_told + SILENT
    async with engine_at(tmp_path / "t") as engine:
        at = Endpoint(engine.base_url)
        renderer = load_renderer(engine.config.tokenizer, template=silent)
        with pytest.raises(UserError, match=r"endpoint\.tokens=vllm: .* writes no tool calls"):
            await TokenSearch(at, "toy", renderer).plan("vllm")
        assert not engine.truth
        assert (await TokenSearch(at, "toy", renderer).plan("auto")).way == "chat"
        plan = await TokenSearch(at, "toy", renderer, tools=False).plan("vllm")
        assert plan.way == "vllm"
        client = token_client(at, renderer, "vllm")
        with pytest.raises(UserError, match="offer no tools"):
            await client.complete(request_of(Conversation(asked("Say."))))
        answer = await client.complete(request_of(Conversation(asked("Say.")), tools=()))
        assert answer.tokens.completion_ids == engine.truth[-1].sampled_ids
        await client.aclose()


async def test_auto_lets_the_engine_read_the_calls_or_says_why_there_are_no_ids(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        plan = await TokenSearch(Endpoint(engine.base_url), "toy", renderer_at(engine)).plan("auto")
        assert plan.way == "chat"
    async with engine_at(tmp_path / "u", chat_ids="none") as engine:
        plan = await TokenSearch(Endpoint(engine.base_url), "toy", renderer_at(engine)).plan("auto")
        assert not plan.exact
        assert UNREAD in plan.why


async def test_a_run_asks_by_its_toolsets(tmp_path):
    async with engine_at(tmp_path / "t") as engine:
        (tmp_path / "t" / "chat_template.jinja").write_text(GLM_LIKE, encoding="utf-8")
        form = {
            "dataset": {"path": "unused"},
            "model": {"name": "toy"},
            "agent": {"preset": "rl"},
            "sandbox": {"backend": "none"},
            "endpoint": {
                "base_url": engine.base_url,
                "tokens": "vllm",
                "tokenizer": str(engine.config.tokenizer),
            },
            "run": {"allow_unsandboxed": True},
        }
        with pytest.raises(UserError, match=UNREAD):
            await reach(parse_config(form))
        form["agent"]["toolsets"] = []
        assert (await reach(parse_config(form))).tokens.way == "vllm"


@pytest.mark.parametrize(
    ("family", "said", "end", "header", "lead"),
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
async def test_an_episode_in_a_form_without_tags_keeps_its_ids(
    tmp_path, family, said, end, header, lead
):
    steps = ["never"] * lead + [{"raw": said, "end": end}, "Done."]
    async with engine_at(
        tmp_path / "t", family=family, header=header, end=end, split="random"
    ) as engine:
        client = client_of(engine, "vllm")
        prompt = [UserMessage(content=script(*steps) + "Now.")]
        _, answers = await played(client, prompt)
        await client.aclose()
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
