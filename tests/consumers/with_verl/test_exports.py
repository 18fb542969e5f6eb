"""verl reads the exports: MultiTurnSFTDataset, its RL dataset, and the output of agent loops."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import ExportedRun
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset

HERE = Path(__file__).parents[1]
PAGE = HERE.parents[1] / "docs" / "export.md"


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    name = "exported_run" if "exported_run" in request.fixturenames else "synthetic_run"
    run: ExportedRun = request.getfixturevalue(name)
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(run.folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made.chat_template = (HERE / "chatml.jinja").read_text(encoding="utf-8")
    return made


@pytest.mark.reads("verl")
def test_sft_trains_on_sampled_texts(
    exported_run: ExportedRun, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = OmegaConf.create(
        {"pad_mode": "no_padding", "max_length": 8192, "ignore_input_ids_mismatch": False}
    )
    data = MultiTurnSFTDataset(exported_run.export("verl"), tokenizer, config)
    trained = []
    for item in (data[i] for i in range(len(data))):
        kept = item["input_ids"][item["loss_mask"].bool()]
        trained.append(tokenizer.decode(kept))
    turns = [turn + "<|im_end|>" for text in trained for turn in text.split("<|im_end|>\n")[:-1]]
    assert Counter(turns) == Counter(exported_run.texts_before_foreign_answers())
    assert len(turns) in (12, 10)  # of 18: the others follow messages that were not sampled
    assert not any(foreign in text for foreign in exported_run.other_texts() for text in trained)


@pytest.mark.reads("verl")
def test_tools_are_in_the_prompt(
    synthetic_run: ExportedRun, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 8192})
    data = MultiTurnSFTDataset(synthetic_run.export("verl"), tokenizer, config)
    text = tokenizer.decode(data[0]["input_ids"])
    assert text.startswith("<|im_start|>system\nBe brief.\n[{")
    assert '"name": "read_file"' in text


@pytest.mark.reads("verl")
def test_tools_and_messages_are_read_without_null_keys(
    synthetic_run: ExportedRun, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """By the dataset of docs/export.md, as it is printed there, with its options."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "exact.py").write_text(block)
    path = synthetic_run.export("verl")
    options = re.findall(r"data\.\S+=\S+", block)
    with initialize_config_module("verl.trainer.config", version_base=None):
        options = [option.replace("=exact", f"={tmp_path}/exact") for option in options]
        config = compose("sft_trainer_engine", options).data
    plain = MultiTurnSFTDataset(path, tokenizer, config)[0]
    dataset = create_sft_dataset(path, config, tokenizer, None)
    exact = dataset[0]
    text = tokenizer.decode(exact["input_ids"])
    assert "null" in tokenizer.decode(plain["input_ids"])  # the keys of the other tool
    assert "null" not in text
    assert pd.read_parquet(path)["tools_json"][0].replace(" ", "") in text.replace(" ", "")
    trained = [row["input_ids"][row["loss_mask"].bool()].tolist() for row in (plain, exact)]
    assert trained[0] == trained[1] != []
    strict = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}"
    tokenizer.chat_template = (
        strict + "{% endif %}{{ m.role }}{% endfor %}"
    )  # like Llama 3's template
    assert tokenizer.decode(dataset[0]["input_ids"])


@pytest.mark.reads("verl-rl")
def test_rl_rows_are_agent_loop_outputs(exported_run: ExportedRun) -> None:
    rows = pd.read_parquet(exported_run.export("verl-rl")).to_dict("records")
    trained = []
    logprobs: list[float] = []
    for row in rows:
        output = AgentLoopOutput(
            prompt_ids=list(row["prompt_ids"]),
            response_ids=list(row["response_ids"]),
            response_mask=list(row["response_mask"]),
            response_logprobs=list(row["response_logprobs"]),
            reward_score=row["reward_score"],
            num_turns=row["num_turns"],
            metrics=AgentLoopMetrics(),
        )
        fields = output.as_dict()
        assert fields["responses"].shape == fields["response_mask"].shape
        assert fields["rollout_log_probs"].shape == fields["responses"].shape
        mask = fields["response_mask"].bool()
        logprobs += fields["rollout_log_probs"][mask].tolist()
        trained.append((fields["responses"].tolist(), mask.tolist()))
        facts = exported_run.truth[row["extra_info"]["trajectory_id"]]
        assert (row["reward_score"], row["uid"]) == (facts["reward"], facts["group"])
        assert any(row["prompt_ids"].tolist() == prompt for prompt in facts["prompts"])
    exported_run.check_tokens(trained)
    sampled = [p for facts in exported_run.truth.values() for lps in facts["logprobs"] for p in lps]
    assert sorted(logprobs) == pytest.approx(sorted(sampled), abs=1e-5)


@pytest.mark.reads("verl-rl")
def test_rl_rows_are_an_rl_dataset(
    synthetic_run: ExportedRun, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = OmegaConf.create(
        {"cache_dir": str(tmp_path), "max_prompt_length": 4096, "filter_overlong_prompts": False}
    )
    data = RLHFDataset(synthetic_run.export("verl-rl"), tokenizer, config)
    first: dict[str, Any] = data[0]
    assert [m["content"] for m in first["raw_prompt"]] == ["Be brief.", "List grüße."]
    assert first["index"] == 0
    assert first["data_source"] == "hermes_rl"
    for row in (data[i] for i in range(len(data))):
        facts = synthetic_run.truth[row["extra_info"]["trajectory_id"]]
        assert json.loads(row["tools_json"]) == facts["tools"]  # no key is null
