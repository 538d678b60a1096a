"""The file that lets `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)` decode with a head.

It is the same for every head and calls `specdec.custom_generate`, so heads saved earlier run the current code. It holds
no path, since folders move.
"""

from pathlib import Path

from specdec.reach.checkpoints.replacing import write_text

FILE = Path("custom_generate", "generate.py")
# The import is in `try` because otherwise transformers would look for it and advise another package's name.
TEXT = '''"""Decodes with the draft in this folder: the text of `model.generate`, in fewer steps of the model.

    model.generate(**inputs, custom_generate=FOLDER_OR_HUB_ID, trust_remote_code=True)

Written by specdec, which attaches an engine to the model at the first such call, and keeps it while the model lives.
"""


def generate(model, **arguments):
    """Take the arguments of `model.generate`, and return its result."""
    try:
        from specdec.custom_generate import generate_with_draft
    except ImportError as error:
        hint = "this draft is decoded with specdec, which cannot be imported: pip install specdec-toolkit"
        raise ImportError(f"{hint} ({error})") from error
    return generate_with_draft(model, **arguments)
'''


def write_custom_generate(folder: str | Path) -> None:
    """Write custom_generate/generate.py into the folder of a draft, replacing an older one."""
    path = Path(folder) / FILE
    path.parent.mkdir(exist_ok=True)
    write_text(path, TEXT)
