"""Axolotl reads the exports by its own detection, strategies and masks."""

import json
import re
from collections import Counter
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
def words(taught: Told) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(taught.folder / "tokenizer.json"),
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


@pytest.mark.reads("axolotl")
def test_messages_train_on_what_the_policy_said(
    taught: Told, words: PreTrainedTokenizerFast, cache: str
) -> None:
    data = prepared(taught.export("axolotl"), words, cache, message_field_training="training")
    taught.check(trained_texts(words, data))


@pytest.mark.reads("axolotl-tokens")
def test_tokens_are_taken_as_they_are(
    taught: Told, words: PreTrainedTokenizerFast, cache: str
) -> None:
    data = prepared(taught.export("axolotl-tokens"), words, cache)
    assert set(data.column_names) == {"input_ids", "attention_mask", "labels"}
    taught.check_tokens(
        (row["input_ids"], [label != -100 for label in row["labels"]]) for row in data
    )


@pytest.mark.reads("sharegpt")
def test_hermes_turns_train_on_every_gpt_turn(
    taught: Told, words: PreTrainedTokenizerFast, cache: str
) -> None:
    """The from/value form, read with names for its fields: what the policy said, but for what
    follows an assistant message of somebody else, which the form would train on."""
    data = prepared(
        taught.export("sharegpt"),
        words,
        cache,
        field_messages="conversations",
        message_property_mappings={"role": "from", "content": "value"},
    )
    trained = trained_texts(words, data)
    turns = [turn for text in trained for turn in text.split("<|im_end|>")[:-1]]
    assert Counter(map(tidy, turns)) == Counter(tidy(text) for text in taught.said_first())
    assert not any(foreign in text for foreign in taught.not_said() for text in trained)


def tidy(text: str) -> str:
    """Without its end, and the empty thoughts that the form opens a turn with."""
    return text.removesuffix("<|im_end|>").removeprefix("<think>\n</think>\n").strip()


@pytest.mark.reads("openai")
def test_openai_arguments_and_tools_are_decoded(
    taught: Told, words: PreTrainedTokenizerFast
) -> None:
    """Axolotl takes OpenAI's form line by line, decoding the text of arguments itself."""
    cfg = DictDefault({"sequence_len": 8192, "train_on_inputs": False})
    strategy = load("chat_template", words, cfg, {"type": "chat_template"})
    lines = Path(taught.export("openai")).read_text(encoding="utf-8").splitlines()
    sampled = {plain(text) for text in taught.said()}
    read = 0
    for row in map(json.loads, lines):
        if any(m.get("weight") == 0 for m in row["messages"]) or "{never" in json.dumps(row):
            continue  # no mark for a single message by that name; no JSON
        out = strategy.tokenize_prompt(row)
        text = words.decode([i for i in out["labels"] if i != -100])
        turns = text.split("<|im_end|>")[:-1]
        assert len(turns) == sum(m["role"] == "assistant" for m in row["messages"])
        assert {plain(turn) for turn in turns} <= sampled
        assert not any(foreign in text for foreign in taught.not_said())
        read += 1
    assert read in (2, 4)


def plain(text: str) -> str:
    """An answer without reasoning, which that form does not have, and white space."""
    text = re.sub("<think>.*?</think>", "", text.removesuffix("<|im_end|>"), flags=re.DOTALL)
    return "".join(text.split())
