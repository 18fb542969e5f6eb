"""Known benchmarks: their data from a hub at a fixed revision, and what refuses it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import fake_hub

LOAD = """
import json, sys
from hermes_rl.errors import UserError
from hermes_rl.evals import load_benchmark
for name in sys.argv[1:]:
    try:
        loaded = load_benchmark(name)
        print(json.dumps([loaded.version, [row["id"] for row in loaded.rows]]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def parquet(rows: list[dict[str, str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


FILES = {
    "README.md": b"",
    "main/train-00000-of-00001.parquet": parquet([{"question": "No.", "answer": "#### 0"}]),
    "main/test-00000-of-00001.parquet": parquet(
        [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    ),
    "full/test-00000-of-00001.parquet": parquet([{"task_id": "x" * 4000}]),
}


def load(names: tuple[str, ...], tmp_path: Path, address: str, **more: str) -> list[Any]:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": address, **more}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        check=True,
    )
    assert "etrying" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_data_is_read_from_a_hub_once_and_a_refusal_names_the_fix(tmp_path: Path) -> None:
    refused = {"Idavidrein/gpqa": (401, "GatedRepo")}
    with fake_hub("openai/gsm8k", FILES, refused, cut="google-research-datasets/mbpp") as hub:
        loaded, gated, cut = load(("gsm8k", "gpqa", "mbpp"), tmp_path, hub)
    version, ids = loaded
    assert version.startswith("openai/gsm8k@cc7b047b6e5b sha256:")
    assert len(ids) == 3
    assert "its licence has to be accepted. Do that on its page, and set HF_TOKEN" in gated
    assert "mbpp: google-research-datasets/mbpp@4bb6404fdc6c cannot be read" in cut

    again, absent = load(("gsm8k", "gpqa"), tmp_path, hub, HF_HUB_OFFLINE="1")
    assert again == loaded, "from the cache"
    assert "gpqa: Idavidrein/gpqa@633f5ee89ab8 " in absent
    assert "HF_HUB_OFFLINE is set. Unset it" in absent

    refused = {
        "openai/gsm8k": (404, ""),
        "Idavidrein/gpqa": (429, ""),
        "google-research-datasets/mbpp": (403, ""),
    }
    with fake_hub("a/b", FILES, refused) as hub:
        errors = load(("gsm8k", "gpqa", "mbpp"), tmp_path / "other", hub)
    for error, advice in zip(errors, ("no such dataset", "Wait some min", "a token"), strict=True):
        assert advice in error
        assert "\n" not in error
        assert "name a local file with --data" in error
