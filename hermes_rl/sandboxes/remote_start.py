"""The first thing that a remote backend runs elsewhere: receives the code of `remote_helper`, keeps
it in a folder, and runs it. Standard library only, and nothing newer than Python 3.6: an older one
than the helper needs is reported.

    python3 -I -c TEXT NONCE DIGEST FOLDER      with the archive on standard input, its size first
"""

import hashlib
import io
import os
import stat
import sys
import tarfile
import tempfile

OLDEST = (3, 11)


def receive(size: int) -> bytes:
    """Read exactly so many bytes of standard input, and none of what follows."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit("the connection ended")
        data += more
    return data


def code_folder(base: str) -> str:
    """The folder for the code of all versions: ours, and writable for nobody else."""
    path = os.path.join(base, f"hermes-rl-code-{os.geteuid()}")
    os.makedirs(path, 0o755, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        sys.exit(f"{path} is not a folder of yours alone: remove it")
    return path


def install(archive: bytes, digest: str, base: str) -> str:
    """Unpack the code, once. Returns its folder."""
    if hashlib.sha256(archive).hexdigest() != digest:
        sys.exit("the code did not arrive as it was sent")
    above = code_folder(base)
    folder = os.path.join(above, digest[:16])
    if not os.path.isdir(folder):
        made = tempfile.mkdtemp(dir=above)
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(made)
        os.chmod(made, 0o755)
        try:
            os.rename(made, folder)
        except OSError:  # another connection was first
            if not os.path.isdir(folder):
                raise
    return folder


def main() -> None:
    """See the module."""
    nonce, digest, base = sys.argv[1:4]
    found = tuple(sys.version_info[:2])
    if found < OLDEST:
        sys.exit(f"its Python is {found[0]}.{found[1]}: name a newer one, 3.11 or later ('python')")
    archive = receive(int.from_bytes(receive(8), "big"))
    sys.path.insert(0, install(archive, digest, base or tempfile.gettempdir()))
    from hermes_rl.sandboxes import remote_helper

    remote_helper.main(nonce, base)


if __name__ == "__main__":
    main()
