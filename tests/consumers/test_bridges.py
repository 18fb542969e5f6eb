"""A bridged prompt is what transformers makes of the whole conversation, over the templates of some
twenty families with control tokens of their own: ends behind calls above all."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def test_bridged_prompts_are_those_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    producer = request.config.getoption("--producer")
    if not producer:
        pytest.fail("say --producer=.venv/bin/python (make test-consumers does)")
    script = str(HERE / "bridges_made_here.py")
    subprocess.run(
        [producer, script, str(tmp_path), str(TEMPLATES)], check=True, timeout=300, text=True
    )
    made = json.loads((tmp_path / "bridges.json").read_text(encoding="utf-8"))
    readers: dict[str, PreTrainedTokenizerFast] = {}
    unlike, compared, forks = [], [], {}
    for one in made:
        if one["why"]:
            forks[one["title"]] = one["why"]
            continue
        compared.append(one["title"])
        if one["ids"] != [whole := _whole(one, readers)] * 2:
            unlike.append((one["title"], whole))
    assert unlike == []
    assert len(compared) > 300
    for family in ("qwen2_5", "llama3_1", "glm4moe", "gemma4", "gptoss", "lfm2_2_5"):
        assert f"{family}: call" in compared
    for title, why in forks.items():  # no bridge: the template itself writes the answer otherwise
        assert title.endswith("thought") or title.startswith(
            ("gemma4", "diffusion_gemma", "gptoss")
        )
        assert "drops the reasoning" in why or "rewrites what comes before" in why


def _whole(one: dict[str, Any], readers: dict[str, PreTrainedTokenizerFast]) -> list[int]:
    """The conversation with its second turn opened; by ourselves where theirs would say today's
    date."""
    if one["ours"]:
        return list(one["ours"])
    folder = one["folder"]
    if folder not in readers:
        readers[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
    return readers[folder].apply_chat_template(
        one["messages"], tools=one["tools"], add_generation_prompt=True, return_dict=False
    )
