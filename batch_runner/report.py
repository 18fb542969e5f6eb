"""The report of a run for people, programs and the exit code, and why it stopped early, in one line
with the place and the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hermes_rl.config import RunConfig
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.models.providers import DEFAULT_PROVIDER, resolve, shipped
from hermes_rl.text import many
from hermes_rl.usage import cost_text

_FIX = "Fix the error above"
_HINTS = {
    "billing": "Fix the billing of the account",
    "model_not_found": "Correct --model or --base-url",
    "disk": "Free some space",
    "cost_limit": "Raise the budget",
    "dataset": _FIX,
    "worker_lost": _FIX,
    "journal": "Do what it says",
    "store": "Check the object store and its credentials",
    "replaced": "Let the other driver end",
}
"""Cause of a stop -> the hint; a refused key has its own."""

_WAIT = "Wait until the provider answers again"
_OUTAGE_HINTS = {
    "nothing was answered within": "Look at the server, or raise endpoint.first_answer_seconds",
    "refused in the same words": "Correct what the server refuses",
}
"""Text of a special outage -> the hint."""

_CAUSED_BY_MODEL = ("auth", "billing", "model_not_found")


@dataclass(frozen=True)
class Stop:
    """Why a run stopped early."""

    cause: str
    """Key of `errors.CAUSES`; or `dataset`, whose next rows cannot be read; or `journal`, when that
    of a lost worker is damaged; or `store`, an object store that lacks rows at the end, or
    `replaced`, another driver of a run there."""
    detail: str
    """What happened, one line."""

    @property
    def _message(self) -> str:
        """The detail without the name of its class."""
        parts = self.detail.split(": ", 1)
        return parts[1] if len(parts) == 2 and parts[0].isidentifier() else self.detail

    @property
    def _use(self) -> str | None:
        """`env.judge`, `env.user` or a judge of `scoring`; None for a call of the policy."""
        found = re.match(r"(env\.(judge|user)|scoring\.judges\.\d+)(?=: )", self._message)
        return found[0] if found else None

    def explain(self, config: RunConfig, attempts: int) -> str:
        """`401 from api.example.com, 3 units tried`."""
        text, use = self._message, self._use
        if self.cause not in _CAUSED_BY_MODEL:
            return text.rstrip(".")
        endpoint = _endpoint_of(config, use)
        text = text.removeprefix(f"{use}: ")
        host = urlsplit(endpoint.base_url or _default_address(endpoint)).netloc or endpoint.provider
        status, _, more = text.partition(": ")
        reason = f" ({more.rstrip('.')})" if more else ""
        purpose = f" for {use}" if use else ""
        return f"{status} from {host}{purpose}{reason}, {many(attempts, 'unit')} tried"

    def hint(self, config: RunConfig) -> str:
        """What to do before running the same command again."""
        use, text = self._use, self._message
        if self.cause == "auth":
            return _hint_for_key(_endpoint_of(config, use), use)
        if self.cause == "model_not_found" and use:
            return f"Correct {use}.name or {use}.base_url"
        if self.cause == "outage":
            return next((hint for part, hint in _OUTAGE_HINTS.items() if part in text), _WAIT)
        if self.cause == "disk" and "is full" not in self.detail:
            return _FIX  # not full, but not writable
        return _HINTS.get(self.cause, _FIX)


def _endpoint_of(config: RunConfig, use: str | None) -> EndpointSection:
    """The endpoint for which the run stopped.

    Args:
        use: `env.judge`, `env.user` or a judge of `scoring`; None for the policy.
    """
    section, _, name = (use or "").rpartition(".")
    place = getattr(config.env, name, None) if section == "env" else None
    if section == "scoring.judges":
        place = config.scoring.judges[int(name)]
    if place is None:
        return config.endpoint
    changes = {"api_key_env": place.api_key_env}
    if place.base_url is not None or place.provider is not None:
        changes |= {"base_url": place.base_url, "provider": place.provider}
    elif place.api_key_env is None:
        return config.endpoint
    return config.endpoint.model_copy(update=changes)


def _default_address(endpoint: EndpointSection) -> str:
    provider = shipped().get(endpoint.provider or DEFAULT_PROVIDER)
    return (provider.base_url if provider else None) or ""


def _hint_for_key(endpoint: EndpointSection, use: str | None) -> str:
    """The hint for a refused key. Keys are read only from named variables and those of
    providers."""
    names = endpoint.key_names or _key_names(endpoint)
    if not names:
        where = f"--set {use}.api_key_env=NAME" if use else "--api-key-env NAME"
        return f"Name the variable that holds the key ({where})"
    if printed := [name for name in names if name in endpoint.key_commands]:
        return f"Fix the command of {' and '.join(printed)} in endpoint.key_commands"
    return f"Set {' and '.join(names)}"


def _key_names(endpoint: EndpointSection) -> tuple[str, ...]:
    try:
        return resolve(endpoint).key_names
    except UserError:  # a user-defined provider
        return ()


@dataclass(frozen=True)
class Report:
    """The result of a run. Figures cover all starts of the run directory."""

    path: str
    """The run directory."""
    run_id: str
    units: int | None
    """Of the dataset; None when it was not read completely."""
    done: int
    solved: int
    """Reward 1 or more."""
    graded: int
    mean_reward: float | None
    given_up: int
    open: int | None
    left: int
    """Units of earlier starts that are no longer in the dataset; they are kept."""
    bad_rows: int
    failed_attempts: int
    causes: Mapping[str, int]
    """Failed attempts by cause."""
    input_tokens: int | None
    output_tokens: int | None
    unknown_calls: int
    """Calls that a server may have served, with unknown usage."""
    cost_usd: float | None
    unpriced_calls: int
    seconds: float
    """Of this start."""
    resume: str
    """The command that resumes the run."""
    stopped: str | None = None
    """Cause that stopped this start before its end."""
    detail: str | None = None
    """What happened."""
    hint: str | None = None
    """What to do."""
    given_up_error: str | None = None
    """Why the last unit of this start was given up."""
    stats: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The content of stats.json."""
    limits: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """`rate_limits` and `budgets` as in manifest.json."""

    @property
    def exit_code(self) -> int:
        """DESIGN 5.6: 0 done, 1 done with units given up, 3 stopped, 130 interrupted."""
        if self.stopped == "interrupted":
            return ExitCode.INTERRUPTED
        if self.stopped in ("dataset", "journal"):
            return ExitCode.BAD_INPUT
        if self.stopped is not None:
            return ExitCode.STOPPED
        return ExitCode.GIVEN_UP if self.given_up else ExitCode.DONE

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "exit_code": self.exit_code}

    def lines(self) -> list[str]:
        """The summary for people."""
        lines = [self._units_line(), self._usage_line()]
        cache = self.stats.get("cache") or {}
        if cache.get("low"):
            lines.append(_cache_line(cache["read_share"], cache["expected_share"]))
        lines += exact_lines(self.stats.get("exact_tokens"), self.path)
        if unparsed := self.stats.get("calls", {}).get("suspected_unparsed"):
            lines.append(_unparsed_line(unparsed))
        if unsent := self.stats.get("calls", {}).get("unsent"):
            refused = ", ".join(
                f"{name} ({many(rows, 'attempt')})" for name, rows in unsent.items()
            )
            lines.append(f"warning: not sent, since the endpoint refused it: {refused}")
        lines += [text for lane in self.limits.get("rate_limits", ()) if (text := _limit(lane))]
        lines += [_budget(*item) for item in self.limits.get("budgets", {}).items()]
        if self.causes:
            lines.append(f"failed attempts: {self.failed_attempts} ({_causes(self.causes)})")
        if self.given_up:
            lines.append(self._given_up_line())
        if self.left:
            lines.append(
                f"no longer in the dataset: {many(self.left, 'unit')}, whose rows are kept"
            )
        if self.bad_rows:
            lines.append(
                f"{many(self.bad_rows, 'bad row')}: see {self.path}/failures, or hermes-rl check"
            )
        lines.append(f"trajectories: {self.path}/trajectories/*.parquet")
        if self.stopped is not None:
            lines.append(self._stop_line())
        return lines

    def _units_line(self) -> str:
        total = "" if self.units is None else f"/{self.units:,}"
        graded = f", {self.solved:,} solved" if self.graded else ", not graded" * (self.done > 0)
        mean = f", mean reward {self.mean_reward:.3g}" if self.mean_reward is not None else ""
        given_up = f", {self.given_up:,} given up" if self.given_up else ""
        still = f", {self.open:,} open" if self.open else ""
        return f"{self.path}: {self.done:,}{total} units done{graded}{mean}{given_up}{still}"

    def _usage_line(self) -> str:
        share = (self.stats.get("cache") or {}).get("read_share")
        cached = f" ({share:.0%} cached)" if share else ""
        tokens = f"{_number(self.input_tokens)} in{cached}, {_number(self.output_tokens)} out"
        unknown = f", {many(self.unknown_calls, 'call')} unknown" if self.unknown_calls else ""
        known = self.stats.get("known_cost_usd") if self.cost_usd is None else self.cost_usd
        return f"tokens: {tokens}{unknown} | cost: {cost_text(known, self.unpriced_calls)}"

    def _given_up_line(self) -> str:
        error = " ".join((self.given_up_error or "").split())[:300]
        why = f" (the last one: {error})" if error else ""
        more = f"hermes-rl show {self.path} --failed lists them, --retry-failed tries them again"
        return f"given up: {many(self.given_up, 'unit')}{why}; {more}"

    def _stop_line(self) -> str:
        if self.stopped == "interrupted":
            return f"interrupted. Resume with: {self.resume}"
        code = self.exit_code
        return f"stopped: {self.detail}. {self.hint}, then run the same command. (exit {code})"


def exact_lines(exact: Mapping[str, Any] | None, path: str) -> list[str]:
    """Lines on the exact tokens of a run and their problems."""
    if exact is None:
        return []
    rate = exact["fork_rate"]
    forks = "" if rate is None else f", {rate:.1%} of histories forked"
    lines = [
        f"exact tokens: {exact['trained_tokens']:,} to train in {exact['trainable']:,} of "
        f"{exact['segments']:,} segments{forks}"
    ]
    if exact["many_forks"]:
        lines.append(f"warning: many histories drift. See why: hermes-rl check {path} --tokens")
    if exact["rejected"]:
        lines.append(
            f"warning: {exact['rejected']:,} rollouts broke a rule of exact tokens and have no "
            f"segments. See hermes-rl check {path} --tokens"
        )
    return lines


def _unparsed_line(answers: int) -> str:
    return (
        f"warning: {answers:,} answers look like tool calls that were not parsed. Start the "
        "server with the parser of its model (vLLM: --enable-auto-tool-choice --tool-call-parser)"
    )


def _limit(lane: Mapping[str, Any]) -> str | None:
    """A line for a rate limit that was reached; None otherwise."""
    requests = lane["requests"]
    if not requests["throttled"]:
        return None
    share = requests["throttled"] / sum(requests.values())
    where = f"{lane['model']} at {lane['endpoint']}"
    paced = f" and {lane['pace']:,.0f} a minute" if lane["pace"] is not None else ""
    end = f"{lane['limit']} at once{paced} at the end"
    return f"rate limit of {where}: {share:.1%} refused (429), {end}"


def _budget(key: str, amounts: Mapping[str, float]) -> str:
    who, _, unit = key.rpartition(":")
    name = "budget" if who == "run" else f"budget of {who.removeprefix('model:')}"
    spent, whole = amounts["spent"], amounts["budget"]
    if unit == "usd":
        return f"{name}: {cost_text(spent, 0)} of {cost_text(whole, 0)} spent"
    return f"{name}: {spent:,} of {whole:,} tokens spent"


def _cache_line(read: float, expected: float) -> str:
    return (
        f"prompt cache: {read:.0%} of the input was read from it, about {expected:.0%} was"
        " expected. Does the beginning of the prompt change between turns, or does the provider"
        " require cache markers?"
    )


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _causes(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in causes.items())
