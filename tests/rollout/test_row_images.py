"""Images of messages are stored in a separate column and can be restored."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_runner import Silent, arun_batch
from hermes_rl.config import parse_config
from hermes_rl.export import export_run
from hermes_rl.images import with_images, without_images
from hermes_rl.record import Image
from hermes_rl.rl import Rollout
from hermes_rl.store import load_run

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


def picture(data: bytes, kind: str = "png", **more: Any) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


FAR = {"type": "image_url", "image_url": {"url": "https://x.test/a.png", "detail": "low"}}
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5)),
    st.builds(picture, st.binary(max_size=20), st.sampled_from(["png", "jpeg", "svg+xml"])),
    st.builds(lambda data: picture(data, detail="high"), st.binary(max_size=5)),
    st.just(FAR),
    st.just({"type": "image"}),
    st.just({"type": "image_url"}),
    st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}),
    st.just({"type": "image_url", "image_url": {"url": "data:text/plain,x"}}),
    st.just({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
)
forms = st.builds(
    lambda content: {"role": "user", "content": content}, st.text() | st.lists(parts, max_size=4)
)


@given(st.lists(forms, max_size=4))
def test_extracted_images_can_be_restored(conversation: list[dict[str, Any]]) -> None:
    taken: list[Image] = []
    rows = [without_images(form, taken) for form in conversation]
    shown = [p for form in rows if isinstance(form["content"], list) for p in form["content"]]
    assert sum(part["type"] == "image" for part in shown) == len(taken)
    columns = [{"bytes": image.bytes, "path": image.path} for image in taken]
    assert with_images(rows, columns) == conversation


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/svg+xml,%3Csvg%3E", b"<svg>"),
        ("data:image/svg+xml;charset=utf-8;base64,PHN2Zz4=", b"<svg>"),
    ],
)
def test_other_ways_to_write_an_image(url: str, data: bytes) -> None:
    for image in ({"url": url}, url):
        taken: list[Image] = []
        form = {"role": "user", "content": [{"type": "image_url", "image_url": image}]}
        without_images(form, taken)
        assert taken == [Image(bytes=data, path="0.svg+xml")]


PROMPT = [
    {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture(DOT), FAR]},
    {"role": "assistant", "content": "A dot."},
    {"role": "user", "content": [picture(DOT, "jpeg"), {"type": "text", "text": "And this?"}]},
]


def test_rows_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "seen", "prompt": PROMPT}) + "\n")
    out = tmp_path / "run"
    config = {
        "dataset": {"path": str(tmp_path / "tasks.jsonl")},
        "model": {"name": "noop"},
        "sandbox": {"backend": "none"},
        "run": {"out": str(out), "workers": 0, "allow_unsandboxed": True},
    }
    asyncio.run(arun_batch(parse_config(config), progress=Silent()))
    [row] = load_run(out).arrow("trajectories").to_pylist()
    assert row["image_data"] == [
        {"bytes": DOT, "path": "0.png"},
        {"bytes": None, "path": "https://x.test/a.png"},
        {"bytes": DOT, "path": "2.jpeg"},
    ]
    messages = [json.loads(text) for text in row["messages"]]
    message = [m["content"] for m in messages if m["role"] == "user"]
    text = {"type": "text", "text": "What is it?"}
    assert message[0] == [text, {"type": "image"}, {"detail": "low", "type": "image"}]
    assert message[1] == [{"type": "image"}, {"type": "text", "text": "And this?"}]
    assert row["task_prompt"] == "And this?"
    infos = [info for info in row["message_info"] if info["role"] == "user"]
    assert max(info["chars"] for info in infos) < 200
    [part] = out.glob("trajectories/*.parquet")
    assert pq.read_schema(part).field("image_data").type.value_type.field("bytes").type == "binary"
    import datasets

    [read] = datasets.load_dataset("parquet", data_files=str(part), split="train", streaming=True)
    assert [image["bytes"] for image in read["image_data"]] == [DOT, None, DOT]

    whole = [m for m in Rollout.of_row(row).messages if m["role"] != "system"]
    assert whole[:3] == PROMPT
    export_run(out, "openai", tmp_path / "openai.jsonl")
    line = json.loads((tmp_path / "openai.jsonl").read_text())
    assert [m["content"] for m in line["messages"] if m["role"] == "user"] == [
        PROMPT[0]["content"],
        PROMPT[2]["content"],
    ]
