"""Drafts that ship with the project, each a folder with a card: heads in official layouts, a small LM as GGUF."""

from pathlib import Path

HERE = Path(__file__).parent
SMOLLM2 = "smollm2-135m-instruct"  # the target of every shipped draft; a draft is called <target>-<algorithm>
SMOLLM2_EAGLE3 = f"{SMOLLM2}-eagle3"


def available() -> list[str]:
    """Return the names of the shipped drafts."""
    return sorted({f.parent.name for pattern in ("*/config.json", "*/*.gguf") for f in HERE.glob(pattern)})


def path(name: str = SMOLLM2_EAGLE3) -> Path:
    """Return the folder of a shipped draft; ValueError lists those available."""
    if name not in available():
        raise ValueError(f"no shipped head {name!r}; there are {available()}")
    return HERE / name


def for_algo(algo: str) -> Path:
    """Return the folder of the shipped draft of algorithm `algo`; ValueError lists those available."""
    if f"{SMOLLM2}-{algo}" not in available():
        algos = [name.removeprefix(f"{SMOLLM2}-") for name in available()]
        raise ValueError(f"no shipped head for algo={algo!r}; there are heads for {algos}")
    return path(f"{SMOLLM2}-{algo}")


def find(draft: str) -> Path | str:
    """Resolve a draft's name to its folder; return anything else unchanged.

    Names are "shipped" (the EAGLE-3 head), "shipped-ALGORITHM", such as "shipped-standalone", and those of `available`.
    """
    if draft == "shipped":
        return path()
    if draft.startswith("shipped-"):
        return for_algo(draft.removeprefix("shipped-"))
    return path(draft) if draft in available() else draft
