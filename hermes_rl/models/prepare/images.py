"""Adaptation `small_images`: shrink images for servers that refuse large ones.

It needs Pillow (the extra `images`), which is loaded after an image was refused. Without it, and if
an image cannot be read, nothing changes, and recovery leaves the images out.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hermes_rl.messages import Message, UserMessage

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_SIDE = 2_000
"""Pixels of an image's longer side. The smallest known limit: Anthropic's for requests
with more than 20 images (https://docs.claude.com/en/docs/vision, 2026-11; else it is 8,000)."""
MOST_BYTES = 3_500_000
"""Maximum size of an image file. Anthropic accepts 5 MiB of base64: 3.9 million bytes."""
_QUALITY = 85
_PLAIN = ("L", "RGB", "RGBA")


def has_shrinkable_image(messages: Iterable[Message]) -> bool:
    """Return whether `shrink_image_part` would shrink an image, judging by its header."""
    contents = (m.content for m in messages if isinstance(m, UserMessage))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(_large_file(_url_of(part)) is not None for part in parts)


def shrink_image_part(part: dict[str, Any]) -> dict[str, Any]:
    """Shrink an image in a `data:` URL to `MOST_SIDE` pixels a side and `MOST_BYTES` bytes."""
    file = _large_file(_url_of(part))
    url = None if file is None else _smaller(file)
    if url is None:
        return part
    image = part["image_url"]
    return {**part, "image_url": {**image, "url": url} if isinstance(image, Mapping) else url}


def _url_of(part: Mapping[str, Any]) -> str:
    """Return the URL of an image part; empty for other parts."""
    image = part.get("image_url") if part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, Mapping) else image
    return url if isinstance(url, str) else ""


def _large_file(url: str) -> bytes | None:
    """Return the file in a `data:` URL if it is an image that is too large."""
    head, _, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")) or not find_spec("PIL"):
        return None
    try:
        file = base64.b64decode(data)
    except ValueError:
        return None
    size = _size_of(file)
    large = size is not None and (max(size) > MOST_SIDE or len(file) > MOST_BYTES)
    return file if large else None


def _size_of(file: bytes) -> tuple[int, int] | None:
    """Return width and height in pixels; None for invalid files and decompression bombs."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file)) as image:
                return image.size
    except Exception:  # a boundary: readers raise any exception for a broken file
        return None


def _smaller(file: bytes) -> str | None:
    """Return the image as a `data:` URL within the limits, upright; None if it is unreadable."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(file)) as opened:
            if opened.mode not in _PLAIN and opened.mode[0] in "IF":
                return None  # more than 8 bits per channel would be lost
            kind = "jpeg" if opened.format == "JPEG" else "png"
            plain = opened if opened.mode in _PLAIN else opened.convert(_mode_for(opened))
            plain.thumbnail((MOST_SIDE, MOST_SIDE))
            return _written(ImageOps.exif_transpose(plain), kind)
    except Exception:  # a boundary: readers raise any exception for a broken file
        return None


def _mode_for(image: Image) -> str:
    return "RGBA" if image.has_transparency_data else "RGB"


def _written(image: Image, kind: str) -> str:
    """Encode as PNG (unless the source is a JPEG or the file too large), else as JPEG, halved until
    it fits."""
    file = _file_of(image, kind)
    while len(file) > MOST_BYTES:
        image = image if kind == "png" else image.reduce(2)
        kind = "jpeg"
        file = _file_of(image, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def _file_of(image: Image, kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "png":
        image.save(out, "PNG")
        return out.getvalue()
    if image.mode == "RGBA":  # JPEG has no transparency: use a white background
        from PIL import Image as Images

        white = Images.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    image.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()
