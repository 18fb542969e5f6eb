"""The programs of docs/training.md, as they are printed there, train on a real run."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from conftest import ExportedRun
from trainer_side import QUICK, byte_tokenizer, tiny_model

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


@pytest.mark.reads("trl", "trl-tokens", "trl-grpo")
def test_the_programs_of_the_training_page(
    engine_run: ExportedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the name of the model is another one, and training ends after one step on the CPU."""
    tokenizer = byte_tokenizer(engine_run.folder)
    tokenizer.save_pretrained(tmp_path / "MODEL")
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / "MODEL")
    run = tmp_path / "runs" / "my-MODEL"
    (run / "exports").mkdir(parents=True)
    (run / "trajectories").symlink_to(engine_run.folder / "run" / "trajectories")
    for name in ("trl", "trl-tokens", "trl-grpo"):
        (run / "exports" / f"{name}.parquet").symlink_to(engine_run.export(name))
    losses = []

    class Trainer(trl.SFTTrainer):
        def train(self) -> None:
            losses.append(super().train().training_loss)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, **QUICK))
    monkeypatch.setattr(trl, "SFTTrainer", Trainer)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    blocks.sort(key=lambda block: "def one_branch_each" not in block)  # it is "see below" there
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert [0 < loss < 20 for loss in losses] == [True] * 3
    prompts = [row["prompt"] for row in names["rows"]]
    rows = names["rollout_func"](prompts, None)
    assert {*map(len, rows.values())} == {len(engine_run.truth)}
