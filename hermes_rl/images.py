"""Images of messages: rows keep them in a column of their own, `image_data`.

In the messages of a row `{"type": "image"}` replaces each, and the n-th of them in the conversation
means the n-th entry of the column. That is the form of chat templates and of trainers for models
that see; `with_images` is the way back to OpenAI's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from hermes_rl.record import Image

Form = Mapping[str, Any]
"""A message in OpenAI's form."""

_KIND = "image/"


def without_images(form: Form, taken: list[Image]) -> dict[str, Any]:
    """A message with `{"type": "image"}` in the place of each image.

    Args:
        taken: takes the images, in their order. What is at an address stays there: `path` is the
            address, and there are no bytes. Else `path` is the place in the column and the kind
            (`0.png`).
    """
    content = form["content"]
    if not isinstance(content, list):
        return dict(form)
    return {**form, "content": [_without_image(part, taken) for part in content]}


def _without_image(part: Mapping[str, Any], taken: list[Image]) -> Mapping[str, Any]:
    if part.get("type") == "image":  # a task's own way to say it: it must not take another's entry
        taken.append(Image(bytes=None, path=None))
        return part
    if part.get("type") != "image_url":
        return part
    url = part.get("image_url")
    more = url if isinstance(url, Mapping) else {"url": url}
    image = _image(more.get("url"), len(taken))
    if image is None:
        return part
    taken.append(image)
    kept = {k: v for k, v in {**more, **part}.items() if k not in ("url", "image_url")}
    return {**kept, "type": "image"}


def _image(url: Any, place: int) -> Image | None:
    """The image of an address; None for other addresses."""
    if not isinstance(url, str):
        return None
    if not url.startswith("data:"):
        return Image(bytes=None, path=url)
    head, comma, text = url.removeprefix("data:").partition(",")
    kind, *more = head.split(";")
    if not comma or not kind.startswith(_KIND) or kind == _KIND or "." in kind:
        return None
    try:
        data = base64.b64decode(text, validate=True) if "base64" in more else unquote_to_bytes(text)
    except (binascii.Error, ValueError):
        return None
    return Image(bytes=data, path=f"{place}.{kind.removeprefix(_KIND)}")


def with_images(forms: Iterable[Form], images: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row's messages in OpenAI's form again.

    Args:
        forms: the messages, decoded.
        images: the row's `image_data`.
    """
    left = iter(images)
    return [_with_images(form, left) for form in forms]


def _with_images(form: Form, left: Any) -> dict[str, Any]:
    content = form["content"]
    if not isinstance(content, list):
        return dict(form)
    return {**form, "content": [_with_image(part, left) for part in content]}


def _with_image(part: Mapping[str, Any], left: Any) -> Mapping[str, Any]:
    if part.get("type") != "image":
        return part
    image = next(left, None)
    if image is None or image["path"] is None:
        return part
    url = image["path"]
    if image["bytes"] is not None:
        kind = image["path"].partition(".")[2]
        url = f"data:{_KIND}{kind};base64,{base64.b64encode(image['bytes']).decode()}"
    detail = {k: v for k, v in part.items() if k == "detail"}
    rest = {k: v for k, v in part.items() if k not in ("type", "detail")}
    return {"type": "image_url", "image_url": {"url": url, **detail}, **rest}
