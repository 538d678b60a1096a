"""Draft heads that ship with the project, each a folder in its algorithm's official layout with a card."""

from pathlib import Path

HERE = Path(__file__).parent
SMOLLM2_EAGLE3 = "smollm2-135m-instruct-eagle3"


def available() -> list[str]:
    """Names of the shipped heads."""
    return sorted(f.parent.name for f in HERE.glob("*/config.json"))


def path(name: str = SMOLLM2_EAGLE3) -> Path:
    """The folder of a shipped head; ValueError lists what there is."""
    if name not in available():
        raise ValueError(f"no shipped head {name!r}; there are {available()}")
    return HERE / name
