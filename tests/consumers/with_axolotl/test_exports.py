"""Axolotl reads the exports with its own detection, strategies and masks."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from axolotl.prompt_strategies import load
from axolotl.utils.data.wrappers import get_dataset_wrapper
from axolotl.utils.dict import DictDefault
from conftest import ExportedRun
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parents[1]


@pytest.fixture
def tokenizer(exported_run: ExportedRun) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(exported_run.folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    template = (HERE / "chatml.jinja").read_text(encoding="utf-8")
    made.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return made


def load_with_axolotl(
    path: str, tokenizer: PreTrainedTokenizerFast, cache: str, **dataset: Any
) -> Dataset:
    """Load a file as Axolotl does."""
    kind = "json" if path.endswith(".jsonl") else "parquet"
    data = load_dataset(kind, data_files=path, split="train", cache_dir=cache)
    config = DictDefault({"path": path, "type": "chat_template", **dataset})
    cfg = DictDefault(
        {"sequence_len": 8192, "train_on_inputs": False, "dataset_num_proc": 1, "eot_tokens": None}
    )
    wrapped, _ = get_dataset_wrapper(config, tokenizer, cfg, "chat_template", data)
    return wrapped


def trained_texts(tokenizer: PreTrainedTokenizerFast, data: Dataset) -> list[str]:
    return [tokenizer.decode([i for i in row["labels"] if i != -100]) for row in data]


@pytest.mark.reads("axolotl")
def test_messages_train_on_sampled_texts(
    exported_run: ExportedRun, tokenizer: PreTrainedTokenizerFast, cache: str
) -> None:
    data = load_with_axolotl(
        exported_run.export("axolotl"), tokenizer, cache, message_field_training="training"
    )
    exported_run.check(trained_texts(tokenizer, data))


@pytest.mark.reads("axolotl-tokens")
def test_tokens_are_trained_unchanged(
    exported_run: ExportedRun, tokenizer: PreTrainedTokenizerFast, cache: str
) -> None:
    data = load_with_axolotl(exported_run.export("axolotl-tokens"), tokenizer, cache)
    assert set(data.column_names) == {"input_ids", "attention_mask", "labels"}
    exported_run.check_tokens(
        (row["input_ids"], [label != -100 for label in row["labels"]]) for row in data
    )


@pytest.mark.reads("sharegpt")
def test_hermes_turns_train_on_every_gpt_turn(
    exported_run: ExportedRun, tokenizer: PreTrainedTokenizerFast, cache: str
) -> None:
    """From/value turns end before an assistant message that was not sampled."""
    data = load_with_axolotl(
        exported_run.export("sharegpt"),
        tokenizer,
        cache,
        field_messages="conversations",
        message_property_mappings={"role": "from", "content": "value"},
    )
    trained = trained_texts(tokenizer, data)
    turns = [turn for text in trained for turn in text.split("<|im_end|>")[:-1]]
    assert Counter(map(without_empty_reasoning, turns)) == Counter(
        without_empty_reasoning(text) for text in exported_run.texts_before_foreign_answers()
    )
    assert not any(foreign in text for foreign in exported_run.other_texts() for text in trained)


def without_empty_reasoning(text: str) -> str:
    """Remove the end of a turn, and the empty reasoning that the format adds."""
    return text.removesuffix("<|im_end|>").removeprefix("<think>\n</think>\n").strip()


@pytest.mark.reads("openai")
def test_openai_arguments_and_tools_are_decoded(
    exported_run: ExportedRun, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Axolotl reads OpenAI's format line by line and decodes the arguments itself."""
    cfg = DictDefault({"sequence_len": 8192, "train_on_inputs": False})
    strategy = load("chat_template", tokenizer, cfg, {"type": "chat_template"})
    lines = Path(exported_run.export("openai")).read_text(encoding="utf-8").splitlines()
    sampled = {normalize(text) for text in exported_run.sampled_texts()}
    read = 0
    for row in map(json.loads, lines):
        if any(m.get("weight") == 0 for m in row["messages"]) or "{never" in json.dumps(row):
            continue  # Axolotl ignores `weight`, and cannot decode invalid arguments
        out = strategy.tokenize_prompt(row)
        text = tokenizer.decode([i for i in out["labels"] if i != -100])
        turns = text.split("<|im_end|>")[:-1]
        assert len(turns) == sum(m["role"] == "assistant" for m in row["messages"])
        assert {normalize(turn) for turn in turns} <= sampled
        assert not any(foreign in text for foreign in exported_run.other_texts())
        read += 1
    assert read in (2, 4)


def normalize(text: str) -> str:
    """Remove reasoning, which the format does not have, and white space."""
    text = re.sub("<think>.*?</think>", "", text.removesuffix("<|im_end|>"), flags=re.DOTALL)
    return "".join(text.split())
