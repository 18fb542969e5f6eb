"""`BaseEnv` of Atropos 0.4.0: its environments run after the import is changed.

    from hermes_rl.rl.compat import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem

docs/atropos.md says what is different.
"""

from __future__ import annotations

import asyncio
import enum
import importlib
import json
import logging
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args

import aiohttp
import yaml
from pydantic import BaseModel, Field, ValidationError

from hermes_rl.config import read_mapping
from hermes_rl.errors import HermesError, UserError
from hermes_rl.rl.atropos.sampling import APIServerConfig, ServerBaseline, ServerManager
from hermes_rl.rl.atropos.serving import ApiClient, Served, ServeOptions

__all__ = [
    "APIServerConfig", "BaseEnv", "BaseEnvConfig", "EvalHandlingEnum", "Item", "ScoredDataGroup",
    "ScoredDataItem", "ServerBaseline",
]  # fmt: skip

Item = Any
MODES = ("serve", "process", "evaluate")
FAILURES = 16
"""Items in a row that may fail before an environment ends."""
_log = logging.getLogger("hermes_rl.rl.compat")


class ScoredDataItem(TypedDict, total=False):
    """One rollout of a group."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    inference_logprobs: list[float] | None
    messages: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any


class ScoredDataGroup(TypedDict, total=False):
    """A group; each list has one entry per rollout."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    messages: list[list[dict[str, Any]]] | None
    generation_params: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None
    images: Any
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None


_LISTS = ("advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides", "images")


class EvalHandlingEnum(enum.Enum):
    """What becomes of training rollouts during an evaluation."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(BaseModel):
    """Configuration of an environment, with the fields of Atropos. Those without a description are
    accepted and not used."""

    group_size: int = Field(default=4, ge=1, description="rollouts of an item")
    max_num_workers: int = Field(default=-1, description="items at once; -1 is 8 per model server")
    max_num_workers_per_node: int = Field(default=8, description="items at once per model server")
    max_eval_workers: int = 16
    steps_per_eval: int = Field(default=100, description="steps between evaluations; 0 for none")
    max_token_length: int = Field(
        default=2048, description="of generations; weighs the environment"
    )
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN, description="what becomes of training meanwhile"
    )
    eval_limit_ratio: float = Field(default=0.5, description="share of items during LIMIT_TRAIN")
    inference_weight: float = Field(default=1.0, description="share among environments")
    batch_size: int = Field(default=-1, description="of the trainer")
    max_batches_offpolicy: int = Field(
        default=3, description="batches that may wait at the API; 0 for any number"
    )
    tokenizer_name: str = Field(
        default="", description="of self.tokenizer, which needs transformers"
    )
    use_wandb: bool = True
    rollout_server_url: str = Field(
        default="http://localhost:8000", description="the trajectory API"
    )
    total_steps: int = Field(
        default=1000, description="last step; groups in process; -1 is the trainer's"
    )
    wandb_name: str | None = Field(default=None, description="name of the environment at the API")
    num_rollouts_to_keep: int = 32
    num_rollouts_per_group_for_logging: int = 1
    ensure_scores_are_not_same: bool = Field(
        default=True, description="send no groups of equal scores"
    )
    data_path_to_save_groups: str | None = Field(default=None, description="JSONL file of groups")
    data_dir_to_save_evals: str | None = Field(default=None, description="folder of evaluations")
    min_items_sent_before_logging: int = 2
    include_messages: bool = Field(default=False, description="send the conversations")
    min_batch_allocation: float | None = Field(
        default=None, description="least share of each batch"
    )
    worker_timeout: float = Field(default=600, description="seconds of an item; -1 for no limit")
    thinking_mode: bool = False
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    custom_thinking_prompt: str | None = None


class BaseEnv(ABC):
    """An environment that makes its rollouts itself."""

    name: str | None = None
    env_config_cls: type[BaseEnvConfig] = BaseEnvConfig

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.server = self._servers = ServerManager(server_configs)
        self.curr_step, self.max_token_len, self.env_id = 0, -1, -1
        self.checkpoint_dir, self.checkpoint_interval = "", -1
        self.wandb_prepend: str | None = None
        self.completion_lengths: list[int] = []
        self.backlog: list[Item] = []
        self.sent = 0
        """Groups that were sent or written."""
        self._api: ApiClient | None = None
        self._file: Path | None = None
        self._failures = 0

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | list[APIServerConfig]]:
        """Return the default configuration."""
        return cls.env_config_cls(), ServerBaseline()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `tokenizer_name`. Raises: UserError without transformers."""
        try:
            transformers = importlib.import_module("transformers")  # of the environment, not ours
        except ImportError as error:
            raise UserError(
                "self.tokenizer needs transformers: pip install transformers"
            ) from error
        return transformers.AutoTokenizer.from_pretrained(self.config.tokenizer_name)

    async def setup(self) -> None:
        """Prepare the environment."""
        raise NotImplementedError("setup must be implemented")

    @abstractmethod
    async def get_next_item(self) -> Item:
        """Return what to roll out next; None at the end."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the policy, every `steps_per_eval` steps."""

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        """Roll out an item once; returns a ScoredDataItem and further items."""
        raise NotImplementedError("collect_trajectory or collect_trajectories must be implemented")

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """Roll out an item `group_size` times. A rollout that fails is made once more."""
        wanted = range(self.config.group_size)
        results = await asyncio.gather(*(self._collect_twice(item) for _ in wanted))
        group: dict[str, Any] = {"group_overrides": {}}
        for name in ("tokens", "masks", "scores"):
            group[name] = [made[name] for made, _ in results]
        for name in _LISTS:
            group[name] = [made[name] for made, _ in results if made.get(name) is not None]
        for made, _ in results:
            group["group_overrides"].update(made.get("group_overrides") or {})
        return group, [further for _, more in results for further in more]

    async def _collect_twice(self, item: Item) -> tuple[dict[str, Any], list[Item]]:
        for last in (False, True):
            try:
                made, more = await self.collect_trajectory(item)
                if isinstance(made, dict):
                    return made, list(more)
                why: Exception = ValueError("collect_trajectory returned no ScoredDataItem")
            except Exception as error:  # whatever the environment's code raises
                why = error
            if last:
                raise why
            _log.warning("a rollout failed and is made again: %s", _line(why))
        raise AssertionError

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Change groups before they are sent."""
        return trajectories

    async def cleanup(self) -> None:
        """Called after each item."""
        return

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log metrics; also those that a subclass passes on."""
        if wandb_metrics:
            _log.info("step %d: %s", self.curr_step, wandb_metrics)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Store attributes for `load_checkpoint`."""
        if data is not None:
            path = self._checkpoint(step)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data))

    def load_checkpoint(self) -> None:
        """Set the attributes that were stored at this step."""
        if (path := self._checkpoint(self.curr_step)).exists():
            for name, value in json.loads(path.read_text()).items():
                setattr(self, name, value)

    def _checkpoint(self, step: int) -> Path:
        folder = Path(self.checkpoint_dir) / "env_checkpoints" / str(self.wandb_prepend)
        return folder / f"step-{step}.json"

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: Sequence[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write `metrics.json` and `samples.jsonl` to `data_dir_to_save_evals`."""
        if self.config.data_dir_to_save_evals is None:
            _log.warning("data_dir_to_save_evals is not set; the evaluation is not written")
            return
        folder = Path(self.config.data_dir_to_save_evals)
        folder.mkdir(parents=True, exist_ok=True)
        name = task_name or f"{self.name or type(self).__name__}_eval"
        took = (end_time or time.time()) - (start_time or time.time())
        sampling = {"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})}
        content = {
            "config_general": {
                "model_name": model_name or self.server.servers[0].config.model_name,
                "total_evaluation_time_seconds": str(max(0.0, took)),
                "generation_parameters": sampling,
            },
            "results": {f"atropos|{name}|0": metrics, "all": metrics},
        }
        (folder / "metrics.json").write_text(json.dumps(content, indent=2))
        if samples:
            lines = "".join(json.dumps(sample) + "\n" for sample in samples)
            (folder / "samples.jsonl").write_text(lines)
        if verbose:
            print("  ".join(f"{key} {value}" for key, value in metrics.items()))

    # Running

    async def env_manager(self) -> None:
        """Send groups to a trajectory API until its trainer has made `total_steps`."""
        await self.setup()
        config = self.config
        served = Served(
            config.wandb_name or self.name or "env", config.group_size, uuid.uuid4().hex
        )
        options = ServeOptions(
            url=config.rollout_server_url,
            weight=config.inference_weight,
            min_batch_allocation=config.min_batch_allocation,
            max_batches_ahead=config.max_batches_offpolicy,
            max_token_length=config.max_token_length,
        )
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            self._api = api = ApiClient(session, served, options, print)
            reply = await api.register()
            self.env_id, self.wandb_prepend = reply["env_id"], reply["wandb_name"]
            self.curr_step, self.checkpoint_dir = reply["starting_step"], reply["checkpoint_dir"]
            self.checkpoint_interval = reply["checkpoint_interval"]
            config.batch_size, self.max_token_len = api.batch_size, api.max_token_len
            if config.total_steps == -1:
                config.total_steps = reply["num_steps"]
            if self.curr_step > 0:
                self.load_checkpoint()
            try:
                await self._work(self._steps_left)
            finally:
                await api.disconnect()

    async def process_manager(self) -> None:
        """Write `total_steps` groups to `data_path_to_save_groups`, many at once."""
        await self.setup()
        await self._work(self._groups_left)

    async def _steps_left(self, running: int) -> int:
        """Items that may start; -1 at the end."""
        assert self._api is not None
        free = await self._api.has_capacity()
        before, self.curr_step = self.curr_step, self._api.step
        if self.curr_step > before:
            await self._after_step(before)
        if self.curr_step >= self.config.total_steps > 0:
            return -1
        return max(0, self._workers() - running) if free else 0

    async def _after_step(self, before: int) -> None:
        def crossed(interval: int) -> bool:
            return interval > 0 and before // interval < self.curr_step // interval

        if crossed(self.checkpoint_interval):
            interval = self.checkpoint_interval
            self.save_checkpoint(self.curr_step // interval * interval)
        if crossed(self.config.steps_per_eval) and (self._eval is None or self._eval.done()):
            self._eval = asyncio.create_task(self._evaluate_beside())
        await self.wandb_log({})

    async def _evaluate_beside(self) -> None:
        """Evaluate while rollouts run. A failure is logged; the next evaluation is tried."""
        step = self.curr_step
        try:
            await self.evaluate()
        except Exception as error:  # whatever the environment's code raises
            plain = isinstance(error, HermesError) or hasattr(error, "request")
            why = None if plain else error
            _log.warning("evaluation at step %d failed: %s", step, _line(error), exc_info=why)

    _eval: asyncio.Task[Any] | None = None

    def _workers(self) -> int:
        most = self.config.max_num_workers
        if most < 1:
            most = self.config.max_num_workers_per_node * len(self.server.servers)
        if self._eval is not None and not self._eval.done():
            if self.config.eval_handling is EvalHandlingEnum.STOP_TRAIN:
                return 0
            if self.config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN:
                return int(most * self.config.eval_limit_ratio)
        return most

    async def _groups_left(self, running: int) -> int:
        left = self.config.total_steps - self.sent
        return max(0, min(self._workers(), left) - running) if left > 0 else -1

    async def _work(self, count: Any) -> None:
        """Roll out items, as many at once as `count(running)` allows; rollouts that run are not
        cancelled when the queue is full."""
        running: set[asyncio.Task[None]] = set()
        over = False
        try:
            while not over or running:
                free = -1 if over else await count(len(running))
                if free < 0:
                    break
                while free > 0 and not over:
                    free -= 1
                    item = self.backlog.pop() if self.backlog else await self.get_next_item()
                    over = item is None
                    if not over:
                        running.add(asyncio.create_task(self.handle_env(item)))
                if running:
                    done, running = await asyncio.wait(
                        running, timeout=0.5, return_when=asyncio.FIRST_COMPLETED
                    )
                    await asyncio.gather(*done)  # reads the failures of all
                elif not over:
                    await asyncio.sleep(0.5)
            if over and running:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def handle_env(self, item: Item) -> None:
        """Roll out an item and deliver its groups. An item that fails is logged and left out.

        Raises: UserError after many failures in a row; HermesError of the API.
        """
        limit = self.config.worker_timeout if self.config.worker_timeout > 0 else None
        try:
            async with asyncio.timeout(limit):
                made, more = await self.collect_trajectories(item)
                self.backlog.extend(more)
                made = await self.postprocess_histories(made) if made else None
        except HermesError:
            raise
        except Exception as error:  # whatever the environment's code raises
            plain = isinstance(error, TimeoutError) or hasattr(error, "request")
            _log.warning("an item failed: %s", _line(error), exc_info=None if plain else error)
            self._failures += 1
            if self._failures >= FAILURES:
                raise UserError(
                    f"{FAILURES} items in a row failed, the last one: {_line(error)}"
                ) from error
            return
        self._failures = 0
        if made:
            await self.handle_send_to_api(made, item)
        await self.cleanup()

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Write and send a group or a list of groups; those that a trainer cannot use are left
        out."""
        listed = scored_data if isinstance(scored_data, list) else [scored_data]
        sent = []
        for group in listed:
            if group is None or (why := self._unfit(group, abort_on_any_max_length_exceeded)):
                _log.warning("a group is left out: %s", why if group is not None else "None")
                continue
            self.completion_lengths += [sum(m != -100 for m in mask) for mask in group["masks"]]
            if not self.config.include_messages:
                group = {**group, "messages": None}
            sent.append({n: v for n, v in group.items() if v != [] and v != {}})
        if not sent:
            return
        self.sent += len(sent)
        if (path := self._groups_file()) is not None:
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(group) + "\n" for group in sent)
        if do_send_to_api and self._api is not None:
            await self._api.send(sent, uuid.uuid4().hex)

    def _unfit(self, group: Any, bounded: bool) -> str | None:
        size = (group.get("group_overrides") or {}).get("group_size", self.config.group_size)
        tokens = group.get("tokens") or []
        if len(tokens) != size:
            return f"{len(tokens)} rollouts, {size} expected"
        if self.config.ensure_scores_are_not_same and len(set(group["scores"])) == 1:
            return f"all scores are {group['scores'][0]}"
        longest = max(map(len, tokens))
        if self._api is not None and bounded and 0 < self.max_token_len <= longest:
            return (
                f"a sequence of {longest} tokens; the trainer takes fewer than {self.max_token_len}"
            )
        return None

    def _groups_file(self) -> Path | None:
        """The file of groups; one that is there already is kept, and the name gets a number."""
        named = self.config.data_path_to_save_groups
        if named is not None and self._file is None:
            first = path = Path(named)
            number = 1
            while path.exists():
                path, number = first.with_stem(f"{first.stem}_{number}"), number + 1
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path
        return self._file

    # The command line

    @classmethod
    def cli(cls) -> None:
        """Run `serve`, `process` or `evaluate`. `--env.x V` and `--openai.x V` override a YAML file
        (`--config`), which overrides `config_init`."""
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        for name in ("httpx", "httpx2", "openai"):  # they have a line for each request
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            mode, config, servers = cls._parse(sys.argv[1:])
            asyncio.run(cls(config, servers)._run(mode))
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except Exception as error:  # also of the environment's code
            if not isinstance(error, HermesError | OSError) and not hasattr(error, "request"):
                raise
            print(f"error: {_line(error)}", file=sys.stderr)
            raise SystemExit(2) from None

    async def _run(self, mode: str) -> None:
        work = {"serve": self.env_manager, "process": self.process_manager}
        try:
            await work.get(mode, self._run_evaluate)()
        finally:  # connections that are left to the collector are closed in some other loop
            await self._servers.aclose()  # `server` may be the environment's by now

    async def _run_evaluate(self) -> None:
        await self.setup()
        await self.evaluate()

    @classmethod
    def _parse(cls, argv: list[str]) -> tuple[str, BaseEnvConfig, list[APIServerConfig]]:
        """Raises: UserError."""
        config, servers = cls.config_init()
        mode = argv[0] if argv else "--help"
        if {"-h", "--help"} & {mode, *argv}:
            fields = type(config).model_fields.items()
            about = "\n".join(f"  --env.{n} ({f.description or 'not used'})" for n, f in fields)
            raise SystemExit(f"usage: {sys.argv[0]} serve|process|evaluate [OPTIONS]\n{about}")
        if mode not in MODES:
            raise UserError(f"no command {mode}: serve, process or evaluate. {_HELP}")
        values: dict[str, Any] = {}
        if mode == "process":
            values = {"env.ensure_scores_are_not_same": False, "env.include_messages": True}
            values |= {"env.total_steps": 10}
            values["env.data_path_to_save_groups"] = f"data/{cls.name or cls.__name__}.jsonl"
        flags = _read_flags(argv[1:])
        listed = servers if isinstance(servers, list) else [servers]
        if (path := flags.pop("config", None)) is not None:
            content, _ = read_mapping(Path(path), BaseEnvConfig)
            if isinstance(several := content.get("openai"), list):
                listed = [_make(APIServerConfig(), "openai", _section(one)) for one in several]
                del content["openai"]
            for place in ("env", "openai"):
                section = _section(content.get(place))
                values |= {f"{place}.{name}": value for name, value in section.items()}
        settings: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
        types: dict[str, type[BaseModel]] = {"env": type(config), "openai": APIServerConfig}
        for flag, value in {**values, **flags}.items():
            place, _, name = flag.partition(".")
            if place in ("slurm", "testing"):
                continue
            if place not in settings:
                raise UserError(f"no option --{flag}. {_HELP}")
            settings[place][name] = _typed(types[place], name, value) if flag in flags else value
        made = [
            _make(APIServerConfig(**one.model_dump()), "openai", settings["openai"])
            for one in listed
        ]
        return mode, _make(config, "env", settings["env"]), made


_HELP = "--help lists the options"
_Model = TypeVar("_Model", bound=BaseModel)


def _read_flags(arguments: list[str]) -> dict[str, str]:
    """`--a.b V` and `--a.b=V`, without their dashes; one without a value is true. Raises:
    UserError."""
    flags: dict[str, str] = {}
    while arguments:
        flag, equal, value = arguments.pop(0).partition("=")
        if not flag.startswith("--"):
            raise UserError(f"no option {flag}. {_HELP}")
        if not equal:
            value = arguments.pop(0) if arguments and not arguments[0].startswith("--") else "true"
        flags[flag[2:]] = value
    return flags


def _typed(cls: type[BaseModel], name: str, text: str) -> Any:
    """The value of an option's text: YAML, but text stays text where the field is
    declared as text."""
    field = cls.model_fields.get(name)
    kinds = {field.annotation, *get_args(field.annotation)} if field is not None else set()
    if str in kinds and not (type(None) in kinds and text == "null"):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _section(content: Any) -> dict[str, Any]:
    """A section of a file. Raises: UserError."""
    if not isinstance(content, dict | None):
        raise UserError(f"--config: {content!r} in place of the keys of 'env' or 'openai'")
    return content or {}


def _make(default: _Model, place: str, values: dict[str, Any]) -> _Model:
    """The model with other values in it. Raises: UserError that names the option."""
    cls = type(default)
    for name in values:
        if name not in cls.model_fields:
            raise UserError(f"no option --{place}.{name}. {_HELP}")
    try:
        return cls(**{**default.model_dump(), **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (place, *first["loc"])))
        raise UserError(f"--{where}: {first['msg']}. {_HELP}") from None


def _line(error: BaseException) -> str:
    """An error in one line; that of a request to a model server has its address."""
    request = getattr(error, "request", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if request is None else f"{request.url}: {text} Check --openai.base_url"
