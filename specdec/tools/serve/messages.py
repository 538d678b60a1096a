"""Messages of a chat, checked: text, calls of tools and what these returned."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specdec.core.ranges import shown
from specdec.core.text.inputs import check_text, text_of
from specdec.tools.serve.images import MOST_IMAGES, url_of

MOST_MESSAGES = 4096
MOST_PARTS = 1024  # of a message
ROLES = MappingProxyType({r: r for r in ("system", "user", "assistant", "tool")} | {"developer": "system"})


def messages(name: str, value: Any, reads_images: bool = False) -> list[dict[str, Any]]:
    """Return checked messages, as chat templates take them. reads_images: parts of type "image_url" may come, and
    become {"type": "image", "url"} beside parts of text."""
    if not isinstance(value, list):
        raise ValueError(f"{name}={shown(value)}: expected a list of messages")
    check_count(name, value, 1, MOST_MESSAGES, "messages")
    made = [_message(f"{name}[{i}]", message, reads_images) for i, message in enumerate(value)]
    calls = [call for message in made for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls if isinstance(call["id"], str)}
    for message in made:
        if message.get("tool_call_id") in names:  # some templates want the tool's name
            message["name"] = names[message["tool_call_id"]]
    images = [part for message in made for part in message["content"] if isinstance(part, dict) and "url" in part]
    check_count(name, images, 0, MOST_IMAGES, "images")
    return made


def _message(name: str, value: Any, reads_images: bool) -> dict[str, Any]:
    """Return one turn as chat templates take it, its parts joined. Empty fields that clients send back are let
    through."""
    asked = check_object(name, value).get("role")
    role = ROLES.get(asked) if isinstance(asked, str) else None
    if role is None:
        raise ValueError(f"{name}.role={shown(asked)}: expected one of {', '.join(ROLES)}")
    own = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}.get(role, ())
    for key in (key for key in value if key not in ("role", "content", "name", *own)):
        refuse_unless(f"{name}.{shown(key)[1:-1]}", value[key], (None, "", []))
    made: dict[str, Any] = {"role": role}
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        check_count(f"{name}.content", content, 0, MOST_PARTS, "parts")
    has_images = reads_images and isinstance(content, list) and any(map(_is_image, content))
    made["content"] = (_parts if has_images else text_of)(f"{name}.content", content)
    for key in own:
        if value.get(key):
            made[key] = (tool_calls if key == "tool_calls" else check_text)(f"{name}.{key}", value[key])
    if not made["content"] and "reasoning_content" in made:
        made["thinking"] = made["reasoning_content"]  # as GPT-OSS's template calls it, which takes no content beside it
    return made


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def _parts(name: str, content: list[Any]) -> list[dict[str, Any]]:
    """Return parts of text and images."""
    return [
        {"type": "image", "url": url_of(f"{name}[{i}]", part)}
        if _is_image(part)
        else {"type": "text", "text": text_of(name, [*[{"type": "text", "text": ""}] * i, part])}
        for i, part in enumerate(content)
    ]


def tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer as chat templates take them: arguments are objects."""
    if not isinstance(value, list):
        raise ValueError(f"{name}={shown(value)}: expected a list of calls")
    return [_call(f"{name}[{i}]", call) for i, call in enumerate(value)]


def _call(at: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{at}={shown(call)}: expected an object with a function")
    text = check_text(f"{at}.function.arguments", function.get("arguments"))
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise ValueError(f"{at}.function.arguments={shown(text)}: expected JSON") from None
    own = {"name": check_text(f"{at}.function.name", function.get("name")), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": own}


def refuse_unless(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that asks for what is not supported."""
    if value not in neutral:
        raise ValueError(f"{name}={shown(value)}: this server does not support it: leave it out")


def check_count(name: str, items: list[Any] | dict[str, Any] | str, low: int, high: int, what: str = "items") -> None:
    """Raise ValueError unless there are `low` to `high` items."""
    if not low <= len(items) <= high:
        raise ValueError(f"{name}: {len(items)} {what}: expected at least {low} and at most {high}")


def check_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)}: expected an object")
    return value
