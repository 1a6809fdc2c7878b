"""``jllama verify check`` on a folder of submissions: right, wrong, endless and crashing ones, each
as if it were alone.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers import run_command

RIGHT = """
import numpy as np

def rms_norm(x, scale, eps):
    print("not shown")
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale
"""
SUBMISSIONS = {
    "anna.py": RIGHT,
    "ben.py": "import time\n\ndef rms_norm(x, scale, eps):\n    time.sleep(9999)\n\n"
    "def rope(x):\n    return x\n",
    "carl.py": "import os\n\ndef rms_norm(x, scale, eps):\n    os._exit(3)\n",
    "dora.py": "import nothing_of_this_name\n",
    "eve/norms.py": "from helper import root\n\ndef rms_norm(x, scale, eps):\n"
    "    return x / (root(x) + eps) * scale\n",
    "eve/helper.py": "def root(x):\n    return (x * x).mean(-1, keepdims=True) ** 0.5\n",
    "eve/.hidden": "",
    "readme.txt": "",
    "empty/readme.txt": "",
}


@pytest.fixture(scope="module")
def submissions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submissions")
    for name, text in SUBMISSIONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def check(folder, *options):
    """In a process of its own: the tests' has threads, which a fork does not take along."""
    command = [sys.executable, "-m", "jllama", "verify", "check", str(folder), *options]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_each_submission_is_judged_as_if_alone(submissions):
    done = check(submissions, "--timeout_s", "5", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert [*found] == ["anna", "ben", "carl", "dora", "eve"]
    norms = {name: problems["rms_norm"] for name, problems in found.items()}
    assert norms["anna"] == ""
    assert norms["ben"] == norms["carl"] == "rms_norm ended its process, or was not done after 5 s"
    assert norms["dora"] == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert norms["eve"].endswith("known mistake: eps is outside the square root.")
    assert found["ben"]["rope"].startswith(
        "UsageError: rope is called as ``function(x, positions, theta)``, "
    )
    assert {problem for name, problem in found["anna"].items() if name != "rms_norm"} == {None}


@pytest.mark.slow
def test_the_table(submissions, tmp_path):
    for name in ("anna.py", "carl.py"):
        (tmp_path / name).write_text(SUBMISSIONS[name])
    done = check(tmp_path)
    assert done.returncode == 1
    head, anna, carl, *reasons = done.stdout.splitlines()
    assert head.split()[:3] == ["submission", "rms_norm", "rope"]
    assert anna.split() == ["anna", "pass", *"-" * 9]
    assert carl.split() == ["carl", "FAIL", *"-" * 9]
    assert reasons == ["", "carl: rms_norm ended its process, or was not done after 30 s"]


def test_a_folder_without_submissions(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    done = run_command("verify", "check", tmp_path / "none")
    assert done.code == 1
    assert done.err.startswith("error: No such file or directory: ")
    done = run_command("verify", "check", tmp_path)
    problem = f"{tmp_path} holds no submissions: give a folder of .py files, or of folders of them"
    assert (done.code, done.err) == (2, f"error: {problem}\n")
