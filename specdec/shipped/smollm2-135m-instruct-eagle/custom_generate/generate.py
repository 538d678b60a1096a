"""Decodes with the draft in this folder: the text of `model.generate`, in fewer steps of the model.

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
