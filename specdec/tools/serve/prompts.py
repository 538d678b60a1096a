"""Turns the prompts of a body into token ids, and stops early where they are too long to be served."""

import inspect
from collections.abc import Callable
from typing import Any

from specdec.core.errors import CapacityError
from specdec.core.text.inputs import encode, prompts_to_ids, render_chat
from specdec.tools.serve.schema import Body

SPARE = 64  # tokens that a text may have more where it is cut than it has there as a whole


def ids_of(body: Body, tokenizer: Any, max_seq_len: int) -> list[list[int]]:
    """Return token ids of every prompt of `body`; CapacityError if a text is too long for `max_seq_len`."""
    if body.is_chat:
        text = _rendered(body, tokenizer)
        check_length(text, lambda part: encode(tokenizer, part), max_seq_len)
        return [encode(tokenizer, text)]
    prompts = body.get("prompt")
    for text in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(text, str):
            check_length(text, lambda part: prompts_to_ids(part, tokenizer)[0], max_seq_len)
    return prompts_to_ids(prompts, tokenizer)


def check_length(text: str, encode: Callable[[str], list[int]], max_seq_len: int) -> None:
    """Raise CapacityError if `text` has more tokens than `max_seq_len`, having encoded little more than so many."""
    size = 4 * max_seq_len  # characters; a token of English has four or five
    while len(text) > size:
        if len(encode(text[:size])) > max_seq_len + SPARE:
            raise CapacityError(
                f"the prompt has {len(text)} characters, of which {size} are more than max_seq_len={max_seq_len} "
                "tokens; shorten it"
            )
        size *= 2


def _rendered(body: Body, tokenizer: Any) -> str:
    """Return the chat template's text; ValueError for what the template refuses."""
    if tokenizer is None:
        raise ValueError("messages: the engine has no tokenizer; send token ids to /v1/completions")
    options = body.get("chat_template_kwargs", {})
    reserved = sorted(options.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if reserved:
        raise ValueError(f"chat_template_kwargs: {reserved[0]} is the server's own: leave it out")
    return render_chat(body.get("messages"), tokenizer, **options)
