"""TRL trains on a run's Parquet files without preprocessing, and its chat templates lose nothing.

TRL's own parse_response must parse the calls of the agent back from the rendered text.
"""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from trainer_side import load_tokenizer, tiny_model
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import add_response_schema, parse_response

# One of each family that TRL ships with both a tool role and a parser of the rendered text.
READ_BACK = [
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "llama3_2",
    "nemotron_3_ultra",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_8",
]
# These write values between tags, and TRL's parser trims white space there.
TRIMMED = {"glm4moe", "nemotron_3_ultra", "qwen3_5_think", "qwen3_8"}
ONE_CALL_A_TURN = {"llama3_2", "gptoss"}
# TRL has no parser for two of these; lfm2_2_5 writes calls as Python without escaping quotes, so
# they cannot be parsed.
RENDERED = [*READ_BACK, "deepseekv3_training", "lfm2_2_5", "muse_glimmer"]

DISTINCT_CHARS = 10
"""Values of at least this length do not occur in a text by chance."""

Message = dict[str, Any]


def rows(parquet: list[str], cache: str) -> Dataset:
    return load_dataset("parquet", data_files=parquet, split="train", cache_dir=cache)


def train_one_step(data: Dataset, folder: Path, **settings: object) -> SFTTrainer:
    tokenizer = load_tokenizer("qwen3")
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        max_length=None,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        **settings,
    )
    trainer = SFTTrainer(
        model=tiny_model(len(tokenizer)),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    loss = trainer.train().training_loss
    assert 0 < loss < 20  # ln(259) = 5.6 for random weights
    return trainer


def test_sft_reads_the_files_without_preprocessing(
    parquet: list[str], cache: str, tmp_path: Path
) -> None:
    data = rows(parquet, cache)
    trainer = train_one_step(data, tmp_path)
    trained = [trainer.processing_class.decode(row["input_ids"]) for row in trainer.train_dataset]
    assert len(trained) == len(data)
    for row, text in zip(data, trained, strict=True):
        assert_all_values_occur(row["messages"], text)


def test_sft_streams_the_files_and_trains_only_on_assistant_messages(
    parquet: list[str], cache: str, tmp_path: Path
) -> None:
    data = load_dataset("parquet", data_files=parquet, split="train", streaming=True)
    train_one_step(data, tmp_path / "streamed")
    trainer = train_one_step(rows(parquet, cache), tmp_path / "masked", assistant_only_loss=True)
    for row in trainer.train_dataset:
        kept = [token for token in row["labels"] if token != -100]
        text = trainer.processing_class.decode(kept)
        assert 0 < len(kept) < len(row["labels"])
        assert "tool_response" not in text


@pytest.mark.parametrize("template", RENDERED)
def test_a_template_renders_every_value_once(template: str, parquet: list[str], cache: str) -> None:
    tokenizer = load_tokenizer(template)
    seen = 0
    for row in renderable_rows(rows(parquet, cache), template):
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        seen += assert_all_values_occur(row["messages"], text)
    assert seen >= 30


@pytest.mark.parametrize("template", READ_BACK)
def test_calls_are_parsed_back_from_rendered_text(
    template: str, parquet: list[str], cache: str
) -> None:
    tokenizer = add_response_schema(load_tokenizer(template))
    seen = 0
    for row in renderable_rows(rows(parquet, cache), template):
        for place, message in enumerate(row["messages"]):
            if message.get("tool_calls"):
                got = parse_back(tokenizer, row["messages"][: place + 1], row["tools"])
                assert comparable(got, template) == comparable(calls_of(message), template)
                seen += 1
    assert seen >= 15


def renderable_rows(data: Dataset, template: str) -> list[dict[str, Any]]:
    """The rows that a template can render: two of them allow only one call per turn."""
    most = 1 if template in ONE_CALL_A_TURN else 99
    return [row for row in data if all(len(calls_of(m)) <= most for m in row["messages"])]


def comparable(calls: list[Message], template: str) -> list[tuple[str, Message]]:
    """Names and arguments, without white space that the template's parser trims."""

    def trim(value: Any) -> Any:
        return value.strip() if isinstance(value, str) and template in TRIMMED else value

    return [(c["name"], {k: trim(v) for k, v in c["arguments"].items()}) for c in calls]


def parse_back(tokenizer: Any, messages: list[Message], tools: list[Message]) -> list[Message]:
    """Parse the text of the last message with TRL's parser."""
    before = tokenizer.apply_chat_template(
        messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    cut = common_length(before, whole)
    prefix, turn = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (whole[:cut], whole[cut:])
    )
    parsed = parse_response(tokenizer, turn, prefix=prefix, tools=tools)
    return [call["function"] for call in parsed.get("tool_calls", [])]


def common_length(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def calls_of(message: Message) -> list[Message]:
    return [call["function"] for call in message.get("tool_calls") or []]


def assert_all_values_occur(messages: list[Message], text: str) -> int:
    """Each argument value and result occurs in the text as often as in the messages.

    Returns: the number of distinct values.
    """
    results = [m["content"].strip() for m in messages if m["role"] == "tool"]
    arguments = [v for m in messages for call in calls_of(m) for v in call["arguments"].values()]
    parts = [m["content"] for m in messages] + [str(value) for value in arguments]
    distinct = [v for v in {*results, *map(str, arguments)} if len(v) >= DISTINCT_CHARS]
    for value in distinct:
        wanted = sum(occurrences(part, value) for part in parts)
        assert occurrences(text, value) == wanted, value
    return len(distinct)


def occurrences(text: str, value: str) -> int:
    """Count a value in a text: plain, or quoted by JSON or Python."""
    plain = json.dumps(value, ensure_ascii=False)[1:-1]
    twice = json.dumps(plain, ensure_ascii=False)[1:-1]
    spellings = {value, plain, twice, json.dumps(value)[1:-1], plain.replace("'", "\\'")}
    return sum(text.count(spelling) for spelling in spellings)
