"""``jllama serve`` in a process of its own: start, answer, stop; several adapters; what cannot be
served.
"""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from helpers import run_command
from helpers_adapters import adapter_params, make_run
from models import SERVED, served, weights

import jllama
from jllama.commands import cli
from jllama.formats.registry import open_checkpoint, save
from jllama.formats.tensors import base_fingerprint
from jllama.models.config import LoraConfig
from jllama.templates.messages import TEMPLATES

ROOT = Path(__file__).parents[2]
SIZES = ["--slots", "2", "--context", "512", "--port", "0"]
LONG = {"prompt": "x", "max_tokens": 400, "regex": "[ab]{390,}", "stream": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base and a run that trained an adapter."""
    folder = tmp_path_factory.mktemp("served")
    model = served()
    base = dataclasses.replace(model, params=weights(SERVED))
    save(base, folder / "base", "hf")
    save(jllama.LanguageModel(SERVED, weights(SERVED)), folder / "mute", "hf")
    lora = LoraConfig(rank=3, alpha=8.0)
    fingerprint = base_fingerprint(open_checkpoint(folder / "base"))
    make_run(
        folder / "run", folder / "base", SERVED, lora, adapter_params(SERVED, lora), fingerprint
    )
    (folder / "keys").write_text("one\n\n two \n")
    (folder / "keys").chmod(0o600)
    (folder / "empty").write_text("\n")
    return folder


@pytest.fixture
def serve(place):
    """Starts the command; gives the process, its address and, in a list, the lines that it says."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "jllama", "serve", *map(str, arguments), *SIZES]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JLLAMA_CACHE": str(place / "cache")}
        process = subprocess.Popen(
            command, cwd=place, env=environment, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        lines = [process.stderr.readline()]
        threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
        return process, re.match(r"(http://\S+): loading ", lines[0])[1], lines

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def http():
    """One client for all, as making one takes long."""
    with httpx.Client(timeout=600) as client:
        yield client


def wait_until_ready(http, url):
    statuses = set()
    end_s = time.monotonic() + 600
    while (status := http.get(f"{url}/health").status_code) != 200:
        statuses.add(status)
        assert time.monotonic() < end_s
        time.sleep(0.1)
    return statuses


def test_a_server_from_start_to_stop(serve, http, tmp_path, capsys):
    """Loading, a model and its adapter, a receipt that another process confirms, an answer finished
    after SIGTERM.
    """
    template = tmp_path / "own.jinja"
    template.write_text("Own:" + TEMPLATES["chatml"])
    options = ("--default.top_k=9", "--chat_template", template)
    adapters = ("--adapter", "tuned=run", "--adapter", "again=run")
    process, url, lines = serve("base", *adapters, *options)
    assert http.get(url).status_code == 200  # the page is there at once
    assert wait_until_ready(http, url) <= {503}
    ids = [model["id"] for model in http.get(f"{url}/v1/models").json()["data"]]
    assert ids == ["base", "tuned", "again"]
    messages = [{"role": "user", "content": "hi"}]
    given = {"messages": messages, "max_tokens": 8, "seed": 1, "receipt": True}
    for name in ("base", "again"):
        body = {"model": name, "messages": messages}
        shown = http.post(f"{url}/apply-template", json=body).json()
        assert shown["prompt"].startswith("Own:"), name
    answers = {
        name: http.post(f"{url}/v1/chat/completions", json=given | {"model": name}).json()
        for name in ("base", "tuned", "again")
    }
    text = {name: answer["choices"][0]["message"]["content"] for name, answer in answers.items()}
    assert text["base"] != text["tuned"] == text["again"]
    assert answers["tuned"]["receipt"]["request"]["top_k"] == 9
    (tmp_path / "answer.json").write_text(json.dumps(answers["tuned"]))
    assert cli.run("replay", [str(tmp_path / "answer.json"), "--url", url]) == 0
    capsys.readouterr()
    with http.stream("POST", f"{url}/v1/completions", json=LONG) as reply:
        events = reply.iter_lines()
        next(events)
        process.send_signal(signal.SIGTERM)
        refused = []
        while not refused or refused[-1].status_code == 200:
            refused.append(http.get(f"{url}/health"))
        assert refused[-1].status_code == 503
        assert [line for line in events if line][-1] == "data: [DONE]"
    assert process.wait(600) == 0
    said = "".join(lines)
    assert f"{url}: ready, base, tuned, again, 2 slots of 512 tokens" in said
    assert "stopping: running answers have 30 s to finish; again to stop at once\n" in said
    assert "\nstopped\n" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_answers_that_are_broken_off(serve, http):
    """They are told so, by an event, when their time is over; Ctrl-C stops like SIGTERM."""
    process, url, lines = serve("base", "--drain_s", "0", "--api_key_file", "keys")
    wait_until_ready(http, url)
    assert http.get(f"{url}/v1/models").status_code == 401
    key = {"Authorization": "Bearer two"}
    several = LONG | {"n": 8}  # more than end before the signal comes
    with http.stream("POST", f"{url}/v1/completions", json=several, headers=key) as reply:
        events = reply.iter_lines()
        next(events)
        process.send_signal(signal.SIGINT)
        last = [line for line in events if line][-1]
    assert "broken off" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert process.wait(600) == 0
    assert re.search("stopped; [1-8] answers were broken off", "".join(lines))


@pytest.mark.slow
def test_a_server_stopped_while_it_loads(serve):
    process, _, lines = serve("base")
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 0
    assert "Traceback" not in "".join(lines)


MISTAKES = """
1 nowhere -> there is no checkpoint at nowhere
1 mute -> mute has no tokenizer
2 base --adapter run -> adapter is 'run'; it must be NAME=PATH
2 base --adapter a=run --adapter a=run -> adapter is 'a=run'; it must be NAME=PATH, with a name of
2 base --adapter base=run -> adapter is 'base=run'; it must be NAME=PATH, with a name of its own
1 base --adapter a=nowhere -> nowhere
1 base --chat_template nowhere -> the template 'nowhere' cannot be read
2 base --port 70000 -> port is 70000; it must be between 0 and 65,535
1 base --host nowhere.invalid -> cannot listen on port
2 base --slots 0 -> slots is 0; it must be at least 1
2 base --max_body_bytes 0 -> max_body_bytes is 0; it must be over 0
2 base --drain_s nan -> drain_s is 'nan'; it must be a finite number
2 base --default.top_p 0 -> top_p is 0.0; it must be over 0 and at most 1
2 base --default.temprature 1 -> no option default.temprature; did you mean default.temperature?
2 base --default.banned_ids [999] -> the banned_ids have token 999; the ids run from 0 to 258
1 base --api_key_file nowhere -> api_key_file nowhere cannot be read: No such file or directory
1 base --api_key_file empty -> the api_key_file empty has no keys
2 base --mesh.data 2 -> there is no option mesh.data
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_what_cannot_be_served(line, place, loads_once):
    words, problem = line.split(" -> ")
    code, *arguments = words.split()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    done = run_command("serve", "--port=0", *arguments, place=place)
    assert done.code == int(code)
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert problem in last
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


def test_a_port_that_is_taken(place, loads_once):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run_command("serve", "base", "--port", port, place=place)
    assert done.code == 1
    problem = f"cannot listen on port {port} of 127.0.0.1, choose others: Address already in use"
    assert problem in done.err
