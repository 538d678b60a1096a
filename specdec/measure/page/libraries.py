"""Whether the libraries that render pages are installed."""

from importlib.util import find_spec

NEEDED = ("jinja2", "matplotlib")
HINT = "pip install 'specdec-toolkit[bench]'"


def missing_libraries() -> str:
    """Return "" if a page can be rendered here, or what is missing and how to install it."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    return f"{' and '.join(absent)} not installed ({HINT})" if absent else ""
