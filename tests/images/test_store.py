"""The image store: formats, invalid images, shared layers and pruning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from image_kit import archive, layer, layout, sha256

from hermes_rl.errors import UserError
from hermes_rl.sandboxes import ImageStore

LOW = layer({"bin/bash": "#!", "etc": None, "etc/a": "1", "gone": "x", "dir": None, "dir/x": "1"})
HIGH = layer({"etc/b": "2", ".wh.gone": "", "dir/.wh..wh..opq": "", "dir/y": "2"})


def read(store: ImageStore, name: str) -> dict[str, list[str]]:
    """Return the paths in each layer, by the name of its folder."""
    image = store.find(name)
    assert image is not None
    return {
        folder.name: sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
        for folder in store.folders(image)
    }


@pytest.mark.parametrize("kind", ["", "gzip", "zstd"])
@pytest.mark.parametrize("packed", [False, True])
def test_oci_layouts_and_their_archives_are_read(
    store: ImageStore, tmp_path: Path, kind: str, packed: bool
) -> None:
    settings = {"Env": ["A=1", "B=x=y"], "WorkingDir": "/srv", "User": "app:app"}
    source = layout(tmp_path / "oci", [LOW, HIGH], kind, **settings)
    if packed:
        source = archive(source, tmp_path / "oci.tar")
    image = store.add(source, "mine")
    assert image.layers == (sha256(LOW), sha256(HIGH)), (
        "named by their content, with any compression"
    )
    assert (image.env, image.workdir, image.user) == ({"A": "1", "B": "x=y"}, "/srv", "app")
    low, high = store.folders(image)
    assert (low / "gone").read_text() == "x"
    removed = (high / "gone").lstat()
    assert (os.major(removed.st_rdev), os.minor(removed.st_rdev)) == (0, 0)
    assert os.getxattr(high / "dir", "user.overlay.opaque") == b"y"
    assert read(store, "mine") == read(store, image.digest)


def test_archives_of_docker_save_are_read(store: ImageStore, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (folder / "abc").mkdir(parents=True)
    (folder / "abc/layer.tar").write_bytes(LOW)
    config = {"config": {"Env": None}, "rootfs": {"diff_ids": [sha256(LOW)]}}
    (folder / "config.json").write_text(json.dumps(config))
    listed = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": ["abc/layer.tar"]}]
    (folder / "manifest.json").write_text(json.dumps(listed))
    assert store.add(archive(folder, tmp_path / "saved.tar"), "x").layers == (sha256(LOW),)
    listed[0]["Config"] = "../../etc/passwd"
    (folder / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(UserError, match="a path out of the archive"):
        store.add(archive(folder, tmp_path / "saved.tar"), "y")


def test_layers_are_stored_once(store: ImageStore, tmp_path: Path) -> None:
    store.add(layout(tmp_path / "a", [LOW, HIGH]), "a")
    store.add(layout(tmp_path / "b", [LOW, layer({"c": "3"})], "gzip"), "b")
    assert len([p for p in store.root.glob("l/*") if p.is_dir()]) == 3
    assert [one.name for one in store.named()] == ["a", "b"]


@pytest.mark.parametrize("what", ["layer", "config", "manifest"])
def test_damaged_images_are_refused_and_leave_no_files(
    store: ImageStore, tmp_path: Path, what: str
) -> None:
    source = layout(tmp_path / "oci", [LOW, HIGH])
    manifest = json.loads((source / "index.json").read_text())["manifests"][0]["digest"]
    form = json.loads((source / "blobs/sha256" / manifest[7:]).read_text())
    digest = {
        "layer": form["layers"][1]["digest"],
        "config": form["config"]["digest"],
        "manifest": manifest,
    }[what]
    blob = source / "blobs/sha256" / digest[7:]
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(UserError):
        store.add(source, "bad")
    assert store.find("bad") is None
    assert [*store.root.glob("scratch/*")] == []


def test_layers_cannot_write_outside_their_folder(store: ImageStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    hostile = layer({"way": f"-> {outside}", "way/file": "x", "../../escaped": "x"})
    try:
        store.add(layout(tmp_path / "oci", [hostile]), "hostile")
    except UserError:
        pass
    assert [*outside.iterdir()] == []
    assert [*store.root.parent.rglob("escaped")] == []


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b broken"])
def test_what_is_not_an_image_is_refused(store: ImageStore, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"file\.tar"):
        store.add(tmp_path / "file.tar", "x")
    with pytest.raises(UserError, match="no such file"):
        store.add(tmp_path / "absent", "x")


def test_the_image_for_this_architecture_is_chosen(store: ImageStore, tmp_path: Path) -> None:
    source = layout(tmp_path / "oci", [LOW])
    index = json.loads((source / "index.json").read_text())
    here = {**index["manifests"][0], "platform": {"os": "linux", "architecture": "amd64"}}
    arm = {**here, "platform": {"os": "linux", "architecture": "arm64"}}
    other = {"digest": sha256(b"absent"), "platform": {"os": "windows", "architecture": "amd64"}}
    (source / "index.json").write_text(json.dumps({"manifests": [other, here, arm]}))
    assert store.add(source, "x").layers == (sha256(LOW),)
    (source / "index.json").write_text(json.dumps({"manifests": [other, other]}))
    with pytest.raises(UserError, match="no image for linux/"):
        store.add(source, "x")


def test_pruning_keeps_recently_used_images(store: ImageStore, tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        image = store.add(layout(tmp_path / name, [LOW, layer({name: name * 100})]), name)
        os.utime(store.root / "images" / f"{image.digest[7:]}.json", (number, number))
    low = sum(p.stat().st_size for p in store.folders(image)[0].rglob("*") if p.is_file())
    assert store.prune(keep_bytes=low + 100) == 100
    assert [one.name for one in store.named()] == ["b"]
    assert store.prune() == low + 100
    assert [p for p in store.root.glob("l/*")] == []


HOLD = """
import sys
from hermes_rl.sandboxes import ImageStore
assert ImageStore().find("a")
print("held", flush=True)
sys.stdin.read()
"""


def test_images_in_use_are_not_pruned(store: ImageStore, tmp_path: Path) -> None:
    store.add(layout(tmp_path / "a", [LOW]), "a")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="a run uses images now"):
            store.prune()
        holder.communicate()
    assert store.prune() > 0


ADD = """
import sys
from pathlib import Path
from hermes_rl.sandboxes import ImageStore
ImageStore().add(Path(sys.argv[1]), sys.argv[2])
"""


def test_several_processes_may_add_the_same_layers(store: ImageStore, tmp_path: Path) -> None:
    source = str(layout(tmp_path / "oci", [LOW, HIGH], "gzip"))
    adding = [subprocess.Popen([sys.executable, "-c", ADD, source, name]) for name in "abc"]
    assert [process.wait(timeout=120) for process in adding] == [0, 0, 0]
    assert [one.name for one in store.named()] == ["a", "b", "c"]
    assert [*store.root.glob("scratch/*")] == []
