"""Sends the most expensive bodies to a server of a tiny model: `PYTHONPATH=. python bench/serve_hostile.py`.

One row per body: the longest stall of the event loop, the growth of the process's peak memory, and the status of the
answer. A separate process builds and sends the bodies. Of `--repeats` the shortest stall is kept, since hosts are
shared, and the most memory.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from specdec import Engine, attach
from specdec.reach.targets.pretrained import load_pretrained
from specdec.tools.measure.results import write_results
from specdec.tools.serve.server import build_app

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {  # name: path, number sent at once, an expression of the body
    "50,000 floats as a prompt": (TEXT, 1, """'{"prompt":[' + ','.join(['0.5'] * 50_000) + ']}'"""),
    "200,000 floats as a prompt": (TEXT, 1, """'{"prompt":[' + ','.join(['0.5'] * 200_000) + ']}'"""),
    "50,000 empty messages": (CHAT, 1, """'{"messages":[' + ','.join(['{}'] * 50_000) + ']}'"""),
    "200,000 empty messages": (CHAT, 1, """'{"messages":[' + ','.join(['{}'] * 200_000) + ']}'"""),
    "20,000 messages": (CHAT, 1, """dumps({"messages": [{"role": "user", "content": "a"}] * 20_000})"""),
    "20,000 prompts, n=128": (TEXT, 1, """'{"n":128,"prompt":[' + ','.join(['[1]'] * 20_000) + ']}'"""),
    "50,000 prompts, n=128": (TEXT, 1, """'{"n":128,"prompt":[' + ','.join(['[1]'] * 50_000) + ']}'"""),
    "5,000 stops": (TEXT, 1, """dumps({"prompt": [3, 4], "max_tokens": 2, "stop": ["a"] * 5_000})"""),
    "10,000 stops": (TEXT, 1, """dumps({"prompt": [5], "stop": [f"zq{i}" for i in range(10_000)]})"""),
    "100,000 stops": (TEXT, 1, """dumps({"prompt": [5], "stop": [f"zq{i}" for i in range(100_000)]})"""),
    "a stop of 1 MB": (TEXT, 1, """dumps({"prompt": [5], "stop": "a" * 10**6})"""),
    "3.8 MiB of text": (TEXT, 1, """dumps({"prompt": "a b c d e f g h i j " * 200_000})"""),
    "3.8 MiB of text, 4 at once": (TEXT, 4, """dumps({"prompt": "a b c d e f g h i j " * 200_000})"""),
    "3.8 MiB in a message": (CHAT, 1, """dumps({"messages": [{"role": "user", "content": "a b c d " * 500_000}]})"""),
    "1.6 MB of text, 4 at once": (TEXT, 4, """dumps({"prompt": "a b c d " * 200_000})"""),
    "4 MB of spaces": (TEXT, 1, """dumps({"prompt": " " * 4_000_000})"""),
    "100,000 unknown fields": (TEXT, 1, """dumps({f"a{i}": 1 for i in range(100_000)})"""),
    "100,000 biases": (TEXT, 1, """dumps({"prompt": [5], "logit_bias": {str(i): 1 for i in range(100_000)}})"""),
    "300,000 lists": (TEXT, 1, """'{"prompt":[' + ','.join(['[]'] * 300_000) + ']}'"""),
    "17 MB of ids": (TEXT, 1, """dumps({"prompt": [1] * 5_666_666})"""),
    "60 MB of ids": (TEXT, 1, """dumps({"prompt": [1] * 20_000_000})"""),
    "nested 1,000 deep": (TEXT, 1, """'{"prompt":' + '[' * 1_000 + ']' * 1_000 + '}'"""),
    "nested 100,000 deep": (TEXT, 1, """'{"prompt":' + '[' * 100_000 + ']' * 100_000 + '}'"""),
    "a seed of 5,000 digits": (TEXT, 1, """'{"prompt":[3,4],"seed":' + '9' * 5_000 + '}'"""),
    "a bias of 1e39": (TEXT, 1, """'{"prompt":[7,8],"logit_bias":{"9":1e39}}'"""),
    "a penalty of 1e-300": (TEXT, 1, """'{"prompt":[7,8],"repetition_penalty":1e-300}'"""),
    "a temperature of 1e39": (TEXT, 1, """'{"prompt":[7,8],"temperature":1e39,"logit_bias":{"9":-1e39}}'"""),
    "no content type": (TEXT, 1, """'{"prompt":[3,4],"max_tokens":2}'"""),
    "n=7 where 6 may wait": (TEXT, 1, """'{"prompt":[3,4],"n":7,"max_tokens":3}'"""),
}
CLIENT = """
import socket, sys, threading
from json import dumps
port, path, count, kind = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
body = eval(sys.argv[5]).encode()
head = f"POST {path} HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-length: {len(body)}\\r\\n{kind}\\r\\n".encode()
sys.stdin.readline()
def send():
    with socket.create_connection(("127.0.0.1", port), 600) as sock:
        try:
            sock.sendall(head + body)
            sys.stdout.write(f"{int(sock.makefile('rb').readline().split()[1])}\\n")
        except OSError:
            sys.stdout.write("closed\\n")
threads = [threading.Thread(target=send) for _ in range(count)]
[t.start() for t in threads]
[t.join() for t in threads]
"""


def main() -> None:
    """Send every body, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    engine = make_engine()
    app = build_app(engine, "tiny", 2)
    rows = []
    with serving(app) as url:
        send(url, app, TEXT, 1, """'{"prompt":[3],"max_tokens":9}'""")  # warm-up
        for name, sent in BODIES.items():
            runs = [send(url, app, *sent) for _ in range(args.repeats)]
            least = {key: min(run[key] for run in runs) for key in ("stall_ms", "answer_s")}
            most = max(run["grown_mib"] for run in runs)
            rows.append({"body": name, "status": runs[0]["status"], **least, "grown_mib": most})
            print(json.dumps(rows[-1]), flush=True)
    engine.detach()
    path = write_results(args.out, "serve-hostile", "tiny", {**vars(args), "out": None}, rows)
    print(json.dumps({"file": path.name, "rows": rows}))


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI app in a thread; yields the address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="warning", timeout_graceful_shutdown=9))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def make_engine() -> Engine:
    """Attach an engine of 2 layers, 500 tokens per request, with the tokenizer of the bundled model."""
    _, tokenizer = load_pretrained()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512, **sizes)
    model = LlamaForCausalLM(config).eval()
    return attach(model, tokenizer=tokenizer, max_batch=4, max_seq_len=500, prefix_cache=True)


def send(url: str, app: Any, path: str, count: int, body: str) -> dict[str, Any]:
    """Send `count` copies of a body at once; return its row."""
    kind = "" if '"max_tokens":2}' in body else "content-type: application/json\r\n"
    command = [sys.executable, "-c", CLIENT, url.rpartition(":")[2], path, str(count), kind, body]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # resets the peak
    before = memory("VmRSS")
    loop = app.state.intake._loop
    stalls = asyncio.run_coroutine_threadsafe(beat(), loop)
    time.sleep(0.5)  # the body is built meanwhile
    start = time.perf_counter()
    out, _ = client.communicate("go\n", timeout=600)
    seconds = time.perf_counter() - start
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()  # the loop may have continued after the answer
    stalls.cancel()
    assert client.returncode == 0
    row = {"status": " ".join(sorted(set(out.split()))), "answer_s": round(seconds, 3)}
    return {**row, "stall_ms": round(max(STALLS) * 1e3, 1), "grown_mib": round(memory("VmHWM") - before, 1)}


STALLS: list[float] = []  # seconds that the loop was late


async def beat() -> None:
    """Record how late the event loop is, until cancelled."""
    STALLS[:] = [0.0]
    while True:
        due = time.perf_counter() + 0.002
        await asyncio.sleep(0.002)
        STALLS.append(time.perf_counter() - due)


def memory(name: str) -> float:
    """Return the MiB in a line of /proc/self/status."""
    found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text("ascii"))
    assert found
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
