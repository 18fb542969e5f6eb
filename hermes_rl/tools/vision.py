"""The tool `vision_analyze`, and what makes a file an image that models see."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from hermes_rl.errors import ToolError
from hermes_rl.text import clean, to_json
from hermes_rl.tools.base import ToolContext, ToolResult, schema, tool
from hermes_rl.tools.file_kinds import kind_of
from hermes_rl.tools.shell import read_bytes

VISION_ANALYZE = "vision_analyze"
MAX_IMAGE_BYTES = 3_900_000
MAX_IMAGE_SIDE = 8_000
"""Pixels. Anthropic refuses more than this, and than 5 MiB of base64
(https://docs.claude.com/en/docs/vision, 2026-11): the smallest limits that are known."""
_MAX_QUESTION_CHARS = 4_000
_FORMATS = ("PNG", "JPEG", "GIF", "WebP")
"""Those that Anthropic's, Google's and OpenAI's models and vLLM take."""


def image_url(data: bytes, size: int) -> str:
    """The `data:` URL of an image.

    Args:
        data: the file, or its beginning.
        size: bytes of the whole file.

    Raises: ToolError for what is not an image that models take.
    """
    kind = kind_of(data)
    form = kind.name.removesuffix(" image") if kind is not None and kind.image else None
    if kind is None or form not in _FORMATS:
        shown = "text" if kind is None else kind.name
        raise ToolError(f"not an image of a known format ({shown}): use {', '.join(_FORMATS)}")
    if size > MAX_IMAGE_BYTES:
        raise ToolError(f"the image has {size:,} bytes, and {MAX_IMAGE_BYTES:,} is the limit")
    if kind.width is None or kind.height is None or not kind.width * kind.height:
        raise ToolError(f"the {kind.name} is damaged: it has no dimensions")
    if max(kind.width, kind.height) > MAX_IMAGE_SIDE:
        shown = f"{kind.width:,} x {kind.height:,}"
        raise ToolError(f"the image has {shown} pixels, and {MAX_IMAGE_SIDE:,} a side is the limit")
    return f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"


@tool(name=VISION_ANALYZE, **schema(VISION_ANALYZE), toolset="vision", parallel=True)
async def _vision_analyze(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Return {analysis}."""
    source, question = clean(args["image_url"]).strip(), clean(args["question"]).strip()
    if ctx.look is None:
        raise ToolError("there is no model that looks at images here")
    if not 0 < len(question) <= _MAX_QUESTION_CHARS:
        raise ToolError(f"question must have 1 to {_MAX_QUESTION_CHARS:,} characters")
    url = await _read(ctx, source)
    fields = {"analysis": clean(await ctx.look(url, question))}
    return ToolResult(to_json(fields), data=fields)


async def _read(ctx: ToolContext, source: str) -> str:
    """The `data:` URL of an image of the sandbox or the web. Raises: ToolError."""
    if source.lower().startswith(("http://", "https://")):
        if not ctx.reaches_web:
            raise ToolError(
                "addresses cannot be read without web tools: save the image to a file, and give "
                "its path"
            )
        from hermes_rl.tools.web_fetch import FETCH_S, Fetcher

        page = await Fetcher().fetch(source, min(FETCH_S, ctx.max_timeout_s))
        return image_url(page.body, len(page.body))
    file = await read_bytes(ctx, source, MAX_IMAGE_BYTES)
    return image_url(file.data, file.size)


def _lacks_model() -> str:
    return "no model that looks at images: set agent.vision in the configuration of a run"


vision_analyze = replace(
    _vision_analyze,
    untrusted=True,
    missing=_lacks_model,
    present=lambda: "agent.vision names a model",
)
