"""Runs the API server in its own process, so that HTTP, JSON and text never hold the GIL of the stepping thread."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from specdec.api import Engine
from specdec.tools.serve.channel import packed, received
from specdec.tools.serve.client import EngineClient, Facts
from specdec.tools.serve.host import hosted
from specdec.tools.serve.process import shared_fairly
from specdec.tools.serve.server import app_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that an idle connection stays open: longer than clients keep one (httpx: 5), so that no request meets its end.
KEEP_ALIVE = 30


class ApiServer:
    """A process that listens on `host` and `port` (0: any free port) and serves once `start` gives it an engine.

    It imports its libraries while the engine loads. Leaving `with ApiServer(...):` sends it SIGTERM. ValueError if the
    address cannot be bound.
    """

    def __init__(self, host: str, port: int):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            listener.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"--host {host} --port {port}: {reason}: choose another address") from error
        self._address = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._address[1]}"
        self._channel, theirs = socket.socketpair()
        fds = (listener.fileno(), theirs.fileno())
        # No GPU: a CUDA context would take memory. Its own session: Ctrl-C goes to the whole process group.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", "-m", "specdec.tools.serve.api_server", *map(str, fds)]
        self._process = subprocess.Popen(command, pass_fds=fds, env=env, start_new_session=True)
        listener.close()
        theirs.close()
        self._at_end = ExitStack()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def start(self, engine: Engine, name: str, **options: Any) -> None:
        """Serve `engine` as model `name`, with options of `served`; return once it accepts connections.

        ValueError if the process exits first; it has printed the reason.
        """
        with suppress(ConnectionError):  # it has ended
            self._channel.sendall(packed((Facts.of(engine), name, options)))
        self._at_end.enter_context(hosted(engine, self._channel))
        while self._process.poll() is None:
            try:
                return socket.create_connection(self._address).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise ValueError(f"the API server did not start: its process ended with status {self._process.returncode}")

    def wait(self) -> int:
        """Wait for the process to exit; return its exit status."""
        status = self._process.wait()
        self._at_end.close()
        return status

    def send_signal(self, number: int) -> None:
        """Forward a signal; the first one lets running requests finish."""
        self._process.send_signal(number)

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self.wait()
        self._channel.close()


def served(
    listener: socket.socket,
    channel: socket.socket,
    facts: Facts,
    name: str,
    *,
    max_waiting: int,
    grace: float,
    log: Path | None = None,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve until a signal arrives or the engine's process exits. grace: seconds that running requests have then; log:
    file to append to; options: those of `app_of`."""

    def leave() -> None:
        server.should_exit = True

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.intake.drain(grace)
            super().handle_exit(sig, frame)

    with ExitStack() as until_the_end:
        file = None if log is None else until_the_end.enter_context(log.open("a", encoding="utf-8"))
        client = EngineClient(facts, rests=facts.device_type == "cpu")
        app = app_of(client, lambda: nullcontext(channel), name, max_waiting, log=file, on_lost=leave, **options)
        # `Intake` fails requests after `grace`; uvicorn closes connections only after this later limit.
        limit = int(grace) + 3
        server = Server(
            uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=limit, timeout_keep_alive=KEEP_ALIVE)
        )
        until_the_end.enter_context(shared_fairly("cpu"))
        for number in SIGNALS:  # the server sends itself the signal again when it has ended
            signal.signal(number, lambda *_: None)
        server.run(sockets=[listener])


def main() -> None:
    """Entry point of the process; its arguments are the file descriptors of its sockets."""
    listener, channel = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    try:
        facts, name, options = received(channel)
    except EOFError:  # the engine could not be made
        return
    try:
        served(listener, channel, facts, name, **options)
    except (ValueError, OSError) as error:  # the name of an adapter, a log that cannot be written
        sys.exit(f"specdec serve: {error}")


if __name__ == "__main__":
    main()
