"""Injects random faults into an engine on a CPU: what callers see, and that no other caller loses text or slots.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults import SUBJECTS, Tally, Victim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subject", choices=SUBJECTS, default="attention", help="see tests/faults.py")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tally, start = Tally(), time.perf_counter()
    Victim(args.seed, tally, args.subject).run(args.num_faults)
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
    print(json.dumps(result))
    sys.exit(bool(tally.wrong or tally.lost))


if __name__ == "__main__":
    main()
