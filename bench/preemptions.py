"""Preempts requests at random, on a CPU, and compares texts, log-probabilities and rounds with those of an ample pool.

python bench/preemptions.py --num 1000
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specdec.core.cache import prefix
from specdec.core.engine import scheduler, sharing
from specdec.tools.measure.results import write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.heads import MODULES
from tests.recurrent_models import recurrent_model
from tests.test_pages import CHAIN, KINDS, compared
from tests.tiny_models import tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000, help="preemptions, at least")
    parser.add_argument("--out", type=Path, help="folder of the result file; default: none is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scheduler.GROWTH = prefix.CHUNK = sharing.WORTH_WAITING = 8  # texts are short
    rows: list[dict[str, Any]] = []
    subjects = [("llama", tiny_model, algo, shape) for algo, shape in KINDS]
    subjects += [(name, recurrent_model, "eagle", CHAIN) for name in ("qwen3_5", "mamba2")]
    for name, make, algo, shape in subjects:
        start, own = time.perf_counter(), 0
        while own < args.num / len(subjects):
            for lag in (0, 1):
                own += compared(make(name), algo, shape, 3, lag, prefix_cache=algo != MODULES and "auto")
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"target": name, "algo": algo, **shape, "preemptions": own, "wrong_texts": 0, "seconds": seconds})
        print(json.dumps(rows[-1]), flush=True)  # `compared` has asserted that texts are equal
    if args.out:
        write_results(args.out, "preemptions", "tiny", {}, rows)
    print(json.dumps({"preemptions": sum(row["preemptions"] for row in rows)}))


if __name__ == "__main__":
    main()
