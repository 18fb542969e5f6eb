"""TRL's trainers take rollouts of `rollouts()`: every sampled token reaches the loss, once.

The rows are caught inside of `compute_loss` and compared with the log of the engine.
"""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import live_engine, write_tiny_model
from live_truth import GroupTruth, Term, context, read_truth, row_digest
from torch.nn.functional import scaled_dot_product_attention
from trainer_side import load_example, rows_of_batch
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, packing

from hermes_rl.store import load_run

ROOT = Path(__file__).parents[3]
ENV = f"{ROOT / 'tests/consumers/talk.py'}:Talk"
STEPS = 6
ADVANTAGES = {0.8660: 1.0, -0.8660: 0.0}
"""Of two rewards 1 and two 0, (r - mean) / std, and the reward."""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tiny model on disk and, for `url`, an engine with its tokenizer."""
    with live_engine(request.config.getoption("--producer"), tmp_path) as url:
        (tmp_path / "url").write_text(url.removesuffix("/v1"))
        write_tiny_model(tmp_path / "model")
        yield tmp_path


class FileTransfer:
    """A WeightTransferProtocol: one file for each version, which the engine watches."""

    def __init__(self, folder: Path, version: int = 0) -> None:
        self.folder, self.version, self.calls = folder, version, []

    def init_weight_transfer(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.version += 1
        torch.save(dict(iterator), self.folder / "part")
        (self.folder / "part").rename(self.folder / f"{self.version}.safetensors")

    def resume(self) -> None:
        self.calls.append("resume")

    def destroy(self) -> None:
        self.calls.append("destroy")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    *_: int,
    softmax_scale: float | None,
    **__: Any,
) -> torch.Tensor:
    """The attention of TRL's kernel for GPUs: each stretch of queries sees its own keys, causally
    from the end."""
    made = []
    for at in range(len(starts) - 1):
        q = query[starts[at] : starts[at + 1]].transpose(0, 1)
        k, v = (x[key_starts[at] : key_starts[at + 1]].transpose(0, 1) for x in (key, value))
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        sees = sees.tril(k.shape[1] - q.shape[1])
        made.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=sees, scale=softmax_scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(made)


def rows_of_tree(inputs: dict[str, torch.Tensor]) -> list[tuple[list[Term], float]]:
    """The loss terms and the advantage of each row that TRL packed into a prefix tree."""
    kept = inputs["attention_mask"][0].bool()
    ids, labels = inputs["input_ids"][0][kept].tolist(), inputs["shift_labels"][0][kept].tolist()
    keys, starts, key_starts = (
        inputs[name][0][inputs[name][0] >= 0].tolist()
        for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    )
    before = []
    for at, (first, end) in enumerate(pairwise(starts)):
        path = [ids[key] for key in keys[key_starts[at] : key_starts[at + 1]]]
        shared = len(path) - (end - first)
        before += [context(path[: shared + n + 1]) for n in range(end - first)]
    selected = inputs["token_index"][0] >= 0
    names = ("token_index", "old_log_probs", "advantages", "segment_id")
    rows: dict[int, tuple[list[Term], float]] = {}
    for place, logprob, advantage, row in zip(
        *(inputs[name][0][selected].tolist() for name in names), strict=True
    ):
        rows.setdefault(row, ([], advantage))[0].append((before[place], labels[place], logprob))
    return list(rows.values())


def check(trained: list[tuple[list[Term], float]], truth: dict[str, GroupTruth]) -> set[str]:
    """Each group that was touched was trained whole and once. Returns their ids."""
    digests = Counter(
        row_digest(terms, ADVANTAGES[math.copysign(0.8660, advantage)])
        for terms, advantage in trained
        if abs(advantage) == pytest.approx(math.sqrt(3) / 2, abs=1e-5)
    )
    assert digests.total() == len(trained)
    touched = {name for name, group in truth.items() if group.digests & digests}
    wanted = sum((truth[name].digests for name in touched), Counter())
    assert digests == wanted
    groups = [truth[name] for name in touched]
    assert sum(len(terms) for terms, _ in trained) == sum(group.tokens for group in groups)
    assert sum(group.forked for group in groups) >= 0.2 * sum(group.rollouts for group in groups)
    return touched


def test_async_grpo_trains_each_sampled_token_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The two things that TRL asks of a GPU: its attention kernel, and its speed for the log.
    kernel = SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    trained: list[tuple[list[Term], float]] = []
    losses: list[float] = []
    inner = AsyncGRPOTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *more: Any, **other: Any) -> Any:
        trained.extend(rows_of_tree(inputs))
        loss = inner(self, model, inputs, *more, **other)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(AsyncGRPOTrainer, "compute_loss", compute_loss)
    transfer = FileTransfer(folder / "weights")
    example = load_example("trl_async_grpo")
    trainer, checkpoint = example.make_trainer(
        ENV,
        str(folder / "model"),
        (folder / "url").read_text(),
        folder,
        group_size=4,
        weights=transfer,
        max_steps=STEPS,
        per_device_train_batch_size=6,  # two of a group's four rollouts have two rows
        token_budget=0,
        max_staleness=100,
        max_inflight_tasks=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_steps=2,
    )
    assert checkpoint is None
    trainer.train()
    truth = read_truth(folder, folder / "rollouts")
    assert len(check(trained, truth)) == STEPS
    assert all(math.isfinite(loss) for loss in losses)
    assert transfer.version == STEPS + 1  # before the first step, and after each
    run = load_run(folder / "rollouts")
    versions = {v for ids in run.segments.version_ids for v in ids if v >= 0}
    assert len(versions) > 1
    steps = run.deliveries.query("event == 'acknowledged'").step.tolist()
    assert len(steps) >= STEPS


def test_grpo_trains_each_sampled_token_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[list[Term], float]] = []
    example = load_example("trl_grpo")
    inner = example.RowTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *more: Any, **other: Any) -> Any:
        trained.extend(rows_of_batch(inputs))
        return inner(self, model, inputs, *more, **other)

    monkeypatch.setattr(example.RowTrainer, "compute_loss", compute_loss)
    trainer, checkpoint = example.make_trainer(
        ENV,
        str(folder / "model"),
        (folder / "url").read_text(),
        folder,
        group_size=4,
        max_steps=3,
        per_device_train_batch_size=4,  # a group has six rows
        gradient_accumulation_steps=3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_steps=2,
    )
    assert checkpoint is None
    trainer.train()
    run = load_run(folder / "rollouts-0")
    truth = read_truth(folder, folder / "rollouts-0")
    assert len(check(trained, truth)) == 6
    acknowledged = run.deliveries.query("event == 'acknowledged'")
    assert sorted(acknowledged.step) == sorted([1, 1, 2, 2, 3, 3])
