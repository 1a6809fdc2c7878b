"""URLs are refused in one sentence, which shows no credentials, and nothing is made of them."""

from pathlib import Path

import pytest

import jllama
from jllama.commands import cli
from jllama.core import UsageError
from jllama.system.places import local_path

BUCKET = "gs://my-bucket/run1"


@pytest.mark.parametrize("place", ["runs/mine", "/tmp/x", "a:b", "C:\\runs", "stdlib", "", "a://"])
def test_paths_are_local(place):
    assert local_path(place) == Path(place)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        (BUCKET, BUCKET),
        (Path(BUCKET), BUCKET),
        ("s3://key:secret@host/b/x?token=secret#secret", "s3://host/b/x"),
        ("HTTPS://host/file", "HTTPS://host/file"),
        ("file:///tmp/x", "file://tmp/x"),
    ],
)
def test_urls_are_refused_without_their_credentials(place, shown):
    with pytest.raises(UsageError, match=r"is a URL; give a local path") as caught:
        local_path(place)
    assert str(caught.value).startswith(f"{shown} is")
    assert "secret" not in str(caught.value)


MODEL = jllama.LlamaConfig(num_layers=1, embed_dim=32, num_heads=2)


@pytest.mark.parametrize(
    "use",
    [
        lambda: jllama.TrainConfig(MODEL, run_dir=BUCKET),
        lambda: jllama.TrainConfig(MODEL, resume=BUCKET),
        lambda: jllama.TrainConfig(MODEL, init_from="hf://owner/name"),
        lambda: jllama.DataConfig(path="s3://texts/a.txt"),
        lambda: jllama.DataConfig(task="chat", path="stdlib", mixture={BUCKET: 1.0}),
        lambda: jllama.load(BUCKET),
        lambda: jllama.save(jllama.LanguageModel(MODEL, {}), BUCKET, format="gguf"),
        lambda: jllama.convert(BUCKET, "here.gguf", to="gguf"),
    ],
)
def test_a_url_is_refused_wherever_a_path_is_asked_for(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a URL"):
        use()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "quickstart", "--run_dir", BUCKET],
        ["train", "--resume", BUCKET],
        ["train", "--data.path", BUCKET],
        ["sample", "--checkpoint", BUCKET],
        ["convert", "any", BUCKET, "--to", "gguf"],
    ],
)
def test_commands_say_so_and_make_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert f"error: {BUCKET} is a URL; give a local path" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
