"""Injects random faults into an engine on a CPU: checks the callers' errors, and that no other caller loses text or
slots.

Among them are hostile bodies, sent to a server of the engine: those of `serve_hostile.py` of less than MOST_BYTES.

python bench/faults.py --num-faults 10000
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from serve_hostile import BODIES  # in this folder
from starlette.testclient import TestClient

from specdec.tools.measure.results import write_results
from specdec.tools.serve.server import build_app

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults import SUBJECTS, Tally, Victim

MOST_BYTES = 300_000


def hostile_bodies() -> list[tuple[str, bytes]]:
    """Return path and content of the small ones."""
    built = [(path, eval(body, {"dumps": json.dumps}).encode()) for path, _, body in BODIES.values()]
    return [(path, body) for path, body in built if len(body) < MOST_BYTES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subject", choices=SUBJECTS, default="attention", help="see tests/faults.py")
    parser.add_argument("--out", type=Path, help="folder of the result file; default: none is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tally, start = Tally(), time.perf_counter()
    bodies = hostile_bodies()

    def hostile_body(victim: Victim) -> None:
        path, body = victim.rng.choice(bodies)
        with TestClient(build_app(victim.engine, "tiny", 2), raise_server_exceptions=False) as client:
            status = client.post(path, content=body, headers={"content-type": "application/json"}).status_code
        tally.outcomes[f"HTTP {status}"] += 1
        if status >= 500:
            tally.wrong.append(f"{body[:80]!r}: HTTP {status}")

    Victim(args.seed, tally, args.subject, more=[("hostile body", hostile_body, 10)]).run(args.num_faults)
    table = Table("fault", "times")
    for name, num in tally.faults.most_common():
        table.add_row(name, str(num))
    Console(width=100).print(table)
    for what in (*tally.wrong[:10], *tally.lost[:10]):
        print(what)
    result = {
        "subject": args.subject,
        "num_faults": sum(tally.faults.values()),
        "faults": dict(tally.faults),
        "callers_saw": dict(tally.outcomes),
        "neighbours": tally.neighbours,
        "neighbours_told": tally.told,
        "wrong_texts": len(tally.wrong),
        "lost": len(tally.lost),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if args.out:
        write_results(args.out, "faults", "tiny", {"seed": args.seed, "subject": args.subject}, [result])
    print(json.dumps(result))
    sys.exit(bool(tally.wrong or tally.lost))


if __name__ == "__main__":
    main()
