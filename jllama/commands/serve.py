"""``jllama serve``: serve a model over HTTP."""

import dataclasses
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jllama.commands.cli import parse
from jllama.commands.model import CheckpointOptions, store_programs
from jllama.commands.terminal import say
from jllama.core import JllamaError, UsageError, check_fields
from jllama.generation.sampling_params import Prompt
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.system.errors import no_tokenizer
from jllama.system.files import errors_as
from jllama.system.stop import exit_now

if TYPE_CHECKING:
    from jllama.serve.engine import EngineThread

_COMMON = "adapter chat_template host port api_key_file slots context memory_gib quantize drain_s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(CheckpointOptions, EngineConfig, HttpConfig):
    """Serve a model over HTTP, as OpenAI's API does, with a chat page at /.

    Examples:
        smollm2/
        model.gguf --port 8080 --slots 8 --context 4096
        base/ --adapter french=runs/french --adapter terse=terse.gguf

    Args:
        name: the name of the model for clients; the default is the name of its file or folder.
        adapter: NAME=PATH of an adapter for these weights, served as the model NAME; it may be
            given several times.
        chat_template: a chat template in place of each checkpoint's own: llama2, llama3, chatml,
            mistral, phi4, granite, or a file with a Jinja template.
        host: the address to listen on; 0.0.0.0 accepts requests from everywhere.
        port: the port to listen on; 0 takes a free one.
        api_key_file: a file with one key per line; a client must send one of them. By default
            everybody is served.
        drain_s: the seconds that running answers may take when the server is told to stop.
    """

    name: str = ""
    adapter: list[str] = dataclasses.field(default_factory=list)
    chat_template: str = ""
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
        """Return the adapter's path by each model's name; the base comes first, with None."""
        base = self.name or Path(self.checkpoint).absolute().name
        adapters: dict[str, str | None] = {base: None}
        for option in self.adapter:
            name, _, path = option.partition("=")
            if not name or not path or name in adapters:
                raise UsageError(
                    f"adapter is {option!r}; it must be NAME=PATH, with a name of its own"
                )
            adapters[name] = path
        return adapters


def main(argv: list[str], prog: str) -> int:
    """Load a model and serve it until SIGTERM or Ctrl-C, then finish the running answers."""
    options = parse(ServeOptions, argv, prog, ("checkpoint",), _COMMON)
    with errors_as(
        "serving needs packages that are not installed, pip install 'jllama[serve]'", ImportError
    ):
        from jllama.serve.app import make_app
        from jllama.serve.connections import make_server

    # Listen before the model is loaded: clients are told that it is loading.
    keys = _keys(options.api_key_file) if options.api_key_file else []
    app = make_app(None, options, keys)
    is_ipv6 = ":" in options.host
    problem = f"cannot listen on port {options.port} of {options.host}, choose others"
    with errors_as(problem, OSError):
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    host = f"[{options.host}]" if is_ipv6 else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    server = make_server(app, options)
    # Outside the main thread the server does not handle signals.
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)

    # A signal ends the loop below; while loading, or a second time, it ends the process at once.
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        if app.state.engine is None or signals:
            exit_now("stopped at once", 0)
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    thread.start()

    # Load the model, serve until a signal, and finish the running answers.
    try:
        say(f"{url}: loading {options.checkpoint} ...")
        engine = _start_engine(options)
        app.state.engine = engine
        memory = f"{engine.context:,} tokens, {engine.kv_bytes / 2**30:.2f} GiB"
        say(f"{url}: ready, {', '.join(engine.models)}, {options.slots} slots of {memory}")
        while thread.is_alive() and not signals:
            time.sleep(0.2)
        app.state.is_closing = True
        seconds = f"{options.drain_s:g} s"
        say(f"stopping: running answers have {seconds} to finish; again to stop at once")
        num_broken = engine.close(options.drain_s)
        say(f"stopped; {num_broken} answers were broken off" if num_broken else "stopped")
    finally:
        server.should_exit = True
        thread.join()
    return 0


def _start_engine(options: ServeOptions) -> "EngineThread":
    """Load the model and its adapters, and start the engine.

    Raises:
        JllamaError: if a model has no tokenizer, or the default settings do not fit it.
    """
    from jllama.generation.text import encode_prompt
    from jllama.serve.engine import EngineThread
    from jllama.templates.messages import find_template

    store_programs("serve", options.checkpoint)
    models = {name: options.load_with(None, path) for name, path in options.adapters().items()}
    if any(model.tokenizer is None for model in models.values()):
        raise no_tokenizer(options.checkpoint)
    for name, model in models.items():
        encode_prompt(model, Prompt([0], options.default, 0))  # checks the default settings
        if options.chat_template:
            template = find_template(model.text_tokenizer, None, options.chat_template)
            models[name] = dataclasses.replace(model, chat_template=template)
    engine = EngineThread(models, options)
    engine.start(say)
    return engine


def _keys(path: str) -> list[str]:
    """Read the API keys of a file; print a warning if other users can read or change it."""
    with errors_as(f"the api_key_file {path} cannot be read", OSError, UnicodeDecodeError):
        keys = Path(path).read_text(encoding="ascii").split()
        mode = Path(path).stat().st_mode
    if not keys:
        raise JllamaError(f"the api_key_file {path} has no keys: write one on each line")
    if os.name == "posix" and mode & 0o077:
        say(f"warning: other users may read or write the api_key_file {path}: chmod 600 {path}")
    return keys
