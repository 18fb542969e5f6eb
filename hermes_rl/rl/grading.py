"""The workspace that an agent left, for rewards: scripts in grading boxes, files as bytes.

Nothing of the agent's runs any more when this is first used (DESIGN 5.9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hermes_rl.errors import SandboxDied, SandboxStartError, UserError
from hermes_rl.rl.faults import NoVerdict
from hermes_rl.sandboxes.base import GradingSpec, Sandbox
from hermes_rl.tasks import Verify
from hermes_rl.verify import BOXES, verify

_PUT = "put"
"""Folder below /verify with the files that `write_file` noted, and what puts them in place."""


@dataclass(frozen=True)
class BoxResult:
    """How a script ended in a grading box."""

    exit_code: int
    """124 after a timeout."""
    output: str
    """What it printed, its middle cut when it is long. The agent's code may print anything: do not
    read a reward from it."""
    timed_out: bool
    report: str
    """What it wrote to descriptor 3: at most 4 KB."""
    seconds: float

    @property
    def ok(self) -> bool:
        """It exited with 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass
class Grading:
    """Grading boxes over one rollout's workspace. Each `run` is a fresh one: what a script changes
    is not there for the next."""

    _sandbox: Sandbox
    _image: str | None = None
    seconds: float = 0.0
    """Spent in boxes so far."""
    _written: dict[str, bytes] = field(default_factory=dict)

    async def run(
        self,
        script: str,
        *,
        files: Mapping[str, bytes | str] | None = None,
        timeout_s: float = 120.0,
        image: str | None = None,
    ) -> BoxResult:
        """Run a bash script; $WORKSPACE is what the agent left, $VERIFY holds `files`, read-only.

        Raises: CannotJudge when no box could be had.
        """
        given = {name: _bytes(data) for name, data in (files or {}).items()}
        spec = GradingSpec(
            script=self._prelude(given) + script,
            files=given,
            timeout_s=timeout_s,
            score=True,
            image=image or self._image,
        )
        faults: list[str] = []
        for _ in range(BOXES):
            try:
                result = await self._sandbox.grade(spec)
            except (SandboxDied, SandboxStartError) as fault:
                faults.append(f"{type(fault).__name__}: {fault}")
                continue
            self.seconds += result.seconds
            return BoxResult(
                exit_code=result.exit_code,
                output=result.output,
                timed_out=result.timed_out,
                report=result.report.decode("utf-8", "replace").strip(),
                seconds=result.seconds,
            )
        raise NoVerdict(f"no grading box after {BOXES} tries; the last: {faults[-1]}")

    async def verify(self, verifier: Verify | None) -> float:
        """The reward of a task's own verifier (DESIGN 5.1): `task.verify`.

        Raises: CannotJudge; UserError for a task without one.
        """
        if verifier is None:
            raise UserError("the task has no 'verify'")
        graded = await verify(self._sandbox, verifier)
        self.seconds += graded.seconds
        assert graded.reward is not None
        return graded.reward

    async def read_file(self, path: str) -> bytes:
        """A regular file of the workspace as the agent left it (or as `write_file` noted it).

        Raises: FileNotFoundError, IsADirectoryError, PermissionError; OSError for what is reached
            only over a symbolic link, or lies outside the workspace.
        """
        if path in self._written:
            return self._written[path]
        return await self._sandbox.read_left(path)

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Put a file into the workspace of every later box, over what the agent left there.

        Raises: UserError for a path out of the workspace.
        """
        if path.startswith("/") or ".." in path.split("/") or "\0" in path or not path.strip("./"):
            raise UserError(f"write_file {path!r}: use a path inside the workspace")
        self._written[path] = _bytes(data)

    def _prelude(self, files: dict[str, bytes]) -> str:
        """Shell that puts the written files in place; they travel with the verifier's files."""
        if not self._written:
            return ""
        names = list(self._written)
        for number, name in enumerate(names):
            files[f".{_PUT}/{number}"] = self._written[name]
            files[f".{_PUT}/{number}.path"] = name.encode() + b"\0"
        return (
            f"for _hx_n in $(seq 0 {len(names) - 1}); do\n"
            f'  IFS= read -r -d "" _hx_p <"$VERIFY/.{_PUT}/$_hx_n.path"\n'
            '  mkdir -p -- "$(dirname -- "$WORKSPACE/$_hx_p")" &&\n'
            '  rm -rf -- "$WORKSPACE/$_hx_p" &&\n'
            f'  cp -- "$VERIFY/.{_PUT}/$_hx_n" "$WORKSPACE/$_hx_p" || exit 125\n'
            "done\nunset _hx_n _hx_p\n"
        )


def _bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)
