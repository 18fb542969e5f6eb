"""Configuration of models and endpoints: providers, fallbacks, prices, and the models of an RL
environment.

The value of a header or the address of a proxy may be `$NAME`: it is read from that variable and
not stored. Values that look like secrets must have this form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hermes_rl.errors import UserError
from hermes_rl.input_errors import refusal

_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_NAME = re.compile(r"auth|cookie|key|token|secret|passw|credential|session|signature", re.I)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_LIKE = re.compile(r"(bearer|basic|token)\s|(sk|pk|gsk|xai|key|hf|nvapi|or)[-_]|eyJ", re.I)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PerMinute = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ApiMode = Literal["chat_completions", "codex_responses", "anthropic_messages"]
KeyStrategy = Literal["fill_first", "round_robin", "random", "least_used"]
Dollars = Annotated[Decimal, Field(ge=0, le=1_000_000_000, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1, le=1_000_000_000_000_000)]

_SECRET = {"api_key", "apikey", "api-key", "authorization", "x-api-key"}


def _json_body(value: dict[str, Any]) -> dict[str, Any]:
    """Convert to JSON: names become strings, also those that YAML reads as numbers or booleans."""
    try:
        body: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("must be JSON: texts, numbers, lists, mappings") from None
    if secrets := sorted(_names_in(body) & _SECRET):
        raise UserError(
            f"extra_body contains {secrets[0]!r}, and would be stored with the run. Name the "
            "variable that holds the key with --api-key-env"
        )
    return body


def _names_in(value: Any) -> set[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    names = {name.lower() for name in value} if isinstance(value, dict) else set()
    return names.union(*map(_names_in, inner))


def check_address(address: str, key: str) -> str:
    """Check an address. Raises: UserError when it is invalid, or contains secrets."""
    try:
        where = urlsplit(address)
    except ValueError:  # the text itself is not shown: it may hold a password
        raise UserError(
            f"'{key}' is not an address. Use for example http://127.0.0.1:8000/v1"
        ) from None
    if "@" in where.netloc or where.query:
        raise UserError(
            f"'{key}' holds a user, a password or a query. Take that out, and name "
            "the variable that holds the key with --api-key-env"
        )
    return address


def join_names(value: Any) -> Any:
    """A list of names as one text with commas.

    Raises: UserError for a text that is not a variable name: likely the key, so it is not shown.
    """
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        value = ",".join(value)
    if isinstance(value, str) and not all(map(_NAME.fullmatch, split_names(value))):
        raise UserError(
            "'api_key_env' is not the name of a variable. Put the key into a variable, "
            "and name that"
        )
    return value


def split_names(text: str | None) -> tuple[str, ...]:
    """The names in a text with commas, each once, in order."""
    names = (name.strip() for name in (text or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def read_text_file(path: str, key: str) -> str:
    """The text of a file that a key names. Raises: UserError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}. Check {key}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not valid UTF-8 text. Check {key}") from None


ExtraBody = Annotated[dict[str, Any], AfterValidator(_json_body)]
"""Further fields for the body of each request."""
BaseUrl = Annotated[str, AfterValidator(partial(check_address, key="base_url"))]
KeyNames = Annotated[str, BeforeValidator(join_names)]
"""Names of variables that hold keys, as one text with commas."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        hide_input_in_errors=True,  # it may be a key
    )

    if not TYPE_CHECKING:  # a type checker takes the fields as parameters

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise refusal(error.errors(), type(self), type(self).__name__) from None

        # Only for calls in Python: validation of nested data does not go through it.
        __init__.__pydantic_base_init__ = True


class ReachSection(Section):
    """Certificates, proxy and headers of an endpoint."""

    ca_file: str | None = None
    """A file with trusted certificates, instead of those of the system."""
    proxy: str | None = None
    """Address of an HTTP proxy, or `$NAME`. The variables HTTP_PROXY and the like are not read."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of each request; `$NAME` reads a value from that variable."""

    @field_validator("ca_file")
    @classmethod
    def _absolute_path(cls, value: str | None) -> str | None:
        return value and str(Path(value).expanduser().absolute())

    @field_validator("proxy")
    @classmethod
    def _check_proxy(cls, value: str | None) -> str | None:
        if value is None or variable_of(value):
            return value
        check_proxy(value, "'proxy'")
        if "@" in urlsplit(value).netloc:
            raise UserError(
                "'proxy' holds a user or a password. Put the address into a variable, and write "
                "proxy: $NAME"
            )
        return value

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name):
                raise UserError(f"'headers' holds {name!r}, which cannot be a header's name")
            if any(c in value for c in "\r\n\0"):
                raise UserError(f"'headers.{name}' holds a line break. Take it out")
            if variable_of(value) is None and looks_secret(name, value):
                raise UserError(
                    f"'headers.{name}' may be a secret, and would be stored with the run. Put it "
                    f"into a variable, and write {name}: $NAME"
                )
        return headers


def looks_secret(name: str, value: str) -> bool:
    """Whether a named value may be a secret."""
    return bool(_SECRET_NAME.search(name) or _KEY_LIKE.match(value))


def variable_of(text: str) -> str | None:
    """The variable that a text `$NAME` names."""
    named = _VARIABLE.fullmatch(text)
    return named[1] if named else None


def variables_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Variable -> purpose, for texts by their purpose."""
    return {name: use for use, text in texts.items() if (name := variable_of(text))}


def check_proxy(address: str, place: str) -> None:
    """Raises: UserError for what is not a proxy address; the address is not shown."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        known = False
    if not known:
        raise UserError(f"{place} is not a proxy address. Use for example http://127.0.0.1:3128")


class PlacedSection(ReachSection):
    """The endpoint of a model."""

    provider: str | None = None
    """A known provider, or one of `providers`, with its address, key variable, mode and quirks."""
    base_url: BaseUrl | None = None
    api_key_env: KeyNames | None = None
    """Name of the environment variable with the key; several, separated by commas or as a list, are
    used in rotation."""
    api_mode: ApiMode | None = None

    def place_keys(self) -> dict[str, Any]:
        """The keys of this section that are set."""
        return self.model_dump(include=set(PlacedSection.model_fields), exclude_defaults=True)


class SamplingSection(Section):
    """How a model is sampled."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Positive | None = None
    """Output tokens per call."""
    reasoning: str | None = None
    """Reasoning effort, as the provider spells it."""
    extra_body: ExtraBody = Field(default_factory=dict)
    """Further fields in the body of each request. Places and fallbacks at other endpoints have
    their own."""


class PolicySamplingSection(SamplingSection):
    """How the policy is sampled."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 sets no limit."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ] = ()
    """Texts that end an answer; one, or several as a list."""


class LongPrice(Section):
    """Prices of all tokens of long prompts; without prices they are unknown."""

    above: Annotated[int, Field(ge=1)]
    """Prompt tokens."""
    input: Dollars | None = None
    output: Dollars | None = None
    cache_read: Dollars | None = None
    cache_write_5m: Dollars | None = None
    cache_write_1h: Dollars | None = None

    @model_validator(mode="after")
    def _require_both_prices(self) -> Self:
        named = self.model_fields_set - {"above"}
        if named and (self.input is None or self.output is None):
            raise ValueError("has to say both input and output, or no price at all")
        return self


class PriceSection(Section):
    """US dollars per million tokens."""

    input: Dollars
    """Prompt tokens that are neither read from a cache nor written to one."""
    output: Dollars
    """Sampled tokens, reasoning included."""
    cache_read: Dollars | None = None
    """Unset when cached tokens cost the same, or are not reported."""
    cache_write_5m: Dollars | None = None
    """All writes, where there is one price for them."""
    cache_write_1h: Dollars | None = None
    long: LongPrice | None = None
    output_max: Annotated[int, Field(ge=1)] | None = None
    """Maximum output tokens of a call, which a budget reserves without `max_tokens`."""


class ProviderSection(Section):
    """A user-defined provider, or changes to a known one."""

    base_url: (
        Annotated[str, AfterValidator(partial(check_address, key="providers.NAME.base_url"))] | None
    ) = None
    hosts: tuple[str, ...] | None = None
    """Host patterns of this provider, with `*`."""
    api_key_env: KeyNames | None = None
    """The variable with the key; empty when no key is needed."""
    api_mode: ApiMode | None = None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] | None = None
    replay_reasoning: str | None = None
    """The field in which it expects earlier reasoning."""
    needs_reasoning: bool | None = None
    """It refuses earlier tool calls without reasoning: a space is sent."""
    stream_options: bool | None = None
    """It takes `stream_options.include_usage`."""
    top_k: bool | None = None
    """It takes `top_k` and `min_p`."""
    seed: bool | None = None
    """It takes `seed`."""
    cache_marks: bool | None = None
    """Chat Completions with cache markers, for models with `claude` in their name."""
    cache_key: bool | None = None
    """It takes `prompt_cache_key`."""
    short_ids: bool | None = None
    """Longer ids of tool calls than 40 characters are replaced."""
    reports_cost: bool | None = None
    """Its answers report their cost in US dollars in `usage.cost`."""


class PlaceSection(PlacedSection):
    """The endpoint of one model. Unset keys are those of the run, for the same provider."""

    model: str | None = None
    """Its name at that endpoint; None uses the same name."""
    extra_body: ExtraBody | None = None
    """Replaces `model.extra_body` of the run."""


class RatesSection(Section):
    """Contractual limits per minute of each account and model. Unset limits are learned from the
    headers of the provider."""

    requests: PerMinute | None = None
    tokens: PerMinute | None = None
    """Input and output together."""
    input_tokens: PerMinute | None = None
    output_tokens: PerMinute | None = None


class FallbackSection(PlaceSection):
    """A model that is called when those before it fail."""

    model: str


def _with_names(value: Any) -> Any:
    listed = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(listed, list | tuple):
        return value
    return [{"model": one} if isinstance(one, str) else one for one in listed]


Fallbacks = Annotated[tuple[FallbackSection, ...], BeforeValidator(_with_names)]
"""One or several; a plain name is a model at the endpoint of the run."""


class ConnectionSection(PlacedSection):
    """Connection settings that a run and `AIAgent` share."""

    transport: Literal["http", "sdk"] = "http"
    fallbacks: Fallbacks = ()
    """Called in this order when the model fails; not with the preset `rl`."""
    first_byte_seconds: Seconds = 600.0
    """How long a request waits for the first byte of its answer."""
    idle_seconds: Seconds = 120.0
    """How long an answer may stall."""


class EndpointSection(ConnectionSection):
    """The endpoint of the model; not identity."""

    base_url: str | None = None
    """Checked by `RunConfig`."""
    key_commands: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Variable -> the command that prints its key, for short-lived keys. `/bin/sh` runs it at the
    start, when the endpoint refuses the key, and before the key expires, if that is known."""
    key_strategy: KeyStrategy = "fill_first"
    """How to choose among several accounts."""
    stream: bool = False
    prompt_cache: Literal["5m", "1h", "off"] = "5m"
    """Cache lifetime at providers that require cache markers (Anthropic; OpenRouter for Claude);
    one hour costs more. Other providers cache automatically."""
    model_path: str | None = None
    """Weights file for the embedded model."""
    tokens: Literal["off", "auto", "chat", "vllm", "sglang", "llamacpp"] = "auto"
    """How the run gets token ids. `auto`: with the preset `rl`, as the endpoint supports. `chat`:
    with the answers of a chat endpoint. The others send the prompt as ids and require
    `tokenizer`."""
    tokenizer: str | None = None
    """The model's tokenizer and chat template: a folder with tokenizer.json, or a name on the hub.
    """
    places: dict[str, PlaceSection] = Field(default_factory=dict)
    """Models of a mix at other endpoints."""
    prices: dict[str, PriceSection | None] = Field(default_factory=dict)
    """Prices by `model` or `provider/model`; null is unpriced. `@FILE` reads a YAML file."""
    rates: RatesSection = RatesSection()
    outage_seconds: Seconds = 1800.0
    """How long a call is retried during an outage."""
    first_answer_seconds: Seconds = 60.0
    """How long a run waits for the first response of its endpoint: an answer, a refusal with a
    reason, or a busy status (429, 503, 529)."""

    @property
    def key_names(self) -> tuple[str, ...]:
        """The variables that hold the keys."""
        return split_names(self.api_key_env)

    @field_validator("key_commands")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        if not all(map(_NAME.fullmatch, value)):  # it may be the key itself: it is not shown
            raise UserError(
                "'endpoint.key_commands' has a key that is not a variable name. Write NAME: command"
            )
        return value

    @field_validator("tokens", "prompt_cache", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML takes a bare `off` for false

    @field_validator("prices", mode="before")
    @classmethod
    def _read_prices(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value.startswith("@"):
            raise UserError(f"'endpoint.prices' is {value!r}: write a mapping, or @FILE")
        path = value[1:]
        try:
            data = yaml.safe_load(read_text_file(path, "endpoint.prices"))
        except yaml.YAMLError:
            raise UserError(f"{path}: not valid YAML. Check endpoint.prices") from None
        if not isinstance(data, dict):
            raise UserError(
                f"{path}: must hold models and their prices, as `gpt-5: {{input: 1, ...}}`"
            )
        return data


def extra_of(runs: Mapping[str, Any], place: PlaceSection | None) -> Mapping[str, Any]:
    """The further body fields of one place.

    Args:
        runs: those of the run's own endpoint.
        place: the settings of another endpoint; None is that one.
    """
    if place is not None and place.extra_body is not None:
        return place.extra_body
    elsewhere = place is not None and (place.provider is not None or place.base_url is not None)
    return {} if elsewhere else runs


_ModelUrl = Annotated[
    str,
    AfterValidator(
        partial(check_address, key="env.judge.base_url, env.user.base_url, scoring.judges.base_url")
    ),
]


class ModelPlace(PlacedSection, SamplingSection):
    """A judge or a simulated user. Name and sampling are identity, the endpoint is not; by default
    it is that of the run."""

    name: str
    base_url: _ModelUrl | None = None

    @property
    def place(self) -> PlaceSection:
        """Its endpoint as a place."""
        return PlaceSection(model=self.name, extra_body=self.extra_body, **self.place_keys())

    @property
    def identity(self) -> dict[str, Any]:
        """Its identity: everything that determines its answers."""
        fields = {"name", "temperature", "top_p", "max_tokens", "reasoning"}
        return self.model_dump(include=fields | ({"extra_body"} if self.extra_body else set()))


class ScoringSection(Section):
    """What scorers of task rows use beside the row (`score`)."""

    judges: tuple[ModelPlace, ...] = ()
    """Models that judge; identity."""
    functions: dict[str, str] = Field(default_factory=dict)
    """Name -> `package.module:function` or `file.py:function`, for scorers of type `python`. Not
    identity."""

    @field_validator("judges", mode="before")
    @classmethod
    def _name_judges(cls, value: Any) -> Any:
        listed = value if isinstance(value, list | tuple) else [value]
        return [{"name": one} if isinstance(one, str) else one for one in listed]

    @field_validator("functions")
    @classmethod
    def _resolve_files(cls, value: dict[str, str]) -> dict[str, str]:
        for name, place in value.items():
            where, _, function = place.rpartition(":")
            if not where or not function.isidentifier():
                raise ValueError(f"{name}: write package.module:function or file.py:function")
            if where.endswith(".py"):
                if not Path(where).is_file():
                    raise ValueError(f"{name}: no file {where}")
                value[name] = f"{Path(where).resolve()}:{function}"
        return value


class EnvSection(Section):
    """The environment that replaces a dataset; identity."""

    name: str
    """`NAME`, `package.module:Class` or `file.py:Class`."""
    split: str = "train"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the task stream."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own `Config`."""
    judge: ModelPlace | None = None
    user: ModelPlace | None = None
    mode: Literal["process", "evaluate", "live"] = "process"
    """What made the run: a command, or `hermes_rl.rl.rollouts`; not identity."""
    reward_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Limit of one `compute_reward` or `score_group`, with their judges; not identity."""
    cpu_workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes for `ctx.cpu` in each worker; None is one per core, at most 4. Not identity."""
