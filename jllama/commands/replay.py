"""``jllama verify replay``: repeat a server's answer and compare the two."""

import dataclasses
from pathlib import Path
from typing import Any

from jllama.commands.cli import parse
from jllama.core import JllamaError
from jllama.system.files import read_json_object
from jllama.system.web import request_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Let a server repeat an answer; compare fingerprint, tokens and log-probabilities bit for bit.

    Examples:
        answer.json --url http://127.0.0.1:8000

    Args:
        answer: a file with the server's answer to a request that had "receipt": true.
        url: the address of the server.
        api_key: a key of the server, if it requires one.
    """

    answer: str
    url: str = "http://127.0.0.1:8000"
    api_key: str = ""


def main(argv: list[str], prog: str) -> int:
    """Send the request again and compare the answers.

    Raises:
        JllamaError: if they differ, which gives the exit code 1.
    """
    options = parse(ReplayOptions, argv, prog, ("answer",))
    before = _receipt(read_json_object(Path(options.answer)), options.answer)
    url = f"{options.url.rstrip('/')}{before['path']}"
    answer = request_json(url, before["request"], options.api_key)
    after = _receipt(answer, options.url)
    names = ("system_fingerprint", "ids", "log_probs")
    changed = [name for name in names if before[name] != after[name]]
    if changed:
        raise JllamaError(f"the repeated answer is not the same: {' and '.join(changed)} differ")
    print(f"the same answer, bit for bit, of {after['system_fingerprint']}")
    return 0


def _receipt(answer: Any, source: str) -> dict[str, Any]:
    receipt = answer.get("receipt") if isinstance(answer, dict) else None
    names = {"path", "request", "system_fingerprint", "ids", "log_probs"}
    if not isinstance(receipt, dict) or not names <= receipt.keys():
        raise JllamaError(f'{source} holds no receipt: send the request with "receipt": true')
    if not str(receipt["path"]).startswith("/v1/"):
        raise JllamaError(f"{source} has the path {receipt['path']!r}; it must begin with /v1/")
    return receipt
