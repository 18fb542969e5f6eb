"""Images that are made smaller: what is changed, what is left as it is, and where Pillow is not."""

import base64
import io
import random
import subprocess
import sys

import pytest
from PIL import Image

from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.models.prepare import MOST_BYTES, MOST_SIDE, has_shrinkable_image, small_images


def url_of(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def picture(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def made_small(url):
    """The image that is sent for an address, and its file; the same address again gives the same
    bytes."""
    request = [UserMessage(content=[picture(url, detail="high")])]
    assert has_shrinkable_image(request)
    (sent,) = small_images(request)
    assert small_images(request) == [sent]
    assert not has_shrinkable_image([sent])
    fields = sent.content[0]["image_url"]
    assert fields["detail"] == "high"
    file = base64.b64decode(fields["url"].partition(",")[2])
    return Image.open(io.BytesIO(file)), file


def drawn(mode, size):
    colour = {"P": 3, "L": 90, "1": 1, "RGB": (9, 90, 200), "RGBA": (9, 90, 200, 0)}[mode]
    return Image.new(mode, size, colour)


@pytest.mark.parametrize("mode", ["P", "L", "1", "RGB", "RGBA"])
def test_longer_side_is_limited_and_png_stays_png(mode):
    image, _ = made_small(url_of(drawn(mode, (3 * MOST_SIDE, 300))))
    assert (image.size, image.format) == ((MOST_SIDE, 100), "PNG")
    if mode == "RGBA":
        assert image.getpixel((0, 0))[3] == 0, "still transparent"


def test_jpeg_stays_jpeg_and_upright():
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by 90 degrees
    image, _ = made_small(url_of(drawn("RGB", (2 * MOST_SIDE, 400)), "JPEG", exif=turned))
    assert (image.size, image.format) == ((200, MOST_SIDE), "JPEG")
    assert image.getexif().get(0x0112, 1) == 1


def test_large_files_become_jpeg_on_white():
    side = 1_000
    noise = random.Random(1).randbytes(4 * side * side)
    image, file = made_small(url_of(Image.frombytes("RGBA", (side, side), noise)))
    assert (image.size, image.format) == ((side, side), "JPEG")
    assert len(file) < MOST_BYTES


SMALL = url_of(drawn("RGB", (MOST_SIDE, 10)))
LEFT = [
    SMALL,
    "https://a.example/wide.png",
    "data:image/svg+xml,%3Csvg%3E",
    "data:image/png;base64,$$$",
    "data:image/png;base64,aGVsbG8=",
    "data:text/plain;base64," + url_of(drawn("RGB", (2 * MOST_SIDE, 9))).partition(",")[2],
]


@pytest.mark.parametrize("url", LEFT)
def test_small_images_and_other_parts_stay_the_same_object(url):
    reported = UserMessage(
        content=[{"type": "text", "text": "see"}, picture(url), {"type": "file"}]
    )
    request = [reported, AssistantMessage(content="a"), UserMessage(content="plain")]
    assert not has_shrinkable_image(request)
    assert all(a is b for a, b in zip(small_images(request), request, strict=True))


def test_unreadable_images_stay_unchanged():
    """Broken behind its head, or of more shades than a smaller one could keep."""
    head, _, data = url_of(drawn("RGB", (2 * MOST_SIDE, 50))).partition(",")
    broken = f"{head},{base64.b64encode(base64.b64decode(data)[:60]).decode()}"
    for url in (broken, url_of(Image.new("I;16", (2 * MOST_SIDE, 9), 40_000))):
        request = [UserMessage(content=[picture(url)])]
        assert small_images(request)[0] is request[0]


def test_image_url_may_be_plain_text():
    request = [UserMessage(content=[{"type": "image_url", "image_url": "data:image/png;base64,"}])]
    assert small_images(request) == request
    wide = {"type": "image_url", "image_url": url_of(drawn("RGB", (2 * MOST_SIDE, 9)))}
    (sent,) = small_images([UserMessage(content=[wide])])
    assert isinstance(sent.content[0]["image_url"], str)
    assert sent.content[0] != wide


WITHOUT = """
import sys
sys.modules["PIL"] = None
from hermes_rl.messages import UserMessage
from hermes_rl.models.prepare import small_images
from hermes_rl.models.prepare import has_shrinkable_image
asked = [UserMessage(content=[{"type": "image_url", "image_url": {"url": sys.stdin.read()}}])]
assert not has_shrinkable_image(asked)
assert small_images(asked) == asked
"""


def test_images_stay_unchanged_without_pillow():
    wide = url_of(drawn("RGB", (2 * MOST_SIDE, 9)))
    subprocess.run([sys.executable, "-c", WITHOUT], input=wide, text=True, check=True, timeout=60)
