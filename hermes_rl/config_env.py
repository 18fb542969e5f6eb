"""What people write of an RL environment and of the models that it asks beside the policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from hermes_rl.config_endpoint import (
    ApiMode,
    ExtraBody,
    PlaceSection,
    Section,
    check_address,
    join_names,
)
from hermes_rl.config_reach import ReachSection, given_reach

Whole = Annotated[int, Field(ge=1, le=1_000_000_000)]


class ModelPlace(ReachSection):
    """A judge or a simulated user: name and sampling are identity, the place is not."""

    name: str
    provider: str | None = None
    base_url: str | None = None
    """None, without a provider, is the run's endpoint."""
    api_key_env: str | None = None
    api_mode: ApiMode | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Whole | None = None
    """Output tokens per call."""
    reasoning: str | None = None
    extra_body: ExtraBody = Field(default_factory=dict)
    """Further fields of each request's body."""

    @field_validator("base_url")
    @classmethod
    def _plain(cls, given: str | None) -> str | None:
        return check_address(given, "env.judge.base_url, env.user.base_url")

    @field_validator("api_key_env", mode="before")
    @classmethod
    def _join(cls, given: Any) -> Any:
        return join_names(given)

    @property
    def place(self) -> PlaceSection:
        """Where it is, as the endpoint's places say it."""
        return PlaceSection(
            model=self.name,
            provider=self.provider,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            api_mode=self.api_mode,
            extra_body=self.extra_body,
            **given_reach(self),
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its answers."""
        own = {"name", "temperature", "top_p", "max_tokens", "reasoning"}
        return self.model_dump(include=own | ({"extra_body"} if self.extra_body else set()))


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
