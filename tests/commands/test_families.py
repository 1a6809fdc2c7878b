"""A configuration with the options of other families: trained, resumed, sampled and evaluated."""

import shutil

import pytest
import yaml

from jllama.commands import cli
from jllama.formats.run import read_config

MODEL = {
    **{"num_layers": 2, "embed_dim": 32, "num_heads": 2, "mlp_dim": 48, "max_seq_len": 32},
    **{"attention_bias": True, "qk_norm": "head", "residual_multiplier": 0.5},
    **{"sliding_window": 8, "full_attention_layers": [1], "partial_rotary_factor": 0.5},
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_seq_len": 16},
    "rope_scaling_layers": "full_attention",
}
TRAINING = {"batch_size": 4, "steps": 4, "eval_every": 2, "sample_tokens": 0, "log_every": 1}


@pytest.fixture(scope="module")
def trained(workshop, tmp_path_factory):
    """Two folders: of a run of four steps, and of a copy that was stopped after two of them."""
    folder = tmp_path_factory.mktemp("families")
    data = {"path": str(workshop.folder / "corpus.txt"), "tokenizer": "bytes"}
    settings = {"model": MODEL, "training": TRAINING, "data": data}
    (folder / "c.yaml").write_text(yaml.safe_dump(settings))
    words = [str(folder / "c.yaml"), "--model.no_rope_layers", "[0]", "--run_dir"]
    assert cli.run("train", [*words, str(folder / "whole")]) == 0
    shutil.copytree(folder / "whole", folder / "halves")
    shutil.rmtree(folder / "halves" / "checkpoints" / "4")
    assert cli.run("train", ["--resume", str(folder / "halves")]) == 0
    return folder


def test_two_steps_and_two_more_are_four_bit_for_bit(trained, read_run):
    read_run.assert_same_bits(trained / "whole", trained / "halves", 4)


def test_the_runs_configuration_has_every_option(trained):
    model = read_config(trained / "whole").model
    for name, value in (MODEL | {"no_rope_layers": [0]}).items():
        actual = getattr(model, name)
        if name == "rope_scaling":
            actual = {key: getattr(actual, key) for key in value}
        assert actual == (tuple(value) if isinstance(value, list) else value)


def test_the_run_is_sampled_and_evaluated(trained, workshop, capsys):
    run, text = str(trained / "whole"), str(workshop.folder / "corpus.txt")
    assert cli.run("sample", [run, "--prompt", "the ", "--max_new_tokens", "20"]) == 0
    assert "the " in capsys.readouterr().out
    assert cli.run("eval", [run, "--data", text]) == 0
    assert "perplexity" in capsys.readouterr().out
