"""`hermes-rl images`: the images that sandboxes can run in, without a container engine."""

from __future__ import annotations

import sys
import time
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hermes_rl.cli.app import make_app
from hermes_rl.cli.errors import fail
from hermes_rl.errors import ExitCode, HermesError, UserError

if TYPE_CHECKING:
    from hermes_rl.sandboxes import Image, ImageBuilds, ImageStore

app = make_app("Images that sandboxes can run in: list, pull, import, build, prune.")

_Name = Annotated[str | None, typer.Option("--name", help="name to store it under")]


def _store() -> ImageStore:
    from hermes_rl.sandboxes import ImageStore

    return ImageStore()


@app.command("list")
def list_images() -> int:
    """Print the stored images, their sizes and when each was last used.

    \b
    hermes-rl images list
    """
    store = _store()
    named = store.named()
    for one in named:
        day = time.strftime("%Y-%m-%d", time.localtime(one.used_at))
        print(f"{sum(one.image.bytes) / 1e6:>10,.1f} MB  {day}  {one.name}")
    layers = {d: n for i in named for d, n in zip(i.image.layers, i.image.bytes, strict=True)}
    total = sum(layers.values()) / 1e6
    print(f"{len(named)} images, {len(layers)} layers, {total:,.1f} MB in {store.root}")
    return ExitCode.DONE


@app.command("pull")
def pull(
    reference: Annotated[str, typer.Argument(help="as for docker pull: ubuntu:24.04")],
    name: _Name = None,
    login: Annotated[
        Path | None, typer.Option(help="file of registry credentials (skopeo --authfile)")
    ] = None,
) -> int:
    """Fetch an image from a registry. Needs the program skopeo.

    \b
    hermes-rl images pull ubuntu:24.04
    """
    return _stored(_store().pull(reference, name, login=login), name or reference)


@app.command("import")
def import_image(
    source: Annotated[
        Path, typer.Argument(help="OCI layout, archive of docker save, or rootfs.tar")
    ],
    name: _Name = None,
) -> int:
    """Store an image from a file or folder.

    \b
    docker save my-image -o my-image.tar && hermes-rl images import my-image.tar --name my-image
    """
    known = name or source.name.partition(".")[0]
    return _stored(_store().add(source, known), known)


@app.command("build")
def build(
    dataset: Annotated[Path, typer.Argument(help="folder of task folders, or one task folder")],
    image_alias: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE: take FROM NAME from an OCI layout or archive"),
    ] = None,
    build_ca: Annotated[
        bool, typer.Option("--build-ca", help="show this machine's certificates to builds")
    ] = False,
    build_env: Annotated[
        list[str] | None,
        typer.Option(help="NAME: show this variable to the shell of RUN; no image keeps it"),
    ] = None,
    jobs: Annotated[int, typer.Option(help="builds at a time", min=1)] = 2,
    limit: Annotated[int | None, typer.Option(help="only the first N images", min=1)] = None,
) -> int:
    """Build the images of task folders that are not stored yet. Needs the program buildah.

    A run builds what it needs itself.

    \b
    hermes-rl images build tasks/
    hermes-rl images build tasks/ --image-alias ubuntu:24.04=ubuntu.tar --build-ca
    hermes-rl images build tasks/ --build-env PIP_INDEX_URL
    """
    from hermes_rl.sandboxes import ImageBuilds, build_options, missing_images
    from hermes_rl.task_folders import build_contexts, task_folders

    if not dataset.is_dir() or not task_folders(dataset):
        raise UserError(f"{dataset}: no task folder (task.toml and instruction.md, or task.yaml)")
    aliases: dict[str, Path] = {}
    for alias in image_alias or ():
        name, _, local = alias.partition("=")
        if not local:
            raise UserError(f"--image-alias {alias}: write NAME=FILE")
        aliases[name] = Path(local)
    options = build_options(build_env or (), certificates=build_ca)
    contexts = dict(list(build_contexts(dataset).items())[:limit])
    missing = missing_images(contexts)
    stored = len(contexts) - len(missing)
    print(f"{len(contexts)} images, {stored} of them are stored already", flush=True)
    failed = build_all(ImageBuilds(missing, options, aliases, jobs), sys.stdout)
    for error in failed:
        fail(error)
    return ExitCode.GIVEN_UP if failed else ExitCode.DONE


def build_all(builds: ImageBuilds, stream: TextIO) -> list[str]:
    """Build images, with a line on a stream for each end, and return why builds failed.
    Ctrl-C ends all builds. Raises: UserError."""
    try:
        if builds.contexts:
            builds.open()
        futures = [builds.build(image) for image in builds.contexts]
        failed: list[str] = []
        for number, future in enumerate(as_completed(futures), start=1):
            error = future.exception()
            if isinstance(error, HermesError):
                failed.append(str(error))
            elif error is not None:
                raise error
            ends = f", {len(failed)} failed" if failed else ""
            line = f"images: {number - len(failed)} of {len(futures)} built{ends}"
            print(line, file=stream, flush=True)
        return failed
    finally:
        builds.close()


@app.command("prune")
def prune(
    keep_gb: Annotated[
        float | None, typer.Option(help="keep the images used last, up to this size", min=0)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="keep none")] = False,
) -> int:
    """Remove images and the build cache. The images unused for longest go first.

    Without options, print what there is to remove, and remove nothing.

    \b
    hermes-rl images prune --keep-gb 20
    hermes-rl images prune --all
    """
    if everything == (keep_gb is not None):
        list_images()
        raise UserError("nothing is removed: add --all, or --keep-gb N to keep those used last")
    freed = _store().prune(int((keep_gb or 0) * 1e9))
    print(f"{freed / 1e6:,.1f} MB freed")
    return ExitCode.DONE


def _stored(image: Image, name: str) -> int:
    size = sum(image.bytes) / 1e6
    print(f"{name}: {image.digest[:19]}…, {len(image.layers)} layers, {size:,.1f} MB")
    return ExitCode.DONE
