"""An `apptainer` for tests: runs `exec` through bubblewrap, and notes each command line.

    install(folder, "/usr/bin/bwrap")      # folder/apptainer, and folder/apptainer.log

It takes the options that `hermes_rl.sandboxes.apptainer` uses, on root file systems in folders and
images that its `build` made of archives of `docker save` (without deletions in layers), and refuses
others as apptainer does. As there, process 1 is not the command, missing places of binds are made
in the overlay, and the container's variables name the host's folders. Standard library only: it is
run by users who may not read the package.
"""

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "apptainer version 1.4.5-fake"


def install(folder: Path, bwrap: str, python: str = sys.executable, source: str = __file__) -> Path:
    """Make the program `apptainer` in a folder. Returns its path.

    Args:
        bwrap: the bubblewrap that it uses.
        python: an interpreter that its users can start.
        source: this file, where its users can read it.
    """
    program = folder / "apptainer"
    program.write_text(f'#!/bin/sh\nexec {python} -I -S {source} {bwrap} {program}.log "$@"\n')
    program.chmod(0o755)
    log = Path(f"{program}.log")
    log.touch()
    log.chmod(0o666)
    return program


def commands(program: Path) -> list[list[str]]:
    """The command lines of a program that `install` made, so far."""
    return [json.loads(line) for line in Path(f"{program}.log").read_text().splitlines()]


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of `apptainer exec`."""
    parser = argparse.ArgumentParser("apptainer exec", allow_abbrev=False, exit_on_error=False)
    for name in ("containall", "cleanenv", "no-home", "net"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("no-mount", "network", "pwd"):
        parser.add_argument(f"--{name}")
    for name in ("overlay", "bind"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def arguments(options: argparse.Namespace, brought: list[str]) -> list[str]:
    """The same for bubblewrap. Args: brought: NAME=VALUE of the image."""
    layers = [options.image]
    top = ["--ro-overlay"] if len(options.overlay) != 1 else []
    for overlay in options.overlay:
        folder, _, mode = overlay.partition(":")
        upper, work = Path(folder, "upper"), Path(folder, "work")
        if mode == "ro":
            layers.append(str(upper))
        else:
            upper.mkdir(exist_ok=True)
            work.mkdir(exist_ok=True)
            top = ["--overlay", str(upper), str(work)]
    listed = [part for layer in layers for part in ("--overlay-src", layer)]
    listed += [*top, "/", "--proc", "/proc", "--dev", "/dev"]
    listed += ["--size", str(64 << 20), "--tmpfs", "/dev/shm"]
    for bind in options.bind:
        source, target, *mode = bind.split(":")
        listed += ["--ro-bind" if mode == ["ro"] else "--bind", source, target]
    variables = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "APPTAINER_CONTAINER": options.image,
        "APPTAINER_BIND": ",".join(options.bind),
        "LANG": "C",
        "HOME": os.environ.get("HOME", "/"),
    }
    variables |= dict(pair.partition("=")[::2] for pair in brought)
    listed += ["--clearenv", *(p for item in variables.items() for p in ("--setenv", *item))]
    share = [] if options.net and options.network == "none" else ["--share-net"]
    return ["--unshare-all", *share, *listed, "--chdir", options.pwd or "/"]


def build(target: str, source: str) -> None:
    """Be `apptainer build`: the image is a file that names a folder with the root file system, and
    the image's variables."""
    kind, _, archive = source.partition(":")
    if kind != "docker-archive":
        sys.exit(f"FATAL:   While performing build: the fake cannot build from {source}")
    root = Path(tempfile.mkdtemp(prefix="root-", dir=Path(target).parent))
    with tarfile.open(archive) as tar:
        manifest = json.loads(read(tar, "manifest.json"))[0]
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=io.BytesIO(read(tar, layer))) as files:
                files.extractall(root)
        config = json.loads(read(tar, manifest["Config"])).get("config") or {}
    image = {"root": str(root), "env": config.get("Env") or []}
    Path(target).write_text(json.dumps(image))


def read(tar: tarfile.TarFile, name: str) -> bytes:
    """A file of an archive."""
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def main() -> None:
    """Be apptainer."""
    bwrap, log, *argv = sys.argv[1:]
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(argv) + "\n")
    if argv == ["--version"]:
        print(VERSION)
        return
    if argv[:2] == ["build", "--force"] and len(argv) == 4:
        build(*argv[2:])
        return
    if argv[:1] != ["exec"]:
        sys.exit(f'Error for command "apptainer": unknown command {argv[:1]}')
    try:
        options = parse(argv[1:])
    except argparse.ArgumentError as error:
        sys.exit(f'Error for command "exec": {error}')
    brought: list[str] = []
    if os.path.isfile(options.image):
        image = json.loads(Path(options.image).read_bytes())
        options.image, brought = image["root"], image["env"]
    if not os.path.isdir(options.image):
        sys.exit(f"FATAL:   could not open image {options.image}: no such file or directory")
    if not (options.containall and options.cleanenv):
        sys.exit("FATAL:   the fake runs contained commands only")
    os.execv(bwrap, ["bwrap", *arguments(options, brought), "--", *options.command])


if __name__ == "__main__":
    main()
