"""What a sampler sampled through `rollouts()`, compared with what a trainer computes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grpo import Row, rows_of
from model import Shape, Transformer, from_weights, load, logprobs_of, save
from processes import start_sampler
from tokenizer import write_tokenizer
from tokenizers import Tokenizer

from hermes_rl.models.local import ensure_weights, read_tokenizer
from hermes_rl.rl import (
    EnvConfig,
    Environment,
    Policy,
    Rollout,
    RolloutContext,
    Task,
    make_task,
    rollouts,
)

QUESTIONS = ("Tell me a story about a ship.", "What is 17 + 25?", "Write a list of four birds.")
CONFIG = {
    "model": {"max_tokens": 24},
    "sandbox": {"backend": "none"},
    "run": {"allow_unsandboxed": True},  # there are no tools
}


class TalkConfig(EnvConfig):
    """Without sandboxes and tools."""

    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()


class Talk(Environment[TalkConfig]):
    """Two answers to each question; the shorter they are, the higher the reward."""

    name, Config = "talk", TalkConfig

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """One for each question."""
        for number, question in enumerate(QUESTIONS):
            yield make_task(question, id=f"{split}-{seed}-{number}", limits={"max_turns": 2})

    async def reply(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> str | None:
        """Ask once more."""
        return "Tell me more." if len(trajectory.answers) == 1 else None

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        """By the length of the answers."""
        return 1 / (1 + len("".join(trajectory.answers)))


@dataclass(frozen=True)
class Parity:
    """How far the trainer's view of the sampled tokens is from the sampler's."""

    tokens: int
    """That are trained."""
    wrong_ids: int
    """Of them, those that the sampler did not sample as part of such an answer; and those that it
    sampled and that are not trained."""
    largest_difference: float
    """Of a logprob."""


def sampled_runs(row: Row) -> list[tuple[int, int]]:
    """Return the beginning and the end of each run of trained tokens."""
    marks = [False, *row.mask, False]
    edges = [place for place in range(len(row.mask) + 1) if marks[place] != marks[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@torch.no_grad()
def compare(
    rows: Sequence[Row], log: Sequence[Mapping[str, Any]], weights: Mapping[int, Transformer]
) -> Parity:
    """Compare rows with the sampler's own log, and their logprobs with those of a pass over the
    whole sequence by the weights that the row names.

    Args:
        log: `prompt`, `ids` and `version` of each answer that became part of a row.
        weights: by version.
    """
    left = Counter((tuple(one["prompt"]), tuple(one["ids"])) for one in log)
    tokens, wrong, largest = 0, 0, 0.0
    logprobs = {
        (version, number): values
        for version, model in weights.items()
        for number, values in _recomputed(model, version, rows)
    }
    for number, row in enumerate(rows):
        for start, end in sampled_runs(row):
            tokens += end - start
            key = (tuple(row.ids[:start]), tuple(row.ids[start:end]))
            wrong += 0 if left[key] else end - start
            left[key] -= left[key] > 0
            for place in range(start, end):
                recorded, version = row.logprobs[place], row.versions[place]
                if recorded is None or version not in weights:
                    largest = float("inf")
                else:
                    computed = float(logprobs[version, number][place])
                    largest = max(largest, abs(recorded - computed))
    missing = sum(len(ids) * count for (_, ids), count in left.items())
    return Parity(tokens, wrong + missing, largest)


def _recomputed(
    model: Transformer, version: int, rows: Sequence[Row]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield number and logprobs of each row with tokens of a version."""
    mine = [number for number, row in enumerate(rows) if version in row.versions]
    for start in range(0, len(mine), 8):
        batch = mine[start : start + 8]
        yield from zip(batch, logprobs_of(model, [rows[n].ids for n in batch]), strict=True)


@dataclass(frozen=True)
class Sampled:
    """Rows of two versions, and what made them."""

    rows: list[Row]
    log: list[dict[str, Any]]
    """The sampler's own."""
    weights: dict[int, Transformer]
    tokenizer: Tokenizer

    def compare(self, rows: list[Row] | None = None) -> Parity:
        """Compare these rows, or changed ones."""
        return compare(self.rows if rows is None else rows, self.log, self.weights)


async def sample(
    folder: Path, tokenizer: Path, weights: dict[int, Path], group_size: int = 4
) -> Sampled:
    """Make rollouts under each version.

    Args:
        folder: for the runs and the log.
        tokenizer: the folder of its files.
        weights: files of the two versions.
    """
    rows: list[Row] = []
    log = folder / "sampler.jsonl"
    with start_sampler(weights[min(weights)], log=log, version=min(weights)) as sampler:
        policy = Policy(
            model="policy", base_url=sampler.base_url, tokens="vllm", tokenizer=tokenizer
        )
        for version, path in weights.items():
            sampler.load(path, version)
            stream = rollouts(
                Talk,
                policy,
                out=folder / f"run-{version}",
                group_size=group_size,
                concurrency=12,
                seed=version,
                config=CONFIG,
            )
            async with stream:
                async for group in stream:
                    rows += rows_of(group)
                    await group.ack(step=version)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    answers = [line for line in lines if not line["request_id"].startswith("probe")]
    models = {version: load(path) for version, path in weights.items()}
    return Sampled(rows, answers, models, Tokenizer.from_file(str(tokenizer / "tokenizer.json")))


def changed(model: Transformer, amount: float) -> Transformer:
    """Return a second version: each weight differs, by about this share of its matrix's size."""
    torch.manual_seed(1)
    other = deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += amount * weight.std() * torch.randn_like(weight)
    return other


def shift_mask(row: Row) -> Row:
    """Train the token after each sampled one."""
    return Row(row.ids, [False, *row.mask[:-1]], row.logprobs, row.versions, row.advantage)


def swap_versions(row: Row) -> Row:
    """Name the other version."""
    swapped = [{1: 2, 2: 1}.get(version, version) for version in row.versions]
    return Row(row.ids, row.mask, row.logprobs, swapped, row.advantage)


def retokenize(row: Row, tokenizer: Tokenizer) -> Row:
    """Encode the text of the sampled tokens again, as a trainer of texts would."""
    ids, mask, logprobs, versions = [], [], [], []
    for place, trained in enumerate(row.mask):
        begins = trained and not row.mask[place - 1]
        if not trained:
            run = [row.ids[place]]
        elif begins:
            end = next((p for p in range(place, len(row.mask)) if not row.mask[p]), len(row.mask))
            text = tokenizer.decode(row.ids[place:end], skip_special_tokens=False)
            run = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            continue
        ids += run
        mask += [trained] * len(run)
        logprobs += [row.logprobs[place]] * len(run)
        versions += [row.versions[place]] * len(run)
    return Row(ids, mask, logprobs, versions, row.advantage)


def write_small(folder: Path) -> tuple[Path, dict[int, Path]]:
    """Write a tokenizer and two versions of a random model; return their places."""
    tokenizer = write_tokenizer(folder / "tokenizer", QUESTIONS)
    reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    torch.manual_seed(0)
    model = Transformer(Shape(reader.get_vocab_size(), width=96, layers=3, heads=4, kv_heads=2))
    weight, end = model.embedding.weight, reader.token_to_id("<|im_end|>")
    text = torch.randint(end, (1, 64))
    with torch.no_grad():  # a summand in all logits, larger in that of the end: answers do end
        weight[:, 0] = 1.0
        while model(text, text >= 0)[0].softmax(-1)[0, :, end].median() < 0.08:
            weight[end, 0] += 0.1
    return tokenizer, write_versions(folder, model, 0.3)


def write_smollm2(folder: Path) -> tuple[Path, dict[int, Path]]:
    """The same with the weights of SmolLM2-135M-Instruct (a download of 93 MB, then cached)."""
    file = asyncio.run(ensure_weights("local-tiny"))
    files, tokenizer = read_tokenizer(file), folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(files.tokenizer)
    (tokenizer / "chat_template.jinja").write_text(files.templates["default"], encoding="utf-8")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(files.named), encoding="utf-8")
    return tokenizer, write_versions(folder, read_gguf(file), 0.02)


GGUF_NAMES = {
    "attn_norm": "norm1",
    "ffn_norm": "norm2",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "out",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def read_gguf(path: Path) -> Transformer:
    """Read a Llama from llama.cpp's file, its quantized weights as float32."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def number(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    found = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    shape = Shape(
        vocabulary=found["token_embd.weight"].shape[0],
        width=number("embedding_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        kv_heads=number("attention.head_count_kv"),
        hidden=number("feed_forward_length"),
        rope_base=number("rope.freq_base"),
        epsilon=number("attention.layer_norm_rms_epsilon"),
    )
    weights = {
        "embedding.weight": found["token_embd.weight"],
        "norm.weight": found["output_norm.weight"],
    }
    for layer in range(shape.layers):
        for stored, name in GGUF_NAMES.items():
            weights[f"blocks.{layer}.{name}.weight"] = found[f"blk.{layer}.{stored}.weight"]
    return from_weights(shape, weights)


def write_versions(folder: Path, model: Transformer, amount: float) -> dict[int, Path]:
    """Write a model as version 1 and a changed one as version 2."""
    paths = {version: folder / f"weights-{version}.pt" for version in (1, 2)}
    save(model, paths[1])
    save(changed(model, amount), paths[2])
    return paths


BUGS: dict[str, Callable[[Row, Sampled], Row]] = {
    "as sampled": lambda row, sampled: row,
    "mask shifted": lambda row, sampled: shift_mask(row),
    "versions swapped": lambda row, sampled: swap_versions(row),
    "text retokenized": lambda row, sampled: retokenize(row, sampled.tokenizer),
}
