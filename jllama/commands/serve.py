"""``jllama serve``."""

import dataclasses
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jllama.commands.cli import parse
from jllama.commands.model import CheckpointOptions
from jllama.commands.terminal import say
from jllama.errors import JllamaError, UsageError, check_fields, no_tokenizer
from jllama.files import fault_of
from jllama.generation.sampling_params import Prompt
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.stop import end

if TYPE_CHECKING:
    from jllama.serve.engine import EngineThread

_COMMON = (
    "adapter",
    "host",
    "port",
    "api_key_file",
    "slots",
    "context",
    "memory_gib",
    "quantize",
    "drain_s",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(CheckpointOptions, EngineConfig, HttpConfig):
    """Serve a model over HTTP, as OpenAI's API does, with a page to chat at /.

    Examples:
        smollm2/
        model.gguf --port 8080 --slots 8 --context 4096
        base/ --adapter french=runs/french --adapter terse=terse.gguf

    Args:
        name: what clients call the model; without it the name of its file or folder.
        adapter: NAME=PATH of what was trained beside these weights, served as a model NAME; may be given several times.
        host: the address to listen at; 0.0.0.0 takes requests from everywhere.
        port: the port to listen at; 0 takes a free one.
        api_key_file: a file of keys, one a line, of which clients must send one; without it everybody is served.
        drain_s: how long answers under way may take when the server is told to stop.
    """

    name: str = ""
    adapter: list[str] = dataclasses.field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str = ""
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for base in ServeOptions.__bases__:
            base.__post_init__(self)
        check_fields(self, "", "port", lambda value: 0 <= value < 2**16, "between 0 and 65,535")
        check_fields(self, "", "drain_s", lambda value: value >= 0, "0 or more")
        self.adapters()

    def adapters(self) -> dict[str, str | None]:
        """The path of what is merged into each model, by the models' names; the first is the base, which has none."""
        found: dict[str, str | None] = {self.name or Path(self.checkpoint).absolute().name: None}
        for given in self.adapter:
            name, _, path = given.partition("=")
            if not name or not path or name in found:
                raise UsageError(
                    f"adapter is {given!r}; it must be NAME=PATH, with a name of its own"
                )
            found[name] = path
        return found


def main(argv: list[str], prog: str) -> int:
    """Load a model and serve it until SIGTERM or Ctrl-C comes, and the answers under way are finished."""
    options = parse(ServeOptions, argv, prog, ("checkpoint",), _COMMON)
    with fault_of(
        "serving needs packages that are not installed, pip install 'jllama[serve]'", ImportError
    ):
        from jllama.serve.app import make_app
        from jllama.serve.connections import make_server

    keys = _keys(options.api_key_file) if options.api_key_file else []
    app = make_app(None, options, keys)
    received = list[int]()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with fault_of(
        f"port {options.port} of {options.host} cannot be listened at, give others", OSError
    ):
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    server = make_server(app, options)
    thread = threading.Thread(
        target=server.run, args=([listener],), daemon=True
    )  # where it leaves signals alone
    host = f"[{options.host}]" if ":" in options.host else options.host
    said = f"http://{host}:{listener.getsockname()[1]}"

    def stop(number: int, _: object) -> None:
        if app.state.engine is None or received:
            end("stopped at once", 0)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    thread.start()
    try:
        say(f"{said}: loading {options.checkpoint} ...")
        app.state.engine = engine = _engine(options)
        slots = (
            f"{options.slots} slots of {engine.context:,} tokens, {engine.kv_bytes / 2**30:.2f} GiB"
        )
        say(f"{said}: ready, {', '.join(engine.models)}, {slots}")
        while thread.is_alive() and not received:
            time.sleep(0.2)
        app.state.is_closing = True
        say(
            f"stopping: answers under way have {options.drain_s:g} s to finish; again to stop at once"
        )
        broken = engine.close(options.drain_s)
        say(f"stopped; {broken} answers were broken off" if broken else "stopped")
    finally:
        server.should_exit = True
        thread.join()
    return 0


def _engine(options: ServeOptions) -> "EngineThread":
    from jllama import programs
    from jllama.generation.text import encode_prompt
    from jllama.serve.engine import EngineThread

    programs.keep("serve", options.checkpoint)
    models = {name: options.load_with(None, path) for name, path in options.adapters().items()}
    if any(model.tokenizer is None for model in models.values()):
        raise no_tokenizer(options.checkpoint)
    for model in models.values():
        encode_prompt(model, Prompt([0], options.default, 0))  # the default settings fit the model
    engine = EngineThread(models, options)
    engine.start(say)
    return engine


def _keys(path: str) -> list[str]:
    with fault_of(f"the api_key_file {path} cannot be read", OSError, UnicodeDecodeError):
        keys = Path(path).read_text(encoding="ascii").split()
        mode = Path(path).stat().st_mode
    if not keys:
        raise JllamaError(f"the api_key_file {path} has no keys: write one on each line")
    if os.name == "posix" and mode & 0o077:
        say(f"warning: other users may read or write the api_key_file {path}: chmod 600 {path}")
    return keys
