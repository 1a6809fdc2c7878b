"""The road from text to a chat model: small enough here that it takes seconds."""

import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from helpers import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from roads import write_settings

import jllama
from jllama.commands import cli
from jllama.commands.speedrun import SpeedrunOptions
from jllama.lab import speedrun
from jllama.lab.speedrun import STAGES, horizon, shapes
from jllama.training.metrics import training_flops_per_token


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """All stages, and what the command said."""
    folder = tmp_path_factory.mktemp("road")
    done = run_command("speedrun", "--config", write_settings(folder), place=folder)
    assert done.code == 0, done.err
    return folder, done


def parsed(*words):
    return cli.parse(SpeedrunOptions, ["--config", "speedrun", *words], "speedrun")


def hashes(folder):
    """The weights of each stage, as their receipts have them."""
    return [
        json.loads((folder / "run" / stage / "receipt.json").read_text())["weights"]
        for stage in STAGES
    ]


def test_the_road_ends_with_a_model_in_three_formats(road):
    folder, done = road
    models = [jllama.load(folder / "run" / name) for name in ("rewards", "model.gguf", "hf")]
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answers = {
        jllama.chat(model, question, max_new_tokens=8, temperature=0).text for model in models
    }
    assert len(answers) == 1
    for stage in STAGES:
        assert f"python -m jllama train --config run/{stage}.yaml" in done.err
        assert (folder / "run" / stage / "report.html").exists()
    assert "python -m jllama convert run/rewards run/hf --to hf" in done.err


def test_the_card_has_what_the_runs_have_logged(road):
    folder, _ = road
    (folder / "run/chat/benchmarks.json").write_text(
        '{"arc_easy": {"questions": 9, "acc": 0.375, "acc_stderr": 0.1}, "mmlu/law": {"acc": 0.5}}'
    )
    assert run_command("report", "run", place=folder).code == 0
    card = json.loads((folder / "run/report.json").read_text())
    for stage in STAGES:
        run = folder / "run" / stage
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        numbers = card["stages"][stage]
        config = yaml.safe_load((run / "config.yaml").read_text())["training"]
        assert numbers["step"] == config["steps"]
        assert numbers["tokens"] == config["steps"] * config["batch_size"] * config["seq_len"]
        assert numbers["elapsed_s"] == max(line.get("elapsed_s", 0) for line in lines)
        if stage != "rewards":
            assert numbers["bits_per_byte"] == lines[-1]["final"]["bits_per_byte"]
        assert 0 <= numbers["held_out_reward"] <= 1
        assert "What is your name?" in card["answers"][stage]
        assert len(card["answers"][stage]) == 8
    assert card["stages"]["chat"]["arc_easy acc"] == 0.375
    assert not {"arc_easy acc_stderr", "mmlu/law acc"} & set(card["stages"]["chat"])
    assert card["next"]["talk to it"] == "python -m jllama chat run/rewards"
    page = (folder / "run/report.html").read_text()
    for text in ("<svg", "bits per byte of gzip", "held out reward", "What is your name?"):
        assert text in page


def test_what_is_finished_is_not_done_again(road):
    folder, _ = road
    before = hashes(folder)
    times = {path: path.stat().st_mtime_ns for path in (folder / "run").glob("*/checkpoints/*")}
    done = run_command("speedrun", "--config", folder / "road.yaml", place=folder)
    assert done.code == 0
    for stage in STAGES:
        assert f"run/{stage} is finished" in done.err
    assert hashes(folder) == before
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_changed_setting_is_named(road):
    folder, _ = road
    words = ["--config", folder / "road.yaml", "--depth", 2]
    done = run_command("speedrun", *words, place=folder)
    assert done.code == 1
    assert "model.num_layers was 1 and is 2" in done.err
    assert "To go on: python -m jllama speedrun" in done.err


@pytest.mark.parametrize(
    ("name", "value"), [("corpus", "."), ("chats", "other.jsonl"), ("rewards.data.path", "x.jsonl")]
)
def test_other_data_are_named_and_nothing_goes_on(road, name, value):
    """Also after the runs are finished, when they do not look at their data again."""
    folder, _ = road
    before = hashes(folder)
    words = ["--config", folder / "road.yaml", f"--{name}", value]
    done = run_command("speedrun", *words, place=folder)
    assert done.code == 2
    assert re.search(r"error: (base|chat|rewards)\.data\.\S+ was .* and is ", done.err)
    assert hashes(folder) == before


def test_code_that_a_folder_names_is_not_run(road, tmp_path):
    folder, _ = road
    copy = tmp_path / "run"
    shutil.copytree(folder / "run", copy)
    config = yaml.safe_load((copy / "rewards/config.yaml").read_text())
    (tmp_path / "score.py").write_text("open('ran', 'w')\ndef score(*_):\n    return [1.0]\n")
    config |= {"reward": "score.py:score"}
    config["data"]["path"] = str(folder / config["data"]["path"])
    (copy / "rewards/config.yaml").write_text(yaml.safe_dump(config))
    done = run_command("report", copy, place=tmp_path)
    assert done.code == 0, done.err
    assert not (tmp_path / "ran").exists()
    assert "held out reward" not in (copy / "report.html").read_text()


def test_options_of_processes_reach_the_stages(road):
    folder, _ = road
    options = parsed("--run_dir", str(folder / "other"), "--base.distributed.coordinator", "auto")
    stages = dict(speedrun.write_stages(options))
    file = stages["base"][-1]
    assert yaml.safe_load(file.read_text())["distributed"]["coordinator"] == "auto"


def test_a_plan_writes_nothing(tmp_path):
    words = ["--config", write_settings(tmp_path), "--plan", "--price", 2]
    done = run_command("speedrun", *words, place=tmp_path)
    assert done.code == 0
    assert not (tmp_path / "run").exists()
    for stage in STAGES:
        assert stage in done.err
    assert "at 2 an hour" in done.err


def test_a_large_depth_is_planned_for_absent_devices(tmp_path):
    """By formula: there are no packages for these devices, and this takes a process of its own."""
    words = ["--depth", "20", "--tokens_per_parameter", "12", "--topology", "v6e:8", "--price", "5"]
    command = [sys.executable, "-m", "jllama", "speedrun", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "base     448,3" in done.stderr
    assert "at 5 an hour" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("h100:8", marks=pytest.mark.plan_gpu),
        pytest.param("v5e:4x4", marks=pytest.mark.plan_tpu),
    ],
)
def test_depth_20_compiles_for_absent_devices_and_fits(topology, tmp_path):
    words = ["--depth", "20", "--tokens_per_parameter", "12", "--topology", topology]
    command = [sys.executable, "-m", "jllama", "speedrun", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "its memory is by formula" not in done.stderr
    assert "does not fit" not in done.stderr


@settings(max_examples=8)
@given(st.integers(1, 64), st.floats(1, 40))
def test_sizes_follow_the_rules(depth, ratio):
    """The laws of DeepSeek LLM (arXiv:2401.02954, equation 1), stated once more."""
    words = ["--depth", str(depth), "--tokens_per_parameter", str(ratio)]
    flags = []
    for rule in (shapes, horizon):
        flags += [f"--{name}={value}" for name, value in rule(parsed(*words, *flags)).items()]
    base = parsed(*words, *flags).base
    model = base.model
    assert model.num_layers == depth
    assert 64 * depth <= model.embed_dim < 64 * depth + 128
    assert model.num_heads * model.head_dim == model.embed_dim
    assert 256 <= model.max_seq_len <= 2048
    model = speedrun.model_of(base)
    parameters = training_flops_per_token(model, 0) / 6
    tokens = base.training.steps * base.training.batch_size * model.max_seq_len
    assert tokens >= ratio * parameters
    flops = 6 * parameters * ratio * parameters
    assert base.optimizer.learning_rate == pytest.approx(1.5 * 0.3118 / flops**0.125, rel=0.05)
    batch_tokens = base.training.batch_size * model.max_seq_len
    best = max(0.292 * flops**0.3271, 8 * model.max_seq_len)
    assert abs(math.log2(batch_tokens / best)) <= 0.5 + 1e-9


def test_steps_follow_a_width_that_is_set_by_name():
    words = ["--depth", "4", "--base.model.embed_dim", "96", "--base.model.num_heads", "3"]
    smaller = horizon(parsed(*words))
    larger = horizon(parsed("--depth", "4", "--base.model.embed_dim", "384"))
    assert smaller["base.training.steps"] < larger["base.training.steps"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--depth", "0"], "depth is 0; it must be from 1 to 128"),
        (["--price", "-1"], "price is -1.0; it must be 0 or positive"),
        (["--tokens_per_parameter", "0"], "it must be positive and finite"),
        (["--base.optimizer.learning_rate", "-1"], "optimizer.learning_rate"),
        (["--chat.steps", "3"], "there is no option chat.steps; did you mean"),
        (["--topology", "h100"], "topology"),
        (["--run_dir", "gs://bucket/run"], "is a URL; give a local path"),
        (["--corpus", "nowhere/*.txt"], "'nowhere/*.txt' has no files"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, tmp_path):
    done = run_command("speedrun", *words, place=tmp_path)
    assert done.code in (1, 2)
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_weights(road, tmp_path):
    """Eight kills, each within the stages that the one before has not reached or finished."""
    folder, _ = road
    command = [
        sys.executable,
        "-m",
        "jllama",
        "speedrun",
        "--config",
        str(write_settings(tmp_path)),
    ]
    draw = random.Random(48)
    kills = 0
    while kills < 8:
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        time.sleep(draw.uniform(5, 15))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path) == hashes(folder)
    for name in ("model.gguf", "hf/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / "run" / name).read_bytes()
