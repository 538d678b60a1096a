"""Images in messages: data URLs, decoded within limits. Nothing is fetched from anywhere."""

import base64
import io
from collections.abc import Mapping
from typing import Any

from specdec.core.ranges import shown

MOST_IMAGES = 16  # of a request
MOST_BYTES = 20 * 2**20  # of a body, for images
MOST_PIXELS = 2**25  # of a request's images together
MOST_RATIO = 50  # of an image's sides: processors may scale the shorter one up
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # of PIL


def url_of(name: str, part: Mapping[str, Any]) -> str:
    """Return the data URL of a part {"type": "image_url", "image_url": {"url"}}; ValueError for another one."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ValueError(
            f"{name}.image_url={shown(given)}: this server fetches no URLs; expected a data URL, "
            "data:image/png;base64,..."
        )
    return url


def decode_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with PIL images in place of data URLs; ValueError for what is no image, or too large."""
    left, made = MOST_PIXELS, []
    for i, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            content = [dict(part) for part in content]
            for j, part in enumerate(content):
                if part["type"] == "image":
                    part["image"] = _decoded(f"messages[{i}].content[{j}].image_url", part.pop("url"), left)
                    left -= part["image"].width * part["image"].height
        made.append({**message, "content": content})
    return made


def _decoded(name: str, url: str, most_pixels: int) -> Any:
    from PIL import Image, ImageOps

    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"{name}={shown(url)}: expected base64, data:image/png;base64,...")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        sides = sorted(image.size)
        if image.width * image.height <= most_pixels and sides[1] <= MOST_RATIO * sides[0]:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a decoder raises what it likes
        raise ValueError(
            f"{name}={shown(url)}: no image of a known kind ({', '.join(FORMATS)}): "
            f"{str(error) or type(error).__name__}"
        ) from None
    raise ValueError(
        f"{name}: {image.width} x {image.height}: a request has at most {MOST_PIXELS} pixels, and no side is more than "
        f"{MOST_RATIO} times the other"
    )
