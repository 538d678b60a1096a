"""Times attach in fresh processes, the first with empty caches: `python bench/attach.py --shape 8b --out DIR`.

One row per process: seconds of attach, of compiling and capturing in it, the first token of prompts of 128, 512 and
2048 ids through `generate`, and where attach spends its time, by samples of its stack: `where_s` by our functions,
callees included, `inner_s` by the innermost function of any package. The second process finds the kernels that the
first has compiled; the last starts with empty folders again, but with the libraries in memory, which the first may have
read from disk. The last line is one JSON object. Use an idle machine: compiling takes several processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

FOLDERS = ("SPECDEC_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ROOT = Path(__file__).resolve().parents[1]
SIZES = (128, 512, 2048)
INTERVAL = 0.01  # seconds between two samples


def main() -> None:
    """Run the processes one after another, with one set of folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m", help="random weights of a named shape such as 8b")
    parser.add_argument("--draft", default="3:1:4", help="S:K:D")
    parser.add_argument("--max-batch", type=int, default=1)
    parser.add_argument("--auto", action="store_true", help='num_steps="auto": as many steps as S at most')
    parser.add_argument("--check-kernels", action="store_true", help="the setting of that name is on")
    parser.add_argument("--processes", type=int, default=2, help="that share their folders, before the last")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as empty:
        folders = [shared] * args.processes + [empty]
        rows = [{"process": i + 1, **run(folder)} for i, folder in enumerate(folders)]
    if args.out:
        from specdec.tools.measure.results import write_results

        write_results(args.out, "attach", args.shape, vars(args), rows)
    print(json.dumps({"rows": rows}))


def run(folder: str) -> dict[str, Any]:
    """Return the row of a fresh process with this one's options and its compile caches in `folder`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, **{name: f"{folder}/{name}" for name in FOLDERS}}
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(out.splitlines()[-1], flush=True)
    return json.loads(out.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Attach once, and time first tokens."""
    import torch

    from specdec import attach
    from specdec.tools.measure.drafts import DraftShape
    from specdec.tools.measure.shapes import make_head, make_target

    draft = DraftShape.parse(args.draft)
    target = make_target(args.shape, "cuda" if torch.cuda.is_available() else "cpu")
    head = make_head(args.shape, target)
    given = {"max_batch": args.max_batch, "check_kernels": args.check_kernels}
    settings = {**draft.settings(imposed=True), "max_seq_len": 4096, **given}
    settings |= {"num_steps": "auto"} if args.auto else {}
    samples = Samples()
    start = time.perf_counter()
    with samples:
        engine = attach(target, head, **settings)
    seconds, report = time.perf_counter() - start, engine.report()
    row = {"shape": args.shape, **draft.row, **given} | ({"num_steps": "auto"} if args.auto else {})
    row |= {"attach_s": round(seconds, 2), "compile_s": round(report.compile_seconds, 2)}
    row |= {"capture_s": round(report.graph_seconds, 2), "num_graphs": len(report.graphs), "notes": report.compiled}
    for name, seen, most in (("where_s", samples.ours, 60), ("inner_s", samples.inner, 30)):
        row[name] = {what: round(seconds * count / samples.num, 2) for what, count in seen.most_common(most)}
    return row | {f"ttft_{size}_ms": round(first_token(engine, size), 3) for size in SIZES}


def first_token(engine: Any, num_tokens: int) -> float:
    """Return the median ms of calls for one token."""
    import torch

    found = []
    for _ in range(25):
        prompt = torch.randint(5, 90, (num_tokens,)).tolist()
        start = time.perf_counter()
        engine.generate([prompt], max_new_tokens=1, ignore_eos=True)
        found.append(1000 * (time.perf_counter() - start))
    return median(found)


class Samples:
    """Samples the main thread's stack every INTERVAL within the context.

    num: samples. ours: functions of this package, by the number of samples that they are in; inner: by the number of
    samples in which a function is the innermost.
    """

    def __init__(self) -> None:
        self.num = 0
        self.ours: Counter[str] = Counter()
        self.inner: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        main = threading.main_thread().ident
        while not self._is_over.wait(INTERVAL):
            frame, names = sys._current_frames().get(main), set()
            if frame is not None:
                where = "/".join(frame.f_code.co_filename.split("/")[-3:])
                self.inner[f"{where}:{frame.f_lineno} {frame.f_code.co_qualname}"] += 1
            while frame is not None:
                path, _, tail = frame.f_code.co_filename.partition("/specdec/")
                if tail and path and "site-packages" not in tail:
                    names.add(f"{tail}:{frame.f_code.co_qualname}")
                frame = frame.f_back
            self.num += 1
            self.ours.update(names)


if __name__ == "__main__":
    main()
