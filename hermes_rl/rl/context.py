"""The context of one rollout for the methods of an environment."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hermes_rl.errors import NoVerdict, SandboxDied, SandboxStartError, UserError
from hermes_rl.judging import Judge, ModelHandle
from hermes_rl.sandboxes import GradingSpec, Sandbox
from hermes_rl.tasks import Verify
from hermes_rl.verify import BOXES, verify

T = TypeVar("T")

_WRITTEN = "put"
"""Folder below /verify with the files of `write_file` and their paths."""


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended in a grading sandbox."""

    exit_code: int
    """124 after a timeout."""
    output: str
    """Output of the script; the middle of long output is cut. Do not read a reward from it: code of
    the agent may print anything."""
    timed_out: bool
    report: str
    """Text that it wrote to descriptor 3, at most 4 KB."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass
class Grading:
    """The workspace that the agent left: files as bytes, and scripts in grading sandboxes.

    None of the agent's processes is alive when this is first used (DESIGN 5.9). Each `run` has a
    fresh sandbox: what a script changes is gone in the next.
    """

    _sandbox: Sandbox
    seconds: float = 0.0
    """Spent in grading sandboxes so far."""
    _written: dict[str, bytes] = field(default_factory=dict)

    async def run(
        self,
        script: str,
        *,
        files: Mapping[str, bytes | str] | None = None,
        timeout_s: float = 120.0,
        image: str | None = None,
    ) -> ScriptResult:
        """Run a bash script; $WORKSPACE is what the agent left, $VERIFY holds `files`, read-only.

        Raises: CannotJudge when no grading sandbox starts.
        """
        contents = {name: _bytes(data) for name, data in (files or {}).items()}
        spec = GradingSpec(
            script=self._prelude(contents) + script,
            files=contents,
            timeout_s=timeout_s,
            score=True,
            image=image,
        )
        failures: list[str] = []
        for _ in range(BOXES):
            try:
                result = await self._sandbox.grade(spec)
            except (SandboxDied, SandboxStartError) as fault:
                failures.append(f"{type(fault).__name__}: {fault}")
                continue
            self.seconds += result.seconds
            return ScriptResult(
                exit_code=result.exit_code,
                output=result.output,
                timed_out=result.timed_out,
                report=result.report.decode("utf-8", "replace").strip(),
                seconds=result.seconds,
            )
        raise NoVerdict(f"no grading sandbox after {BOXES} tries; the last: {failures[-1]}")

    async def verify(self, verifier: Verify | None) -> float:
        """Return the reward of a task's own verifier (DESIGN 5.1): `task.verify`.

        Raises: CannotJudge; UserError for a task without one.
        """
        if verifier is None:
            raise UserError("the task has no 'verify'")
        graded = await verify(self._sandbox, verifier)
        self.seconds += graded.seconds
        assert graded.reward is not None
        return graded.reward

    async def read_file(self, path: str) -> bytes:
        """Read a regular file of the workspace as the agent (or `write_file`) left it.

        Raises: FileNotFoundError, IsADirectoryError, PermissionError; OSError for a file that is
            reached only over a symbolic link, or is outside the workspace.
        """
        if path in self._written:
            return self._written[path]
        return await self._sandbox.read_left(path)

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Put a file into the workspace of every later `run`, over what the agent left there.

        Raises: UserError for a path outside the workspace.
        """
        if path.startswith("/") or ".." in path.split("/") or "\0" in path or not path.strip("./"):
            raise UserError(f"write_file {path!r}: use a path inside the workspace")
        self._written[path] = _bytes(data)

    def _prelude(self, files: dict[str, bytes]) -> str:
        """Add the written files to the verifier's; return the shell code that copies them."""
        if not self._written:
            return ""
        for number, (name, data) in enumerate(self._written.items()):
            files[f".{_WRITTEN}/{number}"] = data
            files[f".{_WRITTEN}/{number}.path"] = name.encode() + b"\0"
        return (
            f"for _hx_n in $(seq 0 {len(self._written) - 1}); do\n"
            f'  IFS= read -r -d "" _hx_p <"$VERIFY/.{_WRITTEN}/$_hx_n.path"\n'
            '  mkdir -p -- "$(dirname -- "$WORKSPACE/$_hx_p")" &&\n'
            '  rm -rf -- "$WORKSPACE/$_hx_p" &&\n'
            f'  cp -- "$VERIFY/.{_WRITTEN}/$_hx_n" "$WORKSPACE/$_hx_p" || exit 125\n'
            "done\nunset _hx_n _hx_p\n"
        )


def _require(value: T | None, why_absent: str) -> T:
    if value is None:
        raise UserError(why_absent)
    return value


def _bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


@dataclass
class RolloutContext:
    """The seed, state and helpers of one rollout.

    Which helpers exist depends on the method: `sandbox` in `start`, `grading` in `compute_reward`,
    `judge` and `user` wherever the run names such a model.
    """

    seed: int
    """Seed of this rollout: a function of the run's seed, the task and the index in the group."""
    split: str
    position: int
    """0-based index of the task in its stream."""
    member: int = 0
    """0-based index in the group."""
    state: dict[str, Any] = field(default_factory=dict)
    """State of this rollout; tools access it as `ToolContext.env`. Keep it plain (JSON), so that a
    stored rollout can be graded again."""
    _sandbox: Sandbox | None = field(default=None, repr=False)
    _grading: Grading | None = field(default=None, repr=False)
    _judge: Judge | None = field(default=None, repr=False)
    _user: ModelHandle | None = field(default=None, repr=False)
    _cpu: Callable[..., Awaitable[Any]] | None = field(default=None, repr=False)
    _rng: random.Random | None = field(default=None, repr=False)

    @property
    def rng(self) -> random.Random:
        """Random numbers of this rollout: the same in every attempt and on every machine.

        `compute_reward` has a series of its own, which is the same in a regrade.
        """
        if self._rng is None:
            self._rng = random.Random(self.seed)
        return self._rng

    @property
    def sandbox(self) -> Sandbox:
        """The agent's own sandbox. Raises: UserError outside `start`, and without a sandbox."""
        return _require(
            self._sandbox,
            "ctx.sandbox exists only in start(), and only with `sandboxed`; compute_reward has "
            "ctx.grading",
        )

    @property
    def grading(self) -> Grading:
        """The workspace that the agent left. Raises: UserError outside `compute_reward`."""
        return _require(
            self._grading, "ctx.grading exists only in compute_reward(), and with `sandboxed`"
        )

    @property
    def judge(self) -> Judge:
        """The model that judges. Raises: UserError when the run names none."""
        return _require(
            self._judge, "the run names no judge: set env.judge.name, and put 'judge' in `uses`"
        )

    @property
    def user(self) -> ModelHandle:
        """The model that plays the user. Raises: UserError when the run names none."""
        return _require(
            self._user, "the run names no user: set env.user.name, and put 'user' in `uses`"
        )

    async def cpu(self, function: Callable[..., T], *args: Any, timeout_s: float = 120.0) -> T:
        """Call a module-level function in another process, so that other rollouts continue.

        Args:
            function: found by module and name: no lambda, no method, no local function.
            args: values that pickle.
            timeout_s: seconds of running; then its process is killed.

        Raises: CannotJudge when the process died or ran too long; the function's own exceptions.
        """
        run = _require(self._cpu, "ctx.cpu has no processes here")
        result: T = await run(function, *args, timeout_s=timeout_s)
        return result
