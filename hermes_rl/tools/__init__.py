"""What the agent can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.tools import chromium, read_file, search_files, terminal
    from hermes_rl.tools.approval import (
        PLAIN,
        SUSPECT,
        Approval,
        ApprovalRequest,
        Ask,
        Mode,
        concern_of,
        default_approval,
        refusal,
    )
    from hermes_rl.tools.base import (
        ChildResult,
        ChildTask,
        Clarify,
        Delegate,
        OpenParts,
        Services,
        Tool,
        ToolContext,
        ToolResult,
        answer_tool,
        read_arguments,
        tool,
    )
    from hermes_rl.tools.clarify import CLARIFY
    from hermes_rl.tools.delegate_task import DELEGATE_TASK
    from hermes_rl.tools.functions import function_tool
    from hermes_rl.tools.guardrails import (
        WARN,
        Bounds,
        Finding,
        LoopState,
        find_loop,
        observe,
        observe_inner,
    )
    from hermes_rl.tools.matching import STRATEGIES, find, replace
    from hermes_rl.tools.mcp import mcp_tools, read_offers
    from hermes_rl.tools.memory_lists import LIMITS, MEMORY, Memory
    from hermes_rl.tools.process import MAX_PROCESSES, PROCESSES, take_ended
    from hermes_rl.tools.session_search import SESSION_SEARCH
    from hermes_rl.tools.shell import resolve_paths
    from hermes_rl.tools.skill_folders import BUNDLED_SKILLS, SKILLS, Skills, open_skills
    from hermes_rl.tools.skills import SKILL_VIEW
    from hermes_rl.tools.terminal import DEFAULT_TIMEOUT_S, MAX_RESULT_CHARS, with_timeout
    from hermes_rl.tools.todo import MAX_ITEMS, MAX_LIST_CHARS, TODO, Items, changed, listed
    from hermes_rl.tools.toolsets import (
        DEFAULT_TOOLSETS,
        DISTRIBUTIONS,
        TOOLS,
        TOOLSETS,
        Catalogue,
        Toolset,
        lacks,
        lacks_program,
        resolve,
        schema_digest,
        schemas,
        tool_names,
        with_wording,
    )
    from hermes_rl.tools.v4a import apply_hunks, parse_patch
    from hermes_rl.tools.vision import MAX_IMAGE_BYTES, VISION_ANALYZE, image_url
    from hermes_rl.tools.web import MAX_PAGE_CHARS, PROVIDERS, page_text
    from hermes_rl.tools.web_fetch import ALLOW_PRIVATE, MAX_PAGE_BYTES, Fetcher, Page
else:
    __getattr__, __dir__ = attach(__name__)
