"""Why a run stopped before its end, in one line that names the place and the fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from hermes_rl.config import RunConfig
from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import UserError
from hermes_rl.models.providers.table import DEFAULT_PROVIDER, resolve, shipped

_FIX = "Fix the error above"
_HINTS = {
    "billing": "Fix the billing of the account",
    "model_not_found": "Correct --model or --base-url",
    "disk": "Free some space",
    "cost_limit": "Raise the budget",
    "dataset": _FIX,
    "worker_lost": _FIX,
    "journal": "Do what it says",
}
"""Cause of a stop -> what to do; a refused key has its own text."""

_WAIT = "Wait until the provider answers again"
_OF_OUTAGES = {
    "nothing was answered within": "Look at the server, or raise endpoint.first_answer_seconds",
    "refused in the same words": "Correct what the server refuses",
}
"""What an outage says that is not one of a provider that had answered -> what to do."""

_OF_THE_MODEL = ("auth", "billing", "model_not_found")


@dataclass(frozen=True)
class Stop:
    """Why nothing more is handed out."""

    cause: str
    """Key of `errors.CAUSES`; or `dataset`: its next rows cannot be read; or `journal`: that of a
    lost worker is damaged."""
    detail: str
    """What happened, one line."""

    @property
    def _said(self) -> str:
        """The detail without the name of its class."""
        words = self.detail.split(": ", 1)
        return words[1] if len(words) == 2 and words[0].isidentifier() else self.detail

    @property
    def _use(self) -> str | None:
        """`env.judge` or `env.user`, where it was no call of the policy's."""
        found = re.match(r"env\.(judge|user)(?=: )", self._said)
        return found[0] if found else None

    def explain(self, config: RunConfig, attempts: int) -> str:
        """`401 from api.example.com, 3 units tried`."""
        text, use = self._said, self._use
        if self.cause not in _OF_THE_MODEL:
            return text.rstrip(".")
        endpoint = _endpoint_of(config, use)
        text = text.removeprefix(f"{use}: ")
        host = urlsplit(endpoint.base_url or _default_address(endpoint)).netloc or endpoint.provider
        status, _, said = text.partition(": ")
        told = f" ({said.rstrip('.')})" if said else ""
        asked = f" for {use}" if use else ""
        return f"{status} from {host}{asked}{told}, {attempts} units tried"

    def mend(self, config: RunConfig) -> str:
        """What to do before the same command is run again."""
        use, text = self._use, self._said
        if self.cause == "auth":
            return _mend_of_key(_endpoint_of(config, use), use)
        if self.cause == "model_not_found" and use:
            return f"Correct {use}.name or {use}.base_url"
        if self.cause == "outage":
            return next((mend for said, mend in _OF_OUTAGES.items() if said in text), _WAIT)
        if self.cause == "disk" and "is full" not in self.detail:
            return _FIX  # it cannot be written at all
        return _HINTS.get(self.cause, _FIX)


def _endpoint_of(config: RunConfig, use: str | None) -> EndpointSection:
    """Where the model was asked that the run stopped for.

    Args:
        use: `env.judge` or `env.user`; None is the policy.
    """
    place = getattr(config.env, use.removeprefix("env.")) if use else None
    if place is None:
        return config.endpoint
    given = {"api_key_env": place.api_key_env}
    if place.base_url is not None or place.provider is not None:
        given |= {"base_url": place.base_url, "provider": place.provider}
    elif place.api_key_env is None:
        return config.endpoint
    return config.endpoint.model_copy(update=given)


def _default_address(endpoint: EndpointSection) -> str:
    provider = shipped().get(endpoint.provider or DEFAULT_PROVIDER)
    return (provider.base_url if provider else None) or ""


def _mend_of_key(endpoint: EndpointSection, use: str | None) -> str:
    """A key is only read from a variable that was named, or that is a known provider's."""
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
    except UserError:  # a provider of the user's own
        return ()
