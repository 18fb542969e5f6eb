"""Why a run stopped before its end, in one line that names place and mend."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from hermes_rl.config_endpoint import EndpointSection
from hermes_rl.errors import UserError
from hermes_rl.models.providers.table import DEFAULT_PROVIDER, resolve, shipped

_MENDS = {
    "billing": "Mend the account",
    "model_not_found": "Correct --model or --base-url",
    "outage": "Wait until the provider answers again",
    "disk": "Free some space",
    "cost_limit": "Raise the budget",
}
"""For each cause that opens the breaker, but a key that is refused."""

_OF_THE_MODEL = ("auth", "billing", "model_not_found")


@dataclass(frozen=True)
class Stop:
    """Why nothing more is handed out."""

    cause: str
    """Key of `errors.CAUSES`."""
    detail: str
    """What happened, one line."""

    def explain(self, endpoint: EndpointSection, attempts: int) -> str:
        """`401 from api.example.com, 3 units tried`."""
        words = self.detail.split(": ", 1)
        text = words[1] if len(words) == 2 and words[0].isidentifier() else self.detail
        if self.cause not in _OF_THE_MODEL:
            return text.rstrip(".")
        host = urlsplit(endpoint.base_url or _default_address(endpoint)).netloc or endpoint.provider
        status, _, said = text.partition(": ")
        told = f" ({said.rstrip('.')})" if said else ""
        return f"{status} from {host}{told}, {attempts} units tried"

    def mend(self, endpoint: EndpointSection) -> str:
        """What to do before the same command is run again."""
        if self.cause == "auth":
            return _mend_of_key(endpoint)
        if self.cause == "disk" and "is full" not in self.detail:
            return "Mend that"  # it cannot be written at all
        return _MENDS.get(self.cause, "Mend that")


def _default_address(endpoint: EndpointSection) -> str:
    provider = shipped().get(endpoint.provider or DEFAULT_PROVIDER)
    return (provider.base_url if provider else None) or ""


def _mend_of_key(endpoint: EndpointSection) -> str:
    """A key is only read from a variable that was named, or that is a known provider's."""
    names = endpoint.key_names or _key_names(endpoint)
    if not names:
        return "Name the variable that holds the key (--api-key-env NAME)"
    if printed := [name for name in names if name in endpoint.key_commands]:
        return f"Mend the command of {' and '.join(printed)} in endpoint.key_commands"
    return f"Set {' and '.join(names)}"


def _key_names(endpoint: EndpointSection) -> tuple[str, ...]:
    try:
        return resolve(endpoint).key_names
    except UserError:  # a provider of the user's own
        return ()
