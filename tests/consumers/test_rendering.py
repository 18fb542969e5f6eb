"""Prompts and bridges have the ids that transformers renders from the same files, over the chat
templates of many model families."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NEEDS_NULL = "deepseek_r1_distill"
"""This template needs a null content beside tool calls, which transformers removes and engines
keep."""
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_readers: dict[str, PreTrainedTokenizerFast] = {}


def render(script: str, request: pytest.FixtureRequest, folder: Path) -> Any:
    """Run a script with the project's own Python; return what it wrote."""
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("add --producer=.venv/bin/python (make test-consumers does)")
    command = [producer, str(HERE / f"render_{script}.py"), str(folder), str(TEMPLATES)]
    subprocess.run(command, check=True, timeout=300, text=True)
    return json.loads((folder / f"{script}.json").read_text(encoding="utf-8"))


def render_with_transformers(conversation: dict[str, Any], *, opened: bool) -> list[int]:
    folder = conversation["folder"]
    if folder not in _readers:
        _readers[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
    return _readers[folder].apply_chat_template(
        conversation["messages"],
        tools=conversation["tools"],
        add_generation_prompt=opened,
        return_dict=False,
    )


def test_prompts_equal_those_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    prompts = render("prompts", request, tmp_path)
    assert len(prompts) > 300
    different, compared = [], 0
    for prompt in prompts:
        if prompt["date"]:  # transformers renders today's date
            continue
        if NEEDS_NULL in prompt["title"] and prompt["tools"]:
            continue
        try:
            ids = render_with_transformers(prompt, opened=prompt["opened"])
        except Exception:  # if a template refuses a conversation, hermes_rl must refuse it too
            ids = None
        compared += ids is not None
        if ids != prompt["ids"]:
            different.append(prompt["title"])
    assert different == []
    assert compared > 400


def test_bridged_prompts_equal_those_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    different, compared, forks = [], [], {}
    for bridge in render("bridges", request, tmp_path):
        if bridge["why"]:
            forks[bridge["title"]] = bridge["why"]
            continue
        compared.append(bridge["title"])
        # If the template renders today's date, the ids of the script are used.
        ids = bridge["read_token_ids"] or render_with_transformers(bridge, opened=True)
        if bridge["ids"] != [ids] * 2:
            different.append((bridge["title"], ids))
    assert different == []
    assert len(compared) > 300
    for family in ("qwen2_5", "llama3_1", "glm4moe", "gemma4", "gptoss", "lfm2_2_5"):
        assert f"{family}: call" in compared
    for title, why in forks.items():  # no bridge: the template writes the answer differently
        assert title.endswith("thought") or title.startswith(
            ("gemma4", "diffusion_gemma", "gptoss")
        )
        assert "drops the reasoning" in why or "rewrites what comes before" in why
