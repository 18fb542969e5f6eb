"""`hermes-rl doctor`: what works on this machine, and what to install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.errors import ExitCode, HermesError, UserError

if TYPE_CHECKING:
    from hermes_rl.config import RunConfig
    from hermes_rl.config_endpoint import EndpointSection
    from hermes_rl.models import Endpoint
    from hermes_rl.models.providers import Capabilities, ProbeCall


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    name: str
    good: bool | None
    """None for a neutral fact."""
    text: str


def library(subject: str, name: str, hint: str = "reinstall hermes-rl") -> Finding:
    """Whether a library is installed."""
    try:
        return Finding(subject, name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(subject, name, False, f"not installed: {hint}")


class Subject(StrEnum):
    """What to check."""

    ALL = "all"
    SANDBOXES = "sandboxes"
    MODELS = "models"
    TOOLS = "tools"


def _of(name: str, text: str) -> Any:
    return typer.Option(name, help=text, show_default=False)


def command(
    subject: Annotated[Subject, typer.Argument(help="what to check")] = Subject.ALL,
    model: Annotated[str | None, _of("--model", "probe this model")] = None,
    provider: Annotated[str | None, _of("--provider", "with --model: known provider")] = None,
    base_url: Annotated[str | None, _of("--base-url", "with --model: endpoint")] = None,
    api_key_env: Annotated[
        str | None, _of("--api-key-env", "with --model: variable that holds the key")
    ] = None,
    api_mode: Annotated[str | None, _of("--api-mode", "with --model: dialect")] = None,
    config: Annotated[
        Path | None, _of("--config", "with models: your providers and endpoint")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False,
) -> int:
    """Show what works on this machine, and what to install.

    \b
    hermes-rl doctor
    hermes-rl doctor sandboxes
    hermes-rl doctor models --provider vllm --model Qwen/Qwen3-8B
    """
    query = Query(model, provider, base_url, api_key_env, api_mode, config)
    alone = query == Query(config=config) and (config is None or subject is Subject.MODELS)
    if not alone and (model is None or subject is not Subject.MODELS):
        raise UserError("to probe an endpoint: hermes-rl doctor models --model NAME ...")
    checks: dict[Subject, Callable[[], list[Finding]]] = {
        Subject.SANDBOXES: sandboxes,
        Subject.MODELS: lambda: models(query),
        Subject.TOOLS: tools,
    }
    findings = machine() if subject is Subject.ALL else []
    for name, check in checks.items():
        if subject in (Subject.ALL, name):
            findings += check()
    if as_json:
        print(json.dumps([asdict(f) for f in findings], ensure_ascii=False))
    else:
        _print(findings)
    return ExitCode.DONE if all(f.good is not False for f in findings) else ExitCode.GIVEN_UP


def _print(findings: list[Finding]) -> None:
    marks = {True: "ok ", False: "NO ", None: "   "}
    width = max((len(f.name) for f in findings), default=0)
    subject = ""
    for f in findings:
        if f.subject != subject:
            subject = f.subject
            print(f"{subject}")
        print(f"  {marks[f.good]} {f.name.ljust(width)}  {f.text}")


_SLOW_RAY = (
    "each process of Ray takes about 1 s of CPU longer to start, because rfc3987-syntax is "
    "installed (with Jupyter's server): an environment without it starts runs faster"
)
"""Ray imports jsonschema, which imports this package; its import compiles 38 grammars."""


_NO_BYTECODE = (
    "PYTHONDONTWRITEBYTECODE is set and the packages are not compiled, so each start compiles them "
    "again, about 2 s: unset it, or run `python -m compileall -q {folder}` once"
)


def machine() -> list[Finding]:
    """Python, cores, memory, disk, and the libraries of the base install."""
    version = platform.python_version()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = shutil.disk_usage(Path.cwd())
    cores = len(os.sched_getaffinity(0))
    found = [
        Finding("machine", "python", sys.version_info >= (3, 11), f"{version} (3.11 or newer)"),
        Finding("machine", "system", None, f"{platform.system()} {platform.release()}"),
        Finding("machine", "cores", None, f"{cores}, memory {memory / 2**30:.0f} GiB"),
        Finding("machine", "disk", disk.free > 2**30, f"{disk.free / 2**30:.0f} GiB free here"),
    ]
    for name in ("ray", "pyarrow", "datasets", "aiohttp", "openai"):
        found.append(library("machine", name))
    if sys.dont_write_bytecode and not Path(cache_from_source(__file__)).exists():
        text = _NO_BYTECODE.format(folder=sysconfig.get_path("purelib"))
        found.append(Finding("machine", "bytecode", None, text))
    if find_spec("rfc3987_syntax") is not None:
        found.append(Finding("machine", "ray start", None, _SLOW_RAY))
    return found


def sandboxes() -> list[Finding]:
    """Whether bubblewrap starts, and which limits the machine can enforce."""
    from hermes_rl.sandboxes import ENGINES, probe_machine, solutions

    p = probe_machine()
    found = [Finding("sandboxes", "bubblewrap", p.works, f"{p.version} {p.message}".strip())]
    found += [Finding("sandboxes", "launcher", None, _launcher(p.no_zygote))] if p.works else []
    if p.works:
        held = [name for name, possible in p.limits.items() if possible]
        absent = [name for name, possible in p.limits.items() if not possible]
        text = ", ".join(held) + (f"; not here: {', '.join(absent)}" if absent else "")
        images = "root file systems as images" if p.overlay else "no images: bubblewrap is too old"
        apart = "user ids and namespaces" if p.root else "namespaces alone (not root: one user id)"
        found += [
            Finding("sandboxes", "limits", None, text),
            Finding("sandboxes", "workspace", None, _workspace(p.no_disks)),
            Finding("sandboxes", "memory", None, _memory(p.cgroups)),
            Finding("sandboxes", "overlay", None, images),
            Finding("sandboxes", "isolation", None, f"sandboxes are kept apart by {apart}"),
        ]
    if hidden := ", ".join(solutions(Path("/"))):
        text = f"empty in sandboxes, for they hold solutions: {hidden}"
        found.append(Finding("sandboxes", "hidden", None, text))
    none = "--sandbox none shows agents all that you can read, solutions of bundled tasks too"
    found.append(Finding("sandboxes", "none", None, none))
    found += [Finding("sandboxes", name, None, _engine(name)) for name in ENGINES]
    found.append(Finding("sandboxes", "apptainer", None, _apptainer()))
    found.append(Finding("sandboxes", "modal", None, _modal()))
    return [*found, Finding("sandboxes", "ssh", None, _ssh()), *_foreign()]


def _modal() -> str:
    found = library("sandboxes", "modal", "pip install 'hermes-rl[modal]'")
    if not found.good:
        return f"modal is {found.text}"
    return f"modal {found.text}; `modal token info` shows the account that runs use"


def _apptainer() -> str:
    from hermes_rl.errors import SandboxStartError
    from hermes_rl.sandboxes import find_program

    try:
        found = find_program()
    except SandboxStartError as error:
        return str(error)
    return f"{found}{', for ordinary users only' if os.geteuid() == 0 else ''}"


def _ssh() -> str:
    found = library("sandboxes", "asyncssh", "pip install 'hermes-rl[ssh]'")
    if not found.good:
        return f"asyncssh is {found.text}"
    return f"asyncssh {found.text}; `hermes-rl sandboxes list --hosts A,B` looks at machines"


def _foreign() -> list[Finding]:
    """Backends that other packages bring."""
    from hermes_rl.config import SANDBOX_GROUP
    from hermes_rl.wiring import make_backend

    found = []
    for entry in importlib.metadata.entry_points(group=SANDBOX_GROUP):
        try:
            make_backend(entry.name)
            good, text = None, f"of the package {entry.dist.name if entry.dist else entry.value}"
        except UserError as error:
            good, text = False, str(error)
        found.append(Finding("sandboxes", entry.name, good, text))
    return found


def _engine(name: str) -> str:
    from hermes_rl.errors import SandboxStartError
    from hermes_rl.sandboxes import Engine

    try:
        engine = Engine(name)
        return f"{engine.version()} at {engine.path}"
    except SandboxStartError as error:
        return str(error)


def _launcher(no_zygote: str) -> str:
    if no_zygote:
        return f"bubblewrap starts all sandboxes ({no_zygote})"
    return "the zygote starts sandboxes without image and network, bubblewrap all others"


def _workspace(no_disks: str) -> str:
    if not no_disks:
        return "limited by the kernel: each sandbox has a file system of its own"
    return f"counted every few seconds, so a fast writer is stopped late ({no_disks})"


def _memory(cgroups: bool) -> str:
    if cgroups:
        return "limited for each sandbox as a whole, by a control group"
    return (
        "NOT limited for a whole sandbox (no control groups here): only each process's address "
        "space is, so many processes, memfd files and sockets can fill the machine's memory"
    )


def tools() -> list[Finding]:
    """Toolsets and their tools."""
    from hermes_rl.tools import TOOLSETS, resolve

    return [
        Finding("tools", name, None, ", ".join(resolve([name])) or "no tools") for name in TOOLSETS
    ]


@dataclass(frozen=True)
class Query:
    """The options that select an endpoint."""

    model: str | None = None
    provider: str | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    api_mode: str | None = None
    config: Path | None = None
    """A configuration file with providers, and the endpoint without other options."""


def models(query: Query = Query()) -> list[Finding]:
    """Providers and embedded models; with a model its capabilities, for a few hundred tokens.

    Raises: UserError for an invalid endpoint or a key that is not set.
    """
    if query.model is not None:
        return _probe_endpoint(query)
    return [*_providers(query), *_printed_keys(query), *_embedded_models(), *_dialects()]


def _config(query: Query) -> RunConfig:
    """The configuration of an endpoint from options and file. Raises: UserError."""
    from hermes_rl.config import load_config, parse_config

    data = load_config(query.config) if query.config else {}
    where = data.get("endpoint") or {}
    if not isinstance(where, dict):
        raise UserError(f"{query.config}: 'endpoint' is {where!r}: write a section")
    model = data.get("model")
    extra = model.get("extra_body") if isinstance(model, dict) else None
    names = ("provider", "base_url", "api_key_env", "api_mode")
    chosen = {name: value for name in names if (value := getattr(query, name)) is not None}
    if "provider" in chosen or "base_url" in chosen:
        where = {k: v for k, v in where.items() if k not in names}
    kept = {k: v for k, v in where.items() if k not in ("fallbacks", "places")}
    return parse_config(
        {
            "dataset": {"path": "smoke"},
            "model": {"name": query.model or "any", "extra_body": extra or {}},
            "endpoint": {**kept, **chosen},
            "providers": data.get("providers") or {},
        },
        str(query.config or "doctor"),
    )


def _providers(query: Query) -> list[Finding]:
    from hermes_rl.models.providers import DEFAULT_MODE, known_providers

    config = _config(query) if query.config else None
    printed = config.endpoint.key_commands if config else {}
    found = []
    for entry in known_providers(config.providers if config else None).values():
        key = entry.api_key_env
        held = bool(key and (key in printed or os.environ.get(key)))
        has = "comes from a command" if key in printed else f"is {'set' if held else 'not set'}"
        parts = [
            entry.base_url or "",
            entry.api_mode or DEFAULT_MODE,
            f"{key} {has}" if key else "no key needed",
            entry.note,
        ]
        text = "; ".join(part for part in parts if part)
        found.append(Finding("providers", entry.name, held or None, text))
    return found


def _printed_keys(query: Query) -> list[Finding]:
    """Run the key commands of a configuration, and report when their keys expire."""
    if query.config is None:
        return []
    import time

    from hermes_rl.models import KeyCommand, read_key_expiry

    found = []
    for name, command in _config(query).endpoint.key_commands.items():
        try:
            ends = read_key_expiry(KeyCommand(name, command).run())
        except UserError as error:
            found.append(Finding("keys", name, False, str(error)))
            continue
        left = "" if ends is None else f", which ends in {(ends - time.time()) / 60:.0f} min"
        found.append(Finding("keys", name, True, f"its command prints a key{left}"))
    return found


def _embedded_models() -> list[Finding]:
    from hermes_rl.config import LOCAL_MODELS
    from hermes_rl.models.local import cache_folder, find_weights

    engine = library("models", "xllamacpp", "pip install 'hermes-rl[local]' for --model local")
    found = [Finding("models", "engine", engine.good or None, engine.text)]
    for name in LOCAL_MODELS:
        weights = find_weights(name)
        path = cache_folder(os.environ) / weights.file
        size = f"{weights.bytes / 1e6:,.0f} MB"
        where = f"weights in {path}" if path.exists() else f"{size} are fetched at the first use"
        found.append(Finding("models", name, None, f"{weights.description}; {where}"))
    return found


def _dialects() -> list[Finding]:
    from hermes_rl.models import DIALECTS
    from hermes_rl.models.providers import read_list_prices

    table = read_list_prices()
    known = sum(price is not None for prices in table.values() for price in prices.values())
    newest = max(p.read for prices in table.values() for p in prices.values() if p is not None)
    return [
        Finding("models", "dialects", None, f"{', '.join(DIALECTS)}, each over http and sdk"),
        Finding("models", "prices", None, f"{known} list prices, read {newest}"),
    ]


def _probe_endpoint(query: Query) -> list[Finding]:
    from hermes_rl.aio import run_sync
    from hermes_rl.models.providers import (
        Keys,
        Probe,
        find_keys,
        resolve_targets,
    )

    assert query.model is not None
    config = _config(query)
    where = config.endpoint
    target = resolve_targets(where, config.providers, extra=config.model.extra_body)[0]
    keys = find_keys([target.place], os.environ, where.key_commands)
    endpoint = Keys(keys).endpoint(where, target.place)
    try:
        probe = Probe(endpoint, query.model, extra=target.extra, prices=target.prices)
        found = run_sync(probe.capabilities())
        exact = _exact_token_findings(where, endpoint, query.model)
    except HermesError as error:
        return [Finding("endpoint", endpoint.host, False, str(error))]
    provider = target.place.provider or "no known provider"
    head = Finding("endpoint", endpoint.host, None, f"{provider}, {endpoint.api_mode}")
    return [head, *_findings(found), *exact, *_calls(found.calls)]


def _exact_token_findings(where: EndpointSection, endpoint: Endpoint, model: str) -> list[Finding]:
    """How a run would get token ids with prompts of ids, if a tokenizer is set.

    Raises: UserError for a tokenizer that cannot be loaded, or a way that is not supported.
    """
    if where.tokenizer is None or where.tokens in ("off", "chat"):
        return []
    from hermes_rl.aio import run_sync
    from hermes_rl.models.providers import Probe
    from hermes_rl.models.tokens import load_renderer

    probe = Probe(endpoint, model, load_renderer(where.tokenizer))
    plan = run_sync(probe.plan(where.tokens))
    return [Finding("endpoint", "exact tokens", plan.exact or None, t) for t in plan.lines()]


def _findings(found: Capabilities) -> list[Finding]:
    ids = f"in {found.token_ids}'s spelling" if found.token_ids else None
    looks: tuple[tuple[str, bool | None, dict[bool | None, str]], ...] = (
        ("listed", found.listed, {None: "it keeps no list of models"}),
        ("answers", found.answers, {}),
        ("tools", found.tools, {False: "it was asked to call one and did not"}),
        ("streaming", found.streaming, {}),
        ("usage", found.usage, {}),
        ("usage in streams", found.usage_in_streams, {}),
        ("cached tokens", found.cached_tokens, {False: "usage does not tell them"}),
    )
    defaults = {True: "yes", False: "no", None: "not known"}
    findings = [
        Finding(
            "endpoint",
            name,
            good if name in _NEEDED else good or None,
            texts.get(good, defaults[good]),
        )
        for name, good, texts in looks
    ]
    kind = found.logprobs or "none"
    return [
        *findings,
        Finding("endpoint", "logprobs", bool(found.logprobs) or None, kind),
        Finding("endpoint", "token ids", bool(ids) or None, ids or "none"),
    ]


_NEEDED = ("answers", "tools")
"""Without these no run can work."""


def _calls(calls: tuple[ProbeCall, ...]) -> list[Finding]:
    found = []
    for call in calls:
        counts = call.usage or {}
        tokens = f"{_n(counts.get('input_tokens'))} in, {_n(counts.get('output_tokens'))} out"
        cost = "unpriced" if call.cost_usd is None else f"${call.cost_usd:.6f}"
        text = call.error or f"{tokens}, {cost}, {call.latency_s:.2f} s"
        found.append(Finding("calls", call.what, None, text))
    return found


def _n(count: float | None) -> str:
    return "?" if count is None else f"{count:,}"
