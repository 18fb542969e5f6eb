"""The configuration of a run and of `AIAgent`'s model: strict pydantic.

Unknown keys are refused, and errors name the place. `model`, `agent` and `sandbox` are the run's
identity; `dataset`, `endpoint` and `run` are not (DESIGN 5.2)."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from hermes_rl import __version__
from hermes_rl.config_agent import AgentSection, ContextConfig, McpServers
from hermes_rl.config_endpoint import (
    ConnectionSection,
    EndpointSection,
    EnvSection,
    PolicySamplingSection,
    Positive,
    ProviderSection,
    ScoringSection,
    Seconds,
    Section,
    check_address,
)
from hermes_rl.errors import UserError
from hermes_rl.input_errors import nearest_file, refusal, unknown
from hermes_rl.network import Network, parse_network
from hermes_rl.tasks import LEAST_MEMORY, LEAST_STORAGE
from hermes_rl.text import SECRETS

_folders: set[Path] = set()
"""Temporary folders of this process, one for each rows file."""


def rows_file(rows: Iterable[Mapping[str, Any]], limit: int | None) -> str:
    """Write rows to a temporary JSONL file, named by their content, and return its path.

    The file is removed when this process ends. A run keeps a copy in its run directory.

    Args:
        limit: how many rows are read; an iterable may have no end.

    Raises: UserError for rows that are not JSON, and when the file cannot be written.
    """
    digest, number = hashlib.sha256(), 0
    try:
        folder = Path(tempfile.mkdtemp(prefix="hermes-rl-rows-"))
        _folders.add(folder)
        atexit.register(_remove, folder, os.getpid())
        with (folder / "rows.jsonl").open("wb") as file:
            for row in islice(rows, limit):
                number += 1
                line = json.dumps(row).encode() + b"\n"
                digest.update(line)
                file.write(line)
        path = Path(file.name).rename(folder / f"rows-{digest.hexdigest()[:12]}.jsonl")
    except (TypeError, ValueError) as error:
        shutil.rmtree(folder)
        raise UserError(f"dataset.path: row {number} is not JSON: {error}") from None
    except OSError as error:
        raise UserError(
            f"dataset.path: rows cannot be kept in {tempfile.gettempdir()}: {error.strerror}"
        ) from None
    return str(path)


def is_rows_file(path: str) -> bool:
    """Whether this process wrote the file with `rows_file`."""
    return Path(path).parent in _folders


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends before its parent
        shutil.rmtree(folder, ignore_errors=True)


_log = logging.getLogger(__name__)

LineOf = Callable[[str], int | None]
"""Dotted key -> its line in the file, or that of its section."""


class _DuplicateKey(yaml.MarkedYAMLError):
    """A mapping has a duplicate key."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML itself would silently drop the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    where = key.start_mark
                    raise _DuplicateKey(None, None, f"duplicate key '{key.value}'", where)
                seen.add(key.value)
        return node


def read_mapping(path: Path, model: type[BaseModel]) -> tuple[dict[str, Any], LineOf]:
    """Read the mapping in a YAML file.

    Args:
        model: of the file's content; unknown keys in a run of another version are ignored.

    Raises: UserError when the file is absent, not YAML, or not a mapping.
    """
    try:
        loader = _UniqueKeyLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except OSError as error:
        raise UserError(f"{path}: {_why(path, error)}. Check --config") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not valid UTF-8 text. Check --config") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deep. Check --config") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        twice = error.problem if isinstance(error, _DuplicateKey) else "not valid YAML"
        raise UserError(f"{path}{line}: {twice}. Fix that line") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold sections such as 'dataset:' and 'model:'")
    if _is_of_another_version(path):
        _remove_unknown_keys(data, model, path)
    return data, partial(_line_of, node)


def _is_of_another_version(path: Path) -> bool:
    """Whether it is the run.yaml of a run that another version of hermes_rl wrote."""
    try:
        manifest = json.loads(path.with_name("manifest.json").read_bytes())
        return path.name == "run.yaml" and bool(manifest["versions"]["hermes_rl"] != __version__)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove_unknown_keys(data: dict[str, Any], model: type[BaseModel], path: Path) -> None:
    """Remove keys that this version does not have, with a warning."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        unknown = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        for *sections, key in unknown:
            inner: Any = data
            for section in sections:
                inner = inner[section]
            del inner[key]
            name = ".".join(map(str, (*sections, key)))
            _log.warning("%s: '%s' is not a key of this version and is ignored", path, name)


def _why(path: Path, error: OSError) -> str:
    """Why a file cannot be read, and a file with a similar name."""
    why, near = error.strerror or str(error), nearest_file(path)
    hint = f" (did you mean {str(path.with_name(near))!r}?)" if near and not path.exists() else ""
    return why[0].lower() + why[1:] + hint


def _line_of(node: yaml.Node | None, key: str) -> int | None:
    """The line of a dotted key, or of its last part that exists."""
    line = None
    for name in key.split("."):
        if isinstance(node, yaml.SequenceNode) and name.isdecimal() and int(name) < len(node.value):
            node = node.value[int(name)]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == name), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
    return line


Dollar = Annotated[float, Field(gt=0, le=1_000_000_000, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]

PLAYED_MODELS = ("oracle", "noop")
"""Models that the harness plays, without an endpoint and tokens."""

LOCAL_MODELS = ("local", "local-tiny")
"""Embedded models, which run on this machine for trying the product."""


def _workers(value: Any) -> Any:
    if value is None or value == "auto":
        return "auto"
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if count < 0 or isinstance(value, bool | float):
        raise ValueError(f"must be a whole number from 0 on, or auto, not {value!r}")
    return count


Workers = Annotated[int | Literal["auto"], BeforeValidator(_workers)]


class DatasetSection(Section):
    """Which units."""

    path: str
    """A file, a folder, a Hugging Face dataset name, or a bundled name (`smoke`, `terminal_tasks`,
    `tool_tasks`).
    A program may pass an iterable of rows, which are written to a file."""
    map: dict[str, str] = Field(default_factory=dict)
    """Column name of hermes_rl -> that of the dataset."""
    limit: Positive | None = None
    """Only the first rows."""
    repeats: Positive = 1
    """Units per row, unless the row says otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _write_rows(cls, value: Any) -> Any:
        path = value.get("path") if isinstance(value, dict) else None
        if isinstance(path, Path):
            return {**value, "path": str(path)}
        if isinstance(path, Iterable) and not isinstance(path, str | bytes | Mapping):
            limit = value.get("limit")
            return {**value, "path": rows_file(path, limit if isinstance(limit, int) else None)}
        return value


class ModelSection(PolicySamplingSection):
    """Identity: who answers, and how it is sampled."""

    name: str
    """With a mix it is only the name of the run."""
    mix: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    """Models and their relative weights. One is drawn for each unit by its seed and answers all of
    its calls. Models at other endpoints have a place in `endpoint.places`."""
    images: bool = False
    """It takes images: it sees those that it reads with `read_file`."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("mix") and "name" not in value:
            return {**value, "name": "mix"}
        return value


class BuildSection(Section):
    """How images of task folders are built; not identity."""

    aliases: dict[str, str] = Field(default_factory=dict)
    """Name in `FROM` -> a local OCI layout or archive."""
    ca: bool = False
    """Show this machine's certificates to builds."""
    env: tuple[str, ...] = ()
    """Names of variables for the shell of `RUN`; images do not keep them."""
    jobs: Positive = 2
    """Builds at a time."""


class SandboxLimitsSection(Section):
    """Limits of each sandbox; identity when set. A row may set lower ones."""

    cpus: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] | None = None
    """Number of CPUs; None is unlimited."""
    memory_bytes: Annotated[int, Field(ge=LEAST_MEMORY)] | None = None
    """Of the sandbox, and address space of each process; None is 2 GiB."""
    storage_bytes: Annotated[int, Field(ge=LEAST_STORAGE)] | None = None
    """Of the workspace and files written over an image; None is 2 GiB."""


def _network(value: Any) -> Any:
    return value if isinstance(value, bool) else parse_network(value)


NetworkSetting = Annotated[Network, BeforeValidator(_network)]
"""`off`, `on`, or hosts: a list, or one text with commas."""


BACKENDS = ("bubblewrap", "docker", "podman", "ssh", "apptainer", "modal", "none")
"""Kinds of sandboxes that this package brings; the first is the default."""
_NO_HOST_LIST = ("apptainer", "modal", "none")
SANDBOX_GROUP = "hermes_rl.sandboxes"
"""Entry points of packages that bring others."""


class HostSection(Section):
    """A machine of `sandbox.hosts`; what is not set is as in ~/.ssh/config."""

    host: str
    user: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    slots: Positive = 16
    """Sandboxes at a time, of all workers of all users of the same account there."""
    key: str | None = None
    """File with the private key."""
    known_hosts: str | None = None
    """File with the machine's public key."""
    python: str = "python3"
    """Its Python, 3.11 or newer."""
    folder: str | None = None
    """Where sandboxes are kept there; None is its temporary folder."""


_HOST = re.compile(r"(?:([^@\s]+)@)?([^@\s:]+|\[[^\]\s]+\])(?::(\d+))?")


def _hosts(value: Any) -> Any:
    """`USER@HOST:PORT` as a section, and a text with commas as a list."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return listed
    return [_host(entry.strip()) if isinstance(entry, str) else entry for entry in listed]


def _host(text: str) -> dict[str, Any]:
    found = _HOST.fullmatch(text)
    if found is None:
        raise UserError(f"'sandbox.hosts': {text!r} is not a machine. Write HOST or USER@HOST:PORT")
    user, host, port = found.groups()
    return {"host": host.strip("[]"), "user": user, "port": port}


class SandboxSection(Section):
    """Identity: where commands run."""

    backend: str = BACKENDS[0]
    """One of `BACKENDS`, or the name of an entry point."""
    image: str | None = None
    network: NetworkSetting = False
    """Off, on, or a list of hosts, which are reached through an egress proxy."""
    limits: SandboxLimitsSection = SandboxLimitsSection()
    build: BuildSection = BuildSection()
    hosts: Annotated[tuple[HostSection, ...], BeforeValidator(_hosts)] = ()
    """The machines of `ssh`; not identity."""


class RunSection(Section):
    """How the run is carried out; not identity."""

    out: str | None = None
    """Run directory; None is `runs/<dataset>-<model>`."""
    workers: Workers = "auto"
    """Ray workers; 0 runs in this process without Ray; `auto` does so while the work is small."""
    concurrency: Positive | None = None
    """Rollouts in flight over all workers; None is 64, or 4 with the embedded model."""
    max_attempts: Positive = 3
    retry_failed: bool = False
    allow_unsandboxed: bool = False
    budget_usd: Dollar | None = None
    """US dollars that all starts of the run may spend together."""
    budget_tokens: Positive | None = None
    """Input and output tokens that all starts of the run may use together."""
    model_budgets: dict[str, Dollar] = Field(default_factory=dict)
    """Model -> US dollars, beside `budget_usd`."""
    model_token_budgets: dict[str, Positive] = Field(default_factory=dict)
    """Model -> input and output tokens, beside `budget_tokens`."""
    unit_budget_usd: Dollar | None = None
    """US dollars that one attempt at a unit may spend; beyond them the unit is given up."""
    unit_budget_tokens: Positive | None = None
    """Input and output tokens that one attempt may use, like `unit_budget_usd`."""
    allow_unpriced: bool = False
    """Allow a budget in dollars with unpriced models, whose calls it does not limit."""
    publish_every_s: Seconds = 300.0
    probe: Literal["free", "full"] = "free"
    """Probe of the endpoint before the first unit: `free` reads its list of models, `full` also
    makes the calls of `doctor models`: at most seven, listed in manifest.json with their usage."""
    keep_workspaces: bool = False
    """Store the workspace of each rollout in the run directory for `hermes-rl env regrade`."""
    checkpoint_turns: Positive | None = None
    """Turns between checkpoints of a rollout, from which it resumes; None keeps none."""
    otel: Literal["off", "spans", "content"] = "off"
    """OpenTelemetry spans of each rollout, sent by OTLP to `OTEL_EXPORTER_OTLP_ENDPOINT`; `content`
    with messages and results."""
    lease_s: Seconds = 30.0
    """How long a worker runs without a message from its driver."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the workers (`env_vars`, `pip`, `working_dir`, ...)."""


class RunConfig(Section):
    """The whole configuration of `hermes-rl run`."""

    dataset: DatasetSection
    model: ModelSection
    agent: AgentSection = AgentSection()
    sandbox: SandboxSection = SandboxSection()
    mcp: McpServers = Field(default_factory=dict)
    """MCP servers by name, whose tools each unit has beside those of its toolsets. What they offer
    is identity."""
    endpoint: EndpointSection = EndpointSection()
    providers: dict[str, ProviderSection] = Field(default_factory=dict)
    """User-defined providers, and changed facts of known ones; not identity."""
    run: RunSection = RunSection()
    scoring: ScoringSection = ScoringSection()
    """For scorers of task rows."""
    env: EnvSection | None = None
    """An RL environment whose tasks replace the dataset; identity."""

    @model_validator(mode="before")
    @classmethod
    def _set_env_path(cls, value: Any) -> Any:
        """Set the path of the dataset to `env:NAME` with an environment."""
        if not isinstance(value, dict) or not isinstance(value.get("env"), dict | EnvSection):
            return value
        env, dataset = value["env"], value.get("dataset") or {}
        if not isinstance(dataset, dict) or dataset.get("path"):
            return value
        name = env.name if isinstance(env, EnvSection) else env.get("name")
        return {**value, "dataset": {**dataset, "path": f"env:{name}"}}

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        self._refuse_invalid_text()
        self._refuse_models()
        self._refuse_unused_budgets()
        self._refuse_idle_context()
        if self.run.checkpoint_turns is not None and self.env is not None:
            raise UserError(
                "--checkpoint-turns works with datasets: an environment's state cannot be saved. "
                "Leave it out"
            )
        running = [name for name, server in self.mcp.items() if server.in_sandbox]
        if self.run.checkpoint_turns is not None and running:
            raise UserError(
                f"--checkpoint-turns: the server 'mcp.{running[0]}' runs in the sandbox, and a "
                "running program is in no checkpoint. Set 'where: host', or leave one of them out"
            )
        if self.endpoint.base_url is not None:
            check_address(self.endpoint.base_url, "endpoint.base_url")
        self._refuse_sandbox()
        return self

    def _refuse_sandbox(self) -> None:
        kind = self.sandbox.backend
        if kind not in BACKENDS:
            others = [entry.name for entry in entry_points(group=SANDBOX_GROUP)]
            if kind not in others:
                raise UserError(unknown("sandbox", kind, (*BACKENDS, *others)))
        if (kind == "ssh") != bool(self.sandbox.hosts):
            raise UserError(
                "--sandbox ssh needs machines: --hosts USER@HOST:PORT, or 'sandbox.hosts'"
                if kind == "ssh"
                else f"'sandbox.hosts' is for --sandbox ssh, and this is {kind}. Remove it"
            )
        if kind in _NO_HOST_LIST and not isinstance(self.sandbox.network, bool):
            raise UserError(
                f"--sandbox {kind} cannot limit the network to hosts. "
                "Use another sandbox, or --network on"
            )
        if self.sandbox.backend == "none" and not self.run.allow_unsandboxed:
            raise UserError(
                "--sandbox none runs the model's commands as you, on this machine. "
                "Use the default sandbox, or add --allow-unsandboxed"
            )

    def _refuse_unused_budgets(self) -> None:
        """Refuse budgets of models that the run does not call."""
        where, models = self.endpoint, self.model.mix or (self.model.name,)
        places = {name: place.model for name, place in where.places.items()}
        used = {places.get(name) or name for name in models} | {f.model for f in where.fallbacks}
        if self.env is not None:
            used |= {place.name for place in (self.env.judge, self.env.user) if place is not None}
        used |= {judge.name for judge in self.scoring.judges}
        beside = (self.agent.context.summary, self.agent.vision)
        used |= {place.name for place in beside if place is not None}
        run = self.run
        budgets = [("model_budgets", n) for n in run.model_budgets]
        budgets += [("model_token_budgets", n) for n in run.model_token_budgets]
        for key, name in budgets:
            if name not in used:
                raise UserError(
                    f"'run.{key}' holds {name}, but the run asks {', '.join(sorted(used))}"
                    ". Use the name at its endpoint"
                )

    def _refuse_idle_context(self) -> None:
        """Settings of a compression that does not take place, or that no file can hold."""
        agent = self.agent
        if not isinstance(agent.context.engine, str | None):
            raise UserError(
                "'agent.context.engine' is an object. Give a run the name of an entry point in "
                "the group hermes_rl.context_engines"
            )
        default = agent.preset != "rl" and self.model.name not in LOCAL_MODELS
        compresses = agent.switches.get("compress_context", default)
        if agent.context != ContextConfig() and not compresses:
            raise UserError(
                "'agent.context' has no effect, since contexts are not compressed. Take it out, "
                "or add --set agent.switches.compress_context=true"
            )

    def _refuse_invalid_text(self) -> None:
        """Refuse texts that cannot be stored, such as shell arguments that are not valid UTF-8."""
        text = json.dumps(self.model_dump(mode="python"), ensure_ascii=False, default=str)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - 30) : error.end]
            raise UserError(f"not valid UTF-8 text: {near!a}. Write it in UTF-8") from None

    def _refuse_models(self) -> None:
        """Refuse models where they cannot be used."""
        built_in = (*PLAYED_MODELS, *LOCAL_MODELS)
        if self.model.mix and self.model.name in built_in:
            raise UserError(f"a mix cannot be called {self.model.name}. Leave model.name out")
        for name in self.endpoint.places:
            if name not in (self.model.mix or (self.model.name,)):
                raise UserError(f"'endpoint.places' holds {name}, which the run does not ask")
        fallbacks = [f.model for f in self.endpoint.fallbacks]
        for key, names in (("model.mix", self.model.mix or ()), ("endpoint.fallbacks", fallbacks)):
            for name in names:
                if name in built_in:
                    raise UserError(f"'{key}' holds {name}, which no endpoint serves. Take it out")
        if not fallbacks:
            return
        if self.model.name in built_in and not self.model.mix and self.endpoint.base_url is None:
            raise UserError(
                f"'endpoint.fallbacks' is set with the model {self.model.name}, "
                "which needs none. Take it out"
            )
        if self.agent.preset == "rl":
            raise UserError(
                "'endpoint.fallbacks' would mix two policies in one trajectory. Take it out, "
                "or use another preset than rl"
            )


class ModelConfig(ConnectionSection, PolicySamplingSection):
    """A model for `AIAgent`, with its endpoint."""

    name: str
    api_key: SecretStr | None = None
    key_command: Annotated[str, Field(min_length=1)] | None = None
    """Prints a short-lived key; see `endpoint.key_commands` of a run."""
    images: bool = False
    """It takes images: it sees those that it reads with `read_file`."""


def parse_config(
    data: Mapping[str, Any], place: str = "config", written: Mapping[str, str] | None = None
) -> RunConfig:
    """A configuration from plain data.

    Args:
        place: what the data came from, for the message.
        written: dotted key -> what the user typed for it, such as `--repeats 0`; it names the place
            of that key better.

    Raises: UserError, one line: place, key and what is wrong with it.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise refusal(error.errors(), RunConfig, place, written) from None


def check_keys(
    data: Mapping[str, Any],
    place: str = "config",
    written: Mapping[str, str] | None = None,
    line_of: LineOf | None = None,
) -> None:
    """Refuse unknown keys and wrong values, but not missing keys.

    Args:
        line_of: the line of a dotted key in the file that the data came from.

    Raises: UserError, as `parse_config`.
    """
    try:
        RunConfig.model_validate(data)
    except ValidationError as error:
        faults = [one for one in error.errors() if one["loc"] and one["type"] != "missing"]
        if faults:
            raise refusal(faults, RunConfig, place, written, line_of) from None


def load_config(path: Path) -> dict[str, Any]:
    """The plain data of a YAML file, for `parse_config`.

    Raises: UserError when the file is absent, not YAML, or not a mapping, and for keys and values
    that no configuration can have; with the line.
    """
    data, line_of = read_mapping(path, RunConfig)
    for name, value in data.items():
        if name in RunConfig.model_fields and not isinstance(value, dict | None):
            raise UserError(f"{path}: '{name}' is not a section. Put its keys below it")
    data = {name: value for name, value in data.items() if value is not None}
    check_keys(data, str(path), line_of=line_of)
    return data


def set_key(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested plain data, making sections on the way. Raises: UserError."""
    *sections, last = dotted.split(".")
    for section in sections:
        inner = data.get(section)
        if inner is None:
            inner = data[section] = {}
        if not isinstance(inner, dict):
            raise UserError(f"'{dotted}' cannot be set: '{section}' holds no keys")
        data = inner
    data[last] = value


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` of `--set`; the value is read as YAML. Raises: UserError."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"--set {text}: write --set section.key=value")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = value
    if "." not in key and not isinstance(parsed, dict):
        raise UserError(f"--set {text}: write --set section.key=value, such as model.name=NAME")
    return key, parsed


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML. Keys are stored by variable name, never by value, and
    secrets of this process are replaced in all texts."""
    content = SECRETS.scrub_record(config.model_dump(mode="json"))
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
