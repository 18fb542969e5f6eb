"""Our prompts are the ids that transformers makes of the same files, over seventy templates."""

import json
import subprocess
from pathlib import Path

import pytest
import trl
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
NO_NULL = "deepseek_r1_distill"
"""Reads a null content beside tool calls, which transformers takes out of messages and engines do
not."""
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def test_prompts_are_those_of_transformers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("say --producer=.venv/bin/python (make test-consumers does)")
    script = str(HERE / "prompts_made_here.py")
    subprocess.run(
        [producer, script, str(tmp_path), str(TEMPLATES)], check=True, timeout=300, text=True
    )
    prompts = json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8"))
    assert len(prompts) > 300
    readers: dict[str, PreTrainedTokenizerFast] = {}
    unlike, compared = [], 0
    for prompt in prompts:
        if prompt["date"]:  # theirs is today's
            continue
        if NO_NULL in prompt["title"] and prompt["tools"]:
            continue
        folder = prompt["folder"]
        if folder not in readers:
            readers[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
        try:
            theirs = readers[folder].apply_chat_template(
                prompt["messages"],
                tools=prompt["tools"],
                add_generation_prompt=prompt["opened"],
                return_dict=False,
            )
        except Exception:  # a template may refuse a conversation; ours must refuse it too
            theirs = None
        compared += theirs is not None
        if theirs != prompt["ids"]:
            unlike.append(prompt["title"])
    assert unlike == []
    assert compared > 400
