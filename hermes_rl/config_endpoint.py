"""Configuration of models and of the way to them: endpoints, providers, fallbacks, prices, and the
models that an RL environment asks.

A header's value or a proxy's address may be `$NAME`: it is then read from that variable and stored
nowhere. What looks like a secret has to be written in this form."""

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
_TELLING = re.compile(r"auth|cookie|key|token|secret|passw|credential|session|signature", re.I)
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
    """As JSON has it: names are texts, also those that YAML reads as numbers or truth values."""
    try:
        body: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("has to hold what JSON can: texts, numbers, lists, mappings") from None
    if held := sorted(_names_in(body) & _SECRET):
        raise UserError(
            f"extra_body holds {held[0]!r}, and would be stored with the run. Name the variable "
            "that holds the key with --api-key-env"
        )
    return body


def _names_in(value: Any) -> set[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    names = {name.lower() for name in value} if isinstance(value, dict) else set()
    return names.union(*map(_names_in, inner))


def check_address(address: str, key: str) -> str:
    """The address. Raises: UserError when it is none, or holds what run.yaml must not."""
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
    """How an endpoint is reached, beside its address."""

    ca_file: str | None = None
    """A file with the certificates to trust, in the place of the system's."""
    proxy: str | None = None
    """Address of an HTTP proxy, or `$NAME`. The variables HTTP_PROXY and the like are not read."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of each request; `$NAME` reads a value from that variable."""

    @field_validator("ca_file")
    @classmethod
    def _whole_path(cls, value: str | None) -> str | None:
        return value and str(Path(value).expanduser().absolute())

    @field_validator("proxy")
    @classmethod
    def _plain_proxy(cls, value: str | None) -> str | None:
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
    def _plain_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name):
                raise UserError(f"'headers' holds {name!r}, which cannot be a header's name")
            if any(c in value for c in "\r\n\0"):
                raise UserError(f"'headers.{name}' holds a line break. Take it out")
            if variable_of(value) is None and (_TELLING.search(name) or _KEY_LIKE.match(value)):
                raise UserError(
                    f"'headers.{name}' may be a secret, and would be stored with the run. Put it "
                    f"into a variable, and write {name}: $NAME"
                )
        return headers


def variable_of(text: str) -> str | None:
    """The variable that a text `$NAME` names."""
    named = _VARIABLE.fullmatch(text)
    return named[1] if named else None


def variables_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Variable -> what it is for, of texts by their purpose."""
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
    """Where a model is, and how it is reached."""

    provider: str | None = None
    """A known provider, or one of `providers`: address, key variable, mode and ways of its own."""
    base_url: BaseUrl | None = None
    api_key_env: KeyNames | None = None
    """Name of the environment variable that holds the key; several, with commas or as a list, are
    accounts that take turns."""
    api_mode: ApiMode | None = None

    def place_keys(self) -> dict[str, Any]:
        """The keys that are set, of those that every place has."""
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
    """Further fields of each request's body, for what only one provider knows. Places and fallbacks
    that are somewhere else have their own."""


class PolicySamplingSection(SamplingSection):
    """How the policy is sampled."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 is no limit."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ] = ()
    """Texts that end an answer; one, or several as a list."""


class LongPrice(Section):
    """What long prompts cost, for all their tokens; without prices it is not known."""

    above: Annotated[int, Field(ge=1)]
    """Prompt tokens."""
    input: Dollars | None = None
    output: Dollars | None = None
    cache_read: Dollars | None = None
    cache_write_5m: Dollars | None = None
    cache_write_1h: Dollars | None = None

    @model_validator(mode="after")
    def _refuse_half(self) -> Self:
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
    """Leave it out where cached tokens cost what others cost, or are not reported."""
    cache_write_5m: Dollars | None = None
    """All writes, where there is one price for them."""
    cache_write_1h: Dollars | None = None
    long: LongPrice | None = None
    output_max: Annotated[int, Field(ge=1)] | None = None
    """The most output tokens of a call: what a budget sets aside where no `max_tokens` is set."""


class ProviderSection(Section):
    """A provider of the user's own, or other facts of a known one; what is left out stays."""

    base_url: (
        Annotated[str, AfterValidator(partial(check_address, key="providers.NAME.base_url"))] | None
    ) = None
    hosts: tuple[str, ...] | None = None
    """Hosts that are known as this provider; `*` stands for anything."""
    api_key_env: KeyNames | None = None
    """The variable that holds the key; the empty text means that none is needed."""
    api_mode: ApiMode | None = None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] | None = None
    replay_reasoning: str | None = None
    """The field in which it wants earlier reasoning back."""
    needs_reasoning: bool | None = None
    """It refuses earlier tool calls without reasoning: a space stands for it."""
    stream_options: bool | None = None
    """It takes `stream_options.include_usage`."""
    top_k: bool | None = None
    """It takes `top_k` and `min_p`."""
    seed: bool | None = None
    """It takes `seed`."""
    cache_marks: bool | None = None
    """Chat Completions with cache markers, for models whose name holds `claude`."""
    cache_key: bool | None = None
    """It takes `prompt_cache_key`."""
    short_ids: bool | None = None
    """Longer ids of tool calls than 40 characters are replaced."""
    reports_cost: bool | None = None
    """Its answers say in `usage.cost` what they cost in US dollars."""


class PlaceSection(PlacedSection):
    """Where one model is. What is left out is the run's, where the provider is the run's too."""

    model: str | None = None
    """What it is called there; None is its name here."""
    extra_body: ExtraBody | None = None
    """In the place of the run's `model.extra_body`."""


class RatesSection(Section):
    """Limits per minute of each account and model, as your contract says. What is left out is
    learned from the provider's headers, where it sends some."""

    requests: PerMinute | None = None
    tokens: PerMinute | None = None
    """Input and output together."""
    input_tokens: PerMinute | None = None
    output_tokens: PerMinute | None = None


class FallbackSection(PlaceSection):
    """A model that is asked when those before it cannot answer."""

    model: str


def _with_names(value: Any) -> Any:
    listed = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(listed, list | tuple):
        return value
    return [{"model": one} if isinstance(one, str) else one for one in listed]


Fallbacks = Annotated[tuple[FallbackSection, ...], BeforeValidator(_with_names)]
"""One or several; a name alone is a model at the run's own endpoint."""


class ConnectionSection(PlacedSection):
    """What a run and `AIAgent` set alike about the way to a model."""

    transport: Literal["http", "sdk"] = "http"
    fallbacks: Fallbacks = ()
    """Asked in this order when the model cannot answer; none with the preset `rl`."""
    first_byte_seconds: Seconds = 600.0
    """How long a request waits for the first byte of its answer."""
    idle_seconds: Seconds = 120.0
    """How long an answer that began may stand still."""


class EndpointSection(ConnectionSection):
    """Where the model is; not identity."""

    base_url: str | None = None
    """`RunConfig` checks it, and names it."""
    key_commands: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Variable -> the command that prints its key, for keys that do not live long. It is run by
    `/bin/sh` at the start, when the endpoint refuses the key, and before a key ends that says when.
    """
    key_strategy: KeyStrategy = "fill_first"
    """Which of several accounts is next."""
    stream: bool = False
    prompt_cache: Literal["5m", "1h", "off"] = "5m"
    """How long a provider that caches only what is marked (Anthropic; OpenRouter for Claude) keeps
    the head of a conversation; writing for an hour costs more. Others cache by themselves."""
    model_path: str | None = None
    """Weights file for the embedded model."""
    tokens: Literal["off", "auto", "chat", "vllm", "sglang", "llamacpp"] = "auto"
    """How token ids are had. `auto`: with the preset `rl`, what the endpoint turns out to give.
    `chat`: beside the answers of a chat endpoint. The others send the prompt as ids, and need
    `tokenizer`."""
    tokenizer: str | None = None
    """The model's tokenizer and chat template: a folder with tokenizer.json, or a name on the hub.
    """
    places: dict[str, PlaceSection] = Field(default_factory=dict)
    """Models of a mix that are somewhere else."""
    prices: dict[str, PriceSection | None] = Field(default_factory=dict)
    """What models cost here, by `model` or `provider/model`; null is unpriced. `@FILE` reads it
    from a YAML file."""
    rates: RatesSection = RatesSection()
    outage_seconds: Seconds = 1800.0
    """How long one call keeps trying through an outage."""
    first_answer_seconds: Seconds = 60.0
    """How long a run goes on while its endpoint has never given a sign of life: an answer, a
    refusal with a reason, or a word that it is busy or loading (429, 503, 529)."""

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
    str, AfterValidator(partial(check_address, key="env.judge.base_url, env.user.base_url"))
]


class ModelPlace(PlacedSection, SamplingSection):
    """A judge or a simulated user: name and sampling are identity, the place is not. Without a
    provider and an address it is at the run's endpoint."""

    name: str
    base_url: _ModelUrl | None = None

    @property
    def place(self) -> PlaceSection:
        """Where it is, as the endpoint's places say it."""
        return PlaceSection(model=self.name, extra_body=self.extra_body, **self.place_keys())

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its answers."""
        fields = {"name", "temperature", "top_p", "max_tokens", "reasoning"}
        return self.model_dump(include=fields | ({"extra_body"} if self.extra_body else set()))


class EnvSection(Section):
    """Identity: the environment in the place of a dataset."""

    name: str
    """`NAME`, `package.module:Class` or `file.py:Class`."""
    split: str = "train"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the task stream."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own `Config`."""
    judge: ModelPlace | None = None
    user: ModelPlace | None = None
    mode: Literal["process", "evaluate"] = "process"
    """Which command made the run; not identity."""
    cpu_workers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes for `ctx.cpu` in each worker; None is one per core, at most 4. Not identity."""
