"""Compiles grammars in a separate process first: one that takes too long, or breaks the library, ends that process.

Limits of libraries bound most grammars, but not all: intersections of patterns can take hours, and chains of a few
thousand rules overflow the stack. The process runs `main`: it reads one grammar per line, and answers each with its
error, or "". It imports neither torch nor transformers.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from specdec.core.grammar.grammar import Grammar
from specdec.core.grammar.matcher import CompiledGrammar
from specdec.reach.grammars.vocabulary import Vocabulary

SECONDS = 5.0  # limit for compiling
BYTES = 4 << 30  # address space of a process, besides what Python takes
STACK = 4 << 20  # bytes, half of a thread's usual stack
MOST_IDLE = 8  # processes


class Trials:
    """Processes that try grammars of one library; each serves one caller at a time. Threads may share them.

    They know only the special tokens of `vocabulary`, which grammars may name.
    """

    def __init__(self, library: str, vocabulary: Vocabulary, seconds: float = SECONDS):
        self._library, self._seconds = library, seconds
        special = {i: vocabulary.tokens[i].decode(errors="replace") for i in vocabulary.special_ids}
        facts = {"size": len(vocabulary.tokens), "special": special, "eos": sorted(vocabulary.eos_ids)}
        self._facts = json.dumps(facts).encode() + b"\n"
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def check(self, grammar: Grammar) -> None:
        """Raise ValueError for a grammar that is invalid, takes too long, or breaks the library."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._start()
        answer = _ask(process, json.dumps(asdict(grammar)), self._seconds)
        with self._lock:
            if answer is not None and len(self._idle) < MOST_IDLE:
                self._idle.append(process)
                process = None
        if process is not None:
            _end(process)
        if answer is None:
            raise ValueError(
                f"{grammar.kind}: compiling it takes more than {self._seconds:g} s, or more memory or stack than "
                "available: use fewer or simpler patterns, rules and references"
            )
        if answer:
            raise ValueError(answer)

    def __del__(self) -> None:
        for process in self._idle:
            _end(process)

    def _start(self) -> "subprocess.Popen[bytes]":
        # Set the path after Python has started: else a types.py beside the caller's script would replace Python's own.
        code = f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; from {__name__} import main; main()"
        command, env = [sys.executable, "-c", code, self._library], {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=env, **pipes)
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self._facts)
            process.stdin.flush()
        if not process.stdout.readline():  # it reports when it is ready: starting takes longer than compiling
            raise RuntimeError(f"{sys.executable} could not start the process that checks grammars of {self._library}")
        return process


def _ask(process: "subprocess.Popen[bytes]", line: str, seconds: float) -> str | None:
    """Return a process's answer to a line; None if it takes too long."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError), DefaultSelector() as selector:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        selector.register(process.stdout, EVENT_READ)
        if selector.select(seconds) and (answer := process.stdout.readline()):
            return str(json.loads(answer))
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _answer(compile_: Callable[[Grammar], CompiledGrammar]) -> None:
    from specdec.reach.grammars.compiler import check_schemas

    print(flush=True)
    for line in sys.stdin:
        try:
            grammar = Grammar(**json.loads(line))
            check_schemas(grammar)
            compile_(grammar)
            print('""', flush=True)
        except ValueError as error:
            print(json.dumps(str(error)), flush=True)


def _of_bytes(size: int, special: dict[str, str], eos: list[int]) -> Vocabulary:
    """Return a vocabulary of `size` tokens with the `special` ones, by id; the others are one byte each."""
    names = {int(i): name.encode() for i, name in special.items()}
    plain = [i for i in range(max(size, 256 + len(names))) if i not in names]
    ids = dict(zip(range(256), plain, strict=False))  # by byte
    unknown = {i: f"<|unknown {i}|>".encode() for i in plain[256:]}
    tokens = {**unknown, **names, **{i: bytes([byte]) for byte, i in ids.items()}}
    ordered = [tokens[i] for i in range(len(tokens))]
    return Vocabulary(ordered, [*unknown, *names], frozenset(eos), lambda text: [ids[byte] for byte in text.encode()])


def main() -> None:
    """Run the process that tries grammars of the library in `sys.argv[1]`."""
    from specdec.reach.grammars.compiler import open_library

    with suppress(ImportError, OSError):  # Linux has both
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    vocabulary = _of_bytes(**json.loads(sys.stdin.readline()))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_answer, args=[open_library(sys.argv[1], vocabulary).compile])
    thread.start()
