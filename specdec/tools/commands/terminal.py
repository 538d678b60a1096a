"""Terminal setup of the `specdec` command: quiet in a pipe, and no text that an old console's encoding could break."""

import logging
import sys
from functools import partial

import transformers
from tqdm import tqdm
from transformers import modeling_gguf_pytorch_utils as gguf_reader


def quiet_pipes() -> None:
    """Set up this process for a command: progress bars only where stderr is a terminal.

    Our own bars check that themselves; those of `transformers` and its GGUF reader do not.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may emit characters that a Windows pipe's code page lacks
    # It warns that it ignores clean_up_tokenization_spaces, a field of many tokenizer files: users cannot act on that.
    logging.getLogger("transformers.tokenization_utils_tokenizers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        gguf_reader.tqdm = partial(tqdm, disable=True)  # it ignores the switch above
