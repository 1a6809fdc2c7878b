"""The benchmark that sends thousands of requests: that it sees what it is there to see, and some of
them."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def serve_load():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("serve_load")


def part(index=0, text="", reason=None, **more):
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    return {"system_fingerprint": "fp", "choices": [choice], **more}


@pytest.fixture(scope="module")
def joined(serve_load):
    def join(*parts):
        choices = serve_load.Choices()
        for part in parts:
            choices.add(part)
        return choices.whole()

    return join


END = part(0, "", "stop")


def test_a_stream_is_its_whole(serve_load, joined):
    stream = joined(part(0, "a"), part(1, "x"), part(0, "b"), part(1, "", "length"), END)
    assert not serve_load.differing(stream, joined(part(0, "ab", "stop"), part(1, "x", "length")))


@pytest.mark.parametrize("parts", [[part(0, "a")], [END, part(0, "a")], [END, END]])
def test_each_text_has_one_end(parts, joined):
    with pytest.raises(ValueError, match="end"):
        joined(*parts)


def test_a_last_bit_differs(serve_load, joined):
    log_prob = np.float32(-1.2345)
    answers = []
    for value in (log_prob, np.nextafter(log_prob, 0)):
        receipt = {"ids": [[1]], "log_probs": [[float(value)]]}
        answers.append(joined(part(0, "a", "stop", receipt=json.loads(json.dumps(receipt)))))
    assert serve_load.differing(*answers) == ["log_probs"]


@pytest.mark.slow
def test_many_requests_in_every_company(tmp_path):
    script, result = BENCHMARKS / "serve_load.py", tmp_path / "result.json"
    sizes = ["--requests", "100", "--distinct", "20"]
    command = [sys.executable, script, *sizes, "--result", result]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(result.read_text())
    assert not facts["faults"]
    assert sum(facts["ways"].values()) == 100
