"""A run does not depend on the number of devices that began it."""

import json

import pytest


@pytest.mark.slow
def test_a_run_of_eight_devices_is_sampled_and_continued_on_one(workshop, tmp_path):
    run = tmp_path / "run"
    padded = ("--model.vocab_size", 264)  # 259 tokens do not divide two ways
    mesh = ("--mesh.data", 2, "--mesh.fsdp", 2, "--mesh.tensor", 2)
    stop = ("--training.eval_every", 5, "--training.steps", 10)
    begun = workshop.finish(workshop.train(run, *stop, *padded, *mesh, devices=8))
    assert begun.code == 0, begun.err
    assert "parameters on 8 x CPU, " in begun.err

    sampled = workshop.finish(
        workshop.start("sample.py", "--checkpoint", run, "--prompt", "the ", "--max_new_tokens", 4)
    )
    assert sampled.code == 0, sampled.err
    assert sampled.out.startswith("the ")

    more = ("--training.steps", 12, "--resume_with_changes", "true")
    continued = workshop.finish(workshop.train(run, *padded, *more, "--resume", "auto"))
    assert continued.code == 0, continued.err
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 12
