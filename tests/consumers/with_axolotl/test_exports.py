"""Axolotl reads the exports by its own detection, strategies and masks."""

import json
from pathlib import Path
from typing import Any

import pytest
from axolotl.prompt_strategies import load
from axolotl.utils.data.wrappers import get_dataset_wrapper
from axolotl.utils.dict import DictDefault
from conftest import Told
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parents[1]


@pytest.fixture
def words(told: Told) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(told.folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    template = (HERE / "chatml.jinja").read_text(encoding="utf-8")
    made.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return made


def prepared(path: str, words: PreTrainedTokenizerFast, cache: str, **dataset: Any) -> Dataset:
    """What Axolotl makes of a file."""
    kind = "json" if path.endswith(".jsonl") else "parquet"
    data = load_dataset(kind, data_files=path, split="train", cache_dir=cache)
    config = DictDefault({"path": path, "type": "chat_template", **dataset})
    cfg = DictDefault(
        {"sequence_len": 8192, "train_on_inputs": False, "dataset_num_proc": 1, "eot_tokens": None}
    )
    wrapped, _ = get_dataset_wrapper(config, words, cfg, "chat_template", data)
    return wrapped


def trained_texts(words: PreTrainedTokenizerFast, data: Dataset) -> list[str]:
    return [words.decode([i for i in row["labels"] if i != -100]) for row in data]


def test_messages_train_on_what_the_policy_said(
    told: Told, words: PreTrainedTokenizerFast, cache: str
) -> None:
    data = prepared(told.export("axolotl"), words, cache, message_field_training="training")
    told.check(trained_texts(words, data))


def test_tokens_are_taken_as_they_are(
    told: Told, words: PreTrainedTokenizerFast, cache: str
) -> None:
    data = prepared(told.export("axolotl-tokens"), words, cache)
    assert set(data.column_names) == {"input_ids", "attention_mask", "labels"}
    told.check(trained_texts(words, data))


def test_hermes_turns_train_on_every_gpt_turn(
    told: Told, words: PreTrainedTokenizerFast, cache: str
) -> None:
    """The from/value form, read with names for its fields."""
    path = told.export("sharegpt")
    data = prepared(
        path,
        words,
        cache,
        field_messages="conversations",
        message_property_mappings={"role": "from", "content": "value"},
    )
    trained = trained_texts(words, data)
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for text, row in zip(trained, rows, strict=True):
        turns = [t["value"] + "<|im_end|>" for t in row["conversations"] if t["from"] == "gpt"]
        assert text == "".join(turns)
        assert "tool_response" not in text
        assert not any(foreign in text for foreign in ("(empty)", "Five."))


def test_openai_arguments_and_tools_are_decoded(told: Told, words: PreTrainedTokenizerFast) -> None:
    """Axolotl takes OpenAI's form line by line, decoding the text of arguments itself."""
    cfg = DictDefault({"sequence_len": 8192, "train_on_inputs": False})
    strategy = load("chat_template", words, cfg, {"type": "chat_template"})
    lines = Path(told.export("openai")).read_text(encoding="utf-8").splitlines()
    read = 0
    for row in map(json.loads, lines):
        if any(m.get("weight") == 0 for m in row["messages"]) or "{never" in json.dumps(row):
            continue  # no mark for a single message by that name; no JSON
        out = strategy.tokenize_prompt(row)
        text = words.decode([i for i in out["labels"] if i != -100])
        answers = [m for m in row["messages"] if m["role"] == "assistant"]
        assert text.count("<|im_end|>") == len(answers)
        assert not any(foreign in text for foreign in told.not_said())
        read += 1
    assert read == 2
