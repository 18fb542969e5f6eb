"""The agent: a loop of model calls and tool calls, and the policies that decide about answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.agent.answers import continued_context, whole_conversation
    from hermes_rl.agent.callbacks import Callbacks
    from hermes_rl.agent.context import (
        ENGINES_GROUP,
        ContextEngine,
        ContextView,
        NextContext,
        Replacement,
        load_engine,
    )
    from hermes_rl.agent.delegation import Delegation
    from hermes_rl.agent.endings import Ended, accounts_of, error_of, typed
    from hermes_rl.agent.hooks import HOOKS, Hooks, HookTable, OnEvent
    from hermes_rl.agent.names import AgentSettings, OtherNames, check_kinds, settle
    from hermes_rl.agent.parts import (
        AgentParts,
        AgentResult,
        AuxiliaryModel,
        Caller,
        ContextParts,
        Control,
        Progress,
    )
    from hermes_rl.agent.plugins import PLUGINS_GROUP, load_plugins
    from hermes_rl.agent.policy import PRESETS, Budget, IterationBudget, Limits, Policy, preset
    from hermes_rl.agent.project_files import context_files
    from hermes_rl.agent.prompt import EMPTY, LATEST, WORDINGS, system_prompt, with_services
    from hermes_rl.agent.run import compress_context, run_agent, wall_limit
    from hermes_rl.agent.run_hooks import RunHooks
    from hermes_rl.agent.session import (
        SavedConversation,
        continuable,
        keep_todos,
        last_answer,
        split_system,
        with_user,
    )
    from hermes_rl.agent.summaries import (
        COMPRESSION_TEXTS,
        SummaryEngine,
        static_digest,
        summary_prompt,
    )
    from hermes_rl.agent.tool_calls import tool_meant
else:
    __getattr__, __dir__ = attach(__name__)
