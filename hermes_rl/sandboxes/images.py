"""Images without a daemon: the layers of OCI images, each stored once and stacked by overlays.

    STORE/l/SHORT/             a layer's files, owned by the user of the sandboxes
    STORE/l/SHORT.json         its digest and the bytes that it holds
    STORE/images/DIGEST.json   an image: its layers, variables, working directory
    STORE/names/NAME           the digest of the image with that name
    STORE/logs/NAME.log        what a failed build printed
    STORE/build/               what buildah keeps between builds
    STORE/lock                 shared by processes whose sandboxes use images; exclusive to prune

Images come from OCI layouts, archives of `docker save`, root file systems in a tar archive,
registries (by skopeo) and Dockerfiles (by buildah). All files of a layer get one owner, because an
unprivileged overlay takes no writes to files of users that the sandbox does not know.

Formats: OCI image specification 1.1 (layout, manifest, config, whiteouts of layers).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hermes_rl.errors import TaskFault, UserError
from hermes_rl.locks import lock_within, try_lock
from hermes_rl.sandboxes.image_changes import OPAQUE_XATTR
from hermes_rl.sandboxes.programs import BuildFailed, Programs
from hermes_rl.sandboxes.slots import first_slot
from hermes_rl.sandboxes.watchdog import remove_tree

_INDEX = "index.json"
_DOCKER = "manifest.json"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_PIECE = 1 << 20
_SHORT = 16
"""Digits of a layer's digest in the name of its folder."""
OVERLAY_OPTIONS = 3000
"""Bytes for the paths of an image's layers in the options of an overlay: the rest of a page is for
the paths of its upper layers."""
_LOCK_S = 600.0
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NO_DEVICES = ("--exclude=dev/*", "--exclude=./dev/*", "--exclude=/dev/*")
"""Nobody but root may make device files, and sandboxes have a /dev of their own."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image in the store."""

    digest: str
    """`sha256:` and the digest of its configuration, or of its file system's archive."""
    layers: tuple[str, ...]
    """Digests of the uncompressed layers (diff ids), lowest first."""
    bytes: tuple[int, ...]
    """What the layers hold, in bytes."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str = ""
    """As the image says; empty is root."""
    source: str = ""
    """Where it came from."""

    @classmethod
    def read(cls, path: Path) -> Image:
        """Read its file. Raises: OSError, ValueError, TypeError."""
        form = json.loads(path.read_bytes())
        return cls(**{**form, "layers": tuple(form["layers"]), "bytes": tuple(form["bytes"])})


@dataclass(frozen=True)
class Named:
    """An image with a name of it."""

    name: str
    image: Image
    used_at: float
    """Unix time of its last use."""


@dataclass(frozen=True)
class BuildOptions:
    """What builds may use of this machine, and no image keeps."""

    certificates: bool = False
    """Show the machine's certificates to builds: for networks behind a proxy with a certificate of
    its own."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the commands of `RUN` that a shell runs."""


TASK_PREFIX = "task:"
"""How names of images begin that are built for task folders."""
SIF_FOLDER = "apptainer"
"""Folder of the store with images in apptainer's format."""


def default_store() -> Path:
    """`HERMES_RL_IMAGES`, else a folder of the machine for root and of the user for others."""
    if named := os.environ.get("HERMES_RL_IMAGES"):
        return Path(named)
    if first_slot() is not None:
        return Path("/var/lib/hermes-rl/images")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "hermes-rl" / "images"


class ImageStore:
    """The images of this machine. Blocking: for threads.

    Args:
        root: its folder; made when something is stored.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_store()).absolute()
        first = first_slot()
        self._owner = None if first is None else first - 1
        """Whom layers belong to; None is ourselves."""
        self._held = -1
        self._programs = Programs()

    @property
    def stopped(self) -> bool:
        """`stop` was called."""
        return self._programs.stopped

    def stop(self) -> None:
        """End the pulls and builds that run, and refuse others. For any thread."""
        self._programs.stop()

    def find(self, name: str) -> Image | None:
        """The image with a name or digest; None when there is none. It stays while we live."""
        try:
            digest = name if name.startswith("sha256:") else self._name(name).read_text()
            path = self._image(digest)
            image = Image.read(path)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        self.hold()
        with contextlib.suppress(OSError):
            os.utime(path)
        return image if all(p.is_dir() for p in self.folders(image)) else None

    def folders(self, image: Image) -> tuple[Path, ...]:
        """The folders of an image's layers, lowest first."""
        return tuple(self._folder(layer) for layer in image.layers)

    def named(self) -> list[Named]:
        """All images that have names, by name."""
        found = []
        for entry in sorted(self.root.glob("names/*")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                path = self._image(entry.read_text())
                image = Image.read(path)
                found.append(Named(unquote(entry.name), image, path.stat().st_mtime))
        return found

    def add(self, source: Path, name: str) -> Image:
        """Store an OCI layout, an archive of one or of `docker save`, or a root file system in a
        tar archive, under a name.

        Raises: UserError when it is none of these, or damaged.
        """
        self.prepare()
        with self._scratch() as scratch:
            image = self._read(source, scratch)
        return self._keep(image, name)

    def pull(self, reference: str, name: str | None = None, *, login: Path | None = None) -> Image:
        """Fetch an image from a registry with skopeo.

        Args:
            reference: as for `docker pull`.
            name: to store it under; the reference without one.
            login: a file of credentials (`skopeo --authfile`).

        Raises: UserError when skopeo is missing; BuildFailed when it fails.
        """
        self.prepare()
        with self._scratch() as scratch:
            to = ["docker://" + reference, f"oci:{scratch / 'oci'}:latest"]
            key = ["--authfile", str(login)] if login else []
            copy = [find_program("skopeo"), "copy", "--quiet", *key, *to]
            self._programs.run(copy, f"cannot pull {reference}")
            return self.add(scratch / "oci", name or reference)

    def build(
        self,
        context: Path,
        name: str,
        *,
        dockerfile: Path | None = None,
        timeout_s: float = 600.0,
        options: BuildOptions | None = None,
        archive: Path | None = None,
        turn: contextlib.AbstractContextManager[object] = contextlib.nullcontext(),
    ) -> None:
        """Build a Dockerfile with buildah, and store the image under its name.

        Args:
            archive: takes the image, as `docker save` writes one, in place of the store.
            turn: held while buildah runs.

        Raises: UserError when buildah is missing; BuildFailed when the build fails.
        """
        self.prepare()
        with self._scratch() as scratch:
            file, shown = _shown(scratch, dockerfile or context / "Dockerfile", options)
            to = f"docker-archive:{archive}:docker.io/library/{name}"
            if archive is None:
                # buildah does not write layers whose file exists: stored ones are not copied.
                blobs = scratch / "oci" / "blobs" / "sha256"
                blobs.mkdir(parents=True)
                for known in self.root.glob("l/*.json"):
                    (blobs / _plain(json.loads(known.read_bytes())["digest"])).touch()
                to = f"oci:{scratch / 'oci'}:latest"
            # OCI's format has no SHELL: the instruction would be ignored. The last step goes where
            # the image is wanted: a push of its own would take as long as the build.
            command = ["build", "--isolation", "chroot", "--format", "docker", "--layers"]
            command += ["--tag", to, *shown, "--file", str(file), str(context)]
            try:
                with turn:
                    self._buildah(command, name, timeout_s)
            except BuildFailed as error:
                if _WRITTEN not in str(error):
                    raise
            if archive is None:
                self.add(scratch / "oci", name)

    def alias(self, name: str, local: Path) -> None:
        """Let Dockerfiles take `FROM name` from a local OCI layout or archive.

        Raises: UserError, BuildFailed.
        """
        self.prepare()
        kind = _kind(local)
        if kind == "rootfs":
            with tempfile.TemporaryDirectory() as empty:
                file = Path(empty) / "Dockerfile"
                file.write_text(f'FROM scratch\nADD {local.name} /\nCMD ["/bin/sh"]\n')
                where = ["--file", str(file), str(local.absolute().parent)]
                self._buildah(["build", "--isolation", "chroot", "--tag", name, *where], name)
            return
        transport = {"layout": "oci", "oci": "oci-archive", "docker": "docker-archive"}[kind]
        digest = self._buildah(["pull", "--quiet", f"{transport}:{local.absolute()}"], name)
        self._buildah(["tag", digest.split()[-1], name], name)

    def lock_file(self, name: str) -> Path:
        """What a process locks while it builds an image."""
        self.prepare()
        folder = self.root / "build"
        folder.mkdir(exist_ok=True)
        return folder / f"lock.{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def log(self, name: str) -> Path:
        """Where a failed build's output is kept."""
        return self.root / "logs" / f"{quote(name, safe='')}.log"

    def keep_log(self, name: str, log: str) -> Path:
        """Keep what a failed build printed, and return where."""
        path = self.log(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, log.encode("utf-8", "replace"))
        return path

    def prune(self, keep_bytes: int = 0) -> int:
        """Remove the images that were not used for longest until the rest holds at most so many
        bytes, and all layers that no image needs. Returns the bytes of the removed layers.

        Raises: UserError while sandboxes of another process use images.
        """
        self.prepare()
        with open(self.root / "lock") as lock:
            if self._held >= 0 or not try_lock(lock.fileno()):
                raise UserError(f"{self.root}: a run uses images now. Prune when it has ended")
            kept: dict[str, int] = {}
            for one in sorted(self.named(), key=lambda n: n.used_at, reverse=True):
                sizes = dict(zip(one.image.layers, one.image.bytes, strict=True))
                if sum({**kept, **sizes}.values()) <= keep_bytes:
                    kept |= sizes
                else:
                    self._name(one.name).unlink()
            left = {one.image.digest for one in self.named()}
            freed = 0
            for path in self.root.glob("images/*.json"):
                image = Image.read(path)
                if image.digest not in left:
                    path.unlink()
                    sizes = dict(zip(image.layers, image.bytes, strict=True))
                    freed += sum(size for layer, size in sizes.items() if self._drop(layer, kept))
            freed += self._drop_sifs(keep_bytes - sum(kept.values()))
            with self._scratch():
                pass
            if (self.root / "build").is_dir() and shutil.which("buildah"):
                self._buildah(["rmi", "--all", "--force"], "the build cache")
            return freed

    def _drop(self, layer: str, kept: Mapping[str, int]) -> bool:
        folder = self._folder(layer)
        if layer in kept or not folder.exists():
            return False
        remove_tree(folder)
        folder.with_suffix(".json").unlink(missing_ok=True)
        return True

    def _drop_sifs(self, keep_bytes: int) -> int:
        freed = 0
        paths = self.root.glob(f"{SIF_FOLDER}/*.sif")
        for path in sorted(paths, key=lambda p: p.stat().st_mtime, reverse=True):
            size = path.stat().st_size
            keep_bytes -= size
            if keep_bytes < 0:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink()
                freed += size
        return freed

    def prepare(self) -> None:
        """Make the folders of the store."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            path.chmod(0o711)  # whatever the umask took: sandboxes have users of their own
        for name in ("l", "images", "names", "scratch"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for path in (self.root, self.root / "l", self.root / "scratch"):
            path.chmod(0o711)
        (self.root / "lock").touch()

    def hold(self) -> None:
        """Keep images from being pruned while this process lives."""
        if self._held < 0:
            self._held = os.open(self.root / "lock", os.O_RDONLY | os.O_CLOEXEC)
            try_lock(self._held, shared=True)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        with open(self.root / "lock.scratch", "w") as lock:
            if not lock_within(lock.fileno(), _LOCK_S):
                raise UserError(f"{self.root}: another process cleans up for very long")
            self._sweep()
            folder = Path(tempfile.mkdtemp(dir=self.root / "scratch"))
            folder.chmod(0o711)
            held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try_lock(held)
        try:
            yield folder
        finally:
            remove_tree(folder)
            os.close(held)

    def _sweep(self) -> None:
        """Remove the scratch folders of processes that were killed, and secrets in them."""
        for entry in self.root.glob("scratch/*"):
            with contextlib.suppress(OSError):  # another process has just removed it
                held = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
                if try_lock(held):
                    remove_tree(entry)
                os.close(held)

    def _folder(self, layer: str) -> Path:
        """A short path: the kernel takes 4,096 bytes of options for an overlay."""
        return self.root / "l" / _plain(layer)[:_SHORT]

    def _name(self, name: str) -> Path:
        return self.root / "names" / quote(name, safe="")

    def _image(self, digest: str) -> Path:
        return self.root / "images" / f"{_plain(digest)}.json"

    def _keep(self, image: Image, name: str) -> Image:
        _write(self._image(image.digest), json.dumps(asdict(image)).encode())
        _write(self._name(name), image.digest.encode())
        self.log(name).unlink(missing_ok=True)
        return image

    def _read(self, source: Path, scratch: Path) -> Image:
        kind = _kind(source)
        if kind == "rootfs":
            layer = self._layer(source, None, scratch)
            return Image(digest=layer[0], layers=layer[:1], bytes=layer[1:], source=str(source))
        folder = source
        if source.is_file():
            folder = scratch / "archive"
            folder.mkdir()
            unpack = ["tar", "-x", "-f", str(source), "-C", str(folder)]
            self._programs.run(unpack, f"cannot read {source}")
        read = _docker_image if (folder / _DOCKER).is_file() else _oci_image
        try:
            config_bytes, blobs = read(folder)
            config = json.loads(config_bytes)
            diff_ids = config["rootfs"]["diff_ids"]
            if len(diff_ids) != len(blobs):
                raise ValueError("its configuration and its manifest differ in their layers")
        except (OSError, ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
            raise UserError(f"{source}: no readable image ({error!r:.200})") from error
        pairs = zip(blobs, diff_ids, strict=True)
        layers = [self._layer(blob, diff_id, scratch) for blob, diff_id in pairs]
        settings = config.get("config") or {}
        variables = (v.partition("=") for v in settings.get("Env") or ())
        return Image(
            digest="sha256:" + hashlib.sha256(config_bytes).hexdigest(),
            layers=tuple(layer for layer, _ in layers),
            bytes=tuple(size for _, size in layers),
            env={name: value for name, _, value in variables},
            workdir=settings.get("WorkingDir") or None,
            user=str(settings.get("User") or "").partition(":")[0],
            source=str(source),
        )

    def _layer(self, blob: Path, diff_id: str | None, scratch: Path) -> tuple[str, int]:
        """Unpack a layer, unless it is there: its digest, and the bytes that it holds.

        Raises: UserError when its content is not what the digest says.
        """
        if diff_id is not None and (size := self._size(diff_id)) is not None:
            return diff_id, size
        with open(self.root / "lock.layers", "w") as lock:
            if not lock_within(lock.fileno(), _LOCK_S):
                raise UserError(f"{self.root}: another process unpacks a layer for very long")
            folder = Path(tempfile.mkdtemp(dir=scratch))
            if self._owner is not None:
                os.chown(folder, self._owner, self._owner)
            found = "sha256:" + _unpack(blob, folder, self._owner)
            if diff_id is not None and found != diff_id:
                raise UserError(f"{blob}: the layer is damaged: {found} in the place of {diff_id}")
            if (size := self._size(found)) is None:
                size = _convert_whiteouts(folder)
                folder.chmod(0o755)
                target = self._folder(found)
                held = {"digest": found, "bytes": size}
                _write(target.with_suffix(".json"), json.dumps(held).encode())
                folder.rename(target)
            return found, size

    def _size(self, layer: str) -> int | None:
        """Bytes of a layer that is there."""
        folder = self._folder(layer)
        if not folder.is_dir():
            return None
        held = json.loads(folder.with_suffix(".json").read_bytes())
        if held["digest"] != layer:
            raise UserError(f"{folder}: holds {held['digest']}, whose digest begins like {layer}")
        return int(held["bytes"])

    def _buildah(self, arguments: Sequence[str], name: str, timeout_s: float = 600.0) -> str:
        build = self.root / "build"
        build.mkdir(exist_ok=True)
        places = ["--root", str(build / "root"), "--runroot", str(build / "run")]
        driver = ["--storage-driver", "overlay"]
        command = [find_program("buildah"), *places, *driver, *arguments]
        return self._programs.run(command, f"cannot build {name}", timeout_s)


_WRITTEN = "locating new copy of image"
"""How buildah fails after it has written an image of which it had built all steps before: it looks
for the copy in its own storage."""


def _plain(digest: str) -> str:
    """A digest as a file name. Raises: ValueError for any other text."""
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"not a SHA-256 digest: {digest[:80]!r}")
    return value


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}~")
    temporary.write_bytes(data)
    temporary.rename(path)


def find_program(name: str) -> str:
    """Where a program is. Raises: UserError when it is missing; it says what to install."""
    found = shutil.which(name)
    if found is None:
        raise UserError(
            f"{name} is not installed, which this needs. Install it: apt install {name}"
        )
    return found


_ENV_FOLDER = "/run/hermes-rl-build"
_FROM = re.compile(r"\s*FROM\s", re.IGNORECASE)
_DOCUMENT = re.compile(r"(?<![<\w])<<-?[\"']?([A-Za-z_]\w*)")
_SHELL = ["/bin/sh", "-c", f'. {_ENV_FOLDER}/env && exec /bin/sh -c "$0"']


def _shown(scratch: Path, file: Path, options: BuildOptions | None) -> tuple[Path, list[str]]:
    """The Dockerfile to build, and arguments of buildah that show a build what it may use.

    Build arguments and variables of buildah are kept in an image's configuration. Instead, the
    shell of `RUN` reads a file that is mounted.
    """
    options = options or BuildOptions()
    shown = ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"] if options.certificates else []
    if not options.env:
        return file, shown
    closed = scratch / "env"  # the folder in it is open to the users of images
    closed.mkdir(mode=0o700)
    (closed / "shown").mkdir()
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in options.env.items()]
    (closed / "shown" / "env").write_text("".join(lines))
    for path, mode in ((closed / "shown", 0o755), (closed / "shown" / "env", 0o644)):
        path.chmod(mode)  # whatever the umask took
    (closed / "Dockerfile").write_text(_with_shell(file.read_text(encoding="utf-8")))
    return closed / "Dockerfile", [*shown, "--volume", f"{closed / 'shown'}:{_ENV_FOLDER}:ro"]


def _with_shell(dockerfile: str) -> str:
    """A Dockerfile with our shell in each stage, until the stage sets its own."""
    made: list[str] = []
    begins, is_from, documents = True, False, list[str]()
    for line in dockerfile.splitlines():
        made.append(line)
        if begins and documents:
            documents = documents[line.strip() == documents[0] :]
            continue
        if begins:
            is_from = bool(_FROM.match(line))
        # Comments and empty lines may be within an instruction.
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begins = not line.rstrip().endswith("\\")
        documents += _DOCUMENT.findall(line) if not is_from else ()
        if begins and is_from:
            made.append("SHELL " + json.dumps(_SHELL))
            is_from = False
    return "\n".join(made) + "\n"


def _kind(source: Path) -> str:
    """`layout`, `oci` or `docker` (archives), or `rootfs`. Raises: UserError."""
    if source.is_dir():
        if (source / _INDEX).is_file():
            return "layout"
        raise UserError(
            f"{source}: no OCI layout (no {_INDEX}). A root file system needs no import"
        )
    if not source.is_file():
        raise UserError(f"{source}: no such file")
    listed = subprocess.run(["tar", "-t", "-f", str(source)], capture_output=True)
    names = {line.removeprefix(b"./") for line in listed.stdout.splitlines()}
    if listed.returncode != 0 or not names:
        raise UserError(f"{source}: not a tar archive")
    if _INDEX.encode() in names:
        return "oci"
    return "docker" if _DOCKER.encode() in names else "rootfs"


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / _plain(digest)


def _checked(folder: Path, digest: str) -> bytes:
    data = _blob(folder, digest).read_bytes()
    if hashlib.sha256(data).hexdigest() != _plain(digest):
        raise ValueError(f"damaged blob {digest}")
    return data


def _oci_image(folder: Path) -> tuple[bytes, list[Path]]:
    """The configuration of a layout's image for this machine, and the files of its layers."""
    form = json.loads((folder / _INDEX).read_bytes())
    while "manifests" in form:
        form = json.loads(_checked(folder, _chosen(form["manifests"])["digest"]))
    layers = [_blob(folder, layer["digest"]) for layer in form["layers"]]
    return _checked(folder, form["config"]["digest"]), layers


def _chosen(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
    for one in manifests:
        where = one.get("platform") or {}
        if (where.get("os"), where.get("architecture")) == ("linux", machine):
            return one
    if len(manifests) != 1:
        raise ValueError(f"no image for linux/{machine}")
    return manifests[0]


def _docker_image(folder: Path) -> tuple[bytes, list[Path]]:
    """The same of the first image in an unpacked archive of `docker save`."""
    first = json.loads((folder / _DOCKER).read_bytes())[0]
    paths = [folder / name for name in (first["Config"], *first["Layers"])]
    for path in paths:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"a path out of the archive: {path.name}")
    return paths[0].read_bytes(), paths[1:]


def _unpack(blob: Path, folder: Path, owner: int | None) -> str:
    """Unpack a layer as its owner, and return the SHA-256 digest of its uncompressed archive.

    Raises: UserError.
    """
    from pyarrow import ArrowException, input_stream

    with blob.open("rb") as file:
        magic = file.read(4)
    packed = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}.get(magic[:2])
    command = ["tar", "-x", "-f", "-", "-C", str(folder), "--no-same-owner", "-p", *_NO_DEVICES]
    as_owner: dict[str, Any] = {}
    if owner is not None:
        as_owner = {"user": owner, "group": owner, "extra_groups": []}
    digest = hashlib.sha256()
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **as_owner,
    ) as tar:
        assert tar.stdin is not None
        assert tar.stderr is not None
        try:
            with input_stream(str(blob), compression=packed) as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
                    tar.stdin.write(piece)
            tar.stdin.close()
        except (OSError, ArrowException) as error:
            tar.kill()
            why = tar.stderr.read().decode("utf-8", "replace").strip() or str(error)
            raise UserError(f"{blob}: the layer cannot be unpacked: {why[:200]}") from error
        why = tar.stderr.read().decode("utf-8", "replace").strip()
    if tar.returncode != 0:
        raise UserError(f"{blob}: the layer cannot be unpacked: {why[:200]}")
    return digest.hexdigest()


def _convert_whiteouts(folder: Path) -> int:
    """Put overlayfs's marks of removed files in the place of OCI's; returns the bytes of files."""
    held = 0
    for parent, _, files in os.walk(os.fsencode(folder)):
        for name in files:
            path = os.path.join(parent, name)
            text = os.fsdecode(name)
            if text == _OPAQUE:
                os.unlink(path)
                os.setxattr(parent, OPAQUE_XATTR, b"y")
            elif text.startswith(_WHITEOUT):
                os.unlink(path)
                target = os.path.join(parent, os.fsencode(text.removeprefix(_WHITEOUT)))
                os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))
            else:
                held += os.lstat(path).st_size
    return held


@cache
def _shared(root: Path) -> ImageStore:
    """One store for all sandboxes of a process: it holds its lock once."""
    return ImageStore(root)


def stored_image(name: str) -> tuple[Image, tuple[Path, ...]]:
    """An image of the default store, and its layers, lowest first.

    Raises: TaskFault when it is not there, or has too many layers for an overlay.
    """
    store = _shared(default_store())
    image = store.find(name)
    if image is None and name.startswith(("/", ".", "~")):
        raise TaskFault(f"no such image: {name}. Name a root file system directory")
    if image is None and (log := store.log(name)).is_file():
        raise TaskFault(f"image {name!r} could not be built. Log: {log}")
    if image is None:
        how = "build DATASET" if name.startswith(TASK_PREFIX) else f"pull {name}"
        raise TaskFault(
            f"image {name!r} is neither a folder nor in the store ({store.root}). "
            f"Run: hermes-rl images {how}"
        )
    folders = store.folders(image)
    if sum(len(f"/oldroot{folder}:") for folder in folders) > OVERLAY_OPTIONS:
        raise TaskFault(
            f"image {name!r} has {len(folders)} layers, more than one overlay takes here. Squash "
            "it (buildah build --squash), or put the store in a folder with a shorter path"
        )
    return image, folders
