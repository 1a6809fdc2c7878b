"""The benchmark that sends thousands of requests: that it sees what it is there to see, and some
hundreds of them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
SPEC = importlib.util.spec_from_file_location("serve_load", SCRIPT)
assert SPEC
assert SPEC.loader
serve_load = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(serve_load)


def part(index=0, text="", reason=None, **more):
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    return {"system_fingerprint": "fp", "choices": [choice], **more}


def joined(*parts):
    choices = serve_load.Choices()
    for each in parts:
        choices.add(each)
    return choices.whole()


def test_a_stream_is_its_whole():
    stream = joined(
        part(0, "a"), part(1, "x"), part(0, "b"), part(1, "", "length"), part(0, "", "stop")
    )
    assert not serve_load.differing(stream, joined(part(0, "ab", "stop"), part(1, "x", "length")))


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, "a")],
        [part(0, "", "stop"), part(0, "a")],
        [part(0, "", "stop"), part(0, "", "stop")],
    ],
)
def test_each_text_has_one_end(parts):
    with pytest.raises(ValueError, match="end"):
        joined(*parts)


def test_a_last_bit_differs():
    log_prob = np.float32(-1.2345)
    receipts = [
        {"ids": [[1]], "log_probs": [[float(each)]]}
        for each in (log_prob, np.nextafter(log_prob, 0))
    ]
    first, second = (
        joined(part(0, "a", "stop", receipt=json.loads(json.dumps(each)))) for each in receipts
    )
    assert serve_load.differing(first, second) == ["log_probs"]


@pytest.mark.slow
def test_hundreds_of_requests_in_every_company(tmp_path):
    command = [
        sys.executable,
        SCRIPT,
        "--requests",
        "300",
        "--distinct",
        "60",
        "--result",
        tmp_path / "result.json",
    ]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["faults"]
    assert sum(result["ways"].values()) == 300
