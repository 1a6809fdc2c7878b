"""Configurations of real runs: released models, batches that divide, receipts that hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jllama
from jllama.commands.cli import parse, shipped_configs
from jllama.commands.plan import PlanOptions

ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
}
PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
PLANS = {
    name: plan[1]
    for name, path in shipped_configs().items()
    if (plan := re.search("# Its plan: jllama plan (.*)", path.read_text()))
}


def test_there_are_plans_for_all_sizes():
    assert len(PLANS) == 12
    assert len(re.findall("^```text", PAGE, re.M)) == 16
    assert "does not fit" not in PAGE


@pytest.mark.parametrize("name", PLANS)
def test_the_model_is_the_released_one_and_the_receipt_is_on_the_page(name):
    config = parse(PlanOptions, [name, "--topology", "h100:8"], "", ("config",))
    assert config.model == jllama.preset(name.split("_")[0])
    assert PLANS[name].startswith(f"configs/{name}.yaml --topology ")
    assert f"jllama plan {PLANS[name]}\n" in PAGE


SMALL = [  # and what they may hold of a device, in GiB
    pytest.param("llama3.2-1b_v5e-16", 3.9, marks=pytest.mark.plan_tpu),
    # Logits take 2 of these, a 70th of the GPU.
    pytest.param("llama3.2-1b_h200", 22, marks=pytest.mark.plan_gpu),
    pytest.param("llama3.1-8b_h100-8", 20, marks=pytest.mark.plan_gpu),
    pytest.param("qwen3-30b-a3b_h100-8", 61, marks=pytest.mark.plan_gpu),
    pytest.param("llama3-70b_h100-64", 33, marks=pytest.mark.plan_gpu),
    pytest.param("llama3.1-405b_h100-512", 56, marks=pytest.mark.plan_gpu),
]
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e\+?\d+)?"


def figures(text):
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]


@pytest.mark.parametrize(("name", "most_gib"), SMALL)
def test_a_plan_is_as_the_page_has_it(name, most_gib):
    run = [sys.executable, "-m", "jllama", "plan", *PLANS[name].split()]
    if "h100" in name or "h200" in name:
        run += ["--training.attention", "triton"]  # the page is made without tokamax
    done = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned = re.sub(r"\ncompiled in .*", "", done.stdout.strip()).replace(
        "attention triton", "attention auto"
    )
    printed = PAGE.split(f"jllama plan {PLANS[name]}\n```\n\n```text\n")[1].split("\n```")[0]
    assert re.sub(NUMBER, "0", planned).split() == re.sub(NUMBER, "0", printed).split()
    assert figures(planned) == pytest.approx(figures(printed), rel=0.05, abs=0.01)
    assert float(re.search(r"memory of a device +([\d.]+) of", planned)[1]) <= most_gib
