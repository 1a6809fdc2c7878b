"""The servers of the tests do what those that they stand for do, and fail as they are told."""

import urllib.request

import pytest
from servers import Faults, faulty_proxy, hub_server, using
from upath import UPath

CONTENT = bytes(range(256)) * 5000


def test_a_bucket_holds_files(bucket):
    place = UPath(bucket.url, use_listings_cache=False)
    (place / "a/b c.bin").write_bytes(CONTENT)
    assert (place / "a/b c.bin").read_bytes() == CONTENT
    with (place / "a/b c.bin").open("rb") as file:
        file.seek(1000)
        assert file.read(10) == CONTENT[1000:1010]
    (place / "d").write_text("")
    assert sorted(path.name for path in place.iterdir()) == ["a", "d"]
    (place / "d").unlink()
    assert [path.name for path in place.iterdir()] == ["a"]


def test_a_file_of_a_bucket_is_created_once(bucket):
    place = UPath(bucket.url, use_listings_cache=False) / "owner"
    place.fs.pipe_file(place.path, b"one", mode="create")
    with pytest.raises(FileExistsError):
        place.fs.pipe_file(place.path, b"two", mode="create")
    assert place.read_bytes() == b"one"


@pytest.fixture
def hub(tmp_path):
    model = tmp_path / "hub/me/model"
    texts = tmp_path / "hub/datasets/me/texts"
    (model / "parts").mkdir(parents=True)
    texts.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "parts/weights #1.bin").write_bytes(CONTENT)
    (texts / "train é.jsonl").write_bytes(CONTENT)
    with hub_server(tmp_path / "hub") as server:
        yield server


def test_a_hub_has_models_and_datasets(hub, tmp_path):
    import huggingface_hub

    with faulty_proxy(hub) as proxy, using(proxy):
        folder = tmp_path / "cache"
        snapshot = huggingface_hub.snapshot_download("me/model", cache_dir=folder)
        assert (tmp_path / snapshot / "parts/weights #1.bin").read_bytes() == CONTENT
        assert (tmp_path / snapshot / "config.json").read_text() == "{}"
        texts = UPath("hf://datasets/me/texts")
        assert [*texts.fs.find(texts.path)] == ["datasets/me/texts/train é.jsonl"]
        with (texts / "train é.jsonl").open("rb") as file:
            file.seek(5)
            assert file.read(3) == CONTENT[5:8]
        texts.fs.get_file(str(texts / "train é.jsonl"), str(tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == CONTENT
        for missing in ("hf://me/other/x", "hf://me/model/x", "hf://me/model@v2/config.json"):
            with pytest.raises(FileNotFoundError):
                UPath(missing).read_bytes()
        assert proxy.requests


def get(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def test_a_proxy_injects_what_is_planned(hub):
    faults = Faults(["", "503", "reset", "lost", "cut", "slow"], slow_s=0.01)
    with faulty_proxy(hub, faults) as proxy:
        address = f"{proxy.url}/me/model/resolve/main/config.json"
        assert get(address) == b"{}"
        with pytest.raises(OSError, match="503"):
            get(address)
        for _ in ("reset", "lost"):
            with pytest.raises(OSError, match=r"(?i)reset|closed"):
                get(address)
        with pytest.raises(Exception, match="IncompleteRead"):
            get(address)
        assert get(address) == b"{}"
        assert get(address) == b"{}"
        assert len(proxy.requests) == 7
        assert proxy.injected == dict.fromkeys(["503", "reset", "lost", "cut", "slow"], 1)


def test_a_proxy_goes_down_and_comes_back_at_its_port(hub):
    with faulty_proxy(hub) as proxy:
        address = f"{proxy.url}/me/model/resolve/main/config.json"
        for _ in range(2):
            proxy.go_down()
            with pytest.raises(OSError, match="refused"):
                get(address)
            proxy.come_back()
            assert get(address) == b"{}"
        proxy.down_for(0.01).join()
        assert get(address) == b"{}"


def test_chance_is_the_same_with_the_same_seed(hub):
    seen = []
    for _ in range(2):
        with faulty_proxy(hub, Faults(rate=0.5, kinds=["500"], seed=3)) as proxy:
            codes = []
            for _ in range(20):
                try:
                    get(f"{proxy.url}/me/model/resolve/main/config.json")
                    codes.append(200)
                except OSError as error:
                    codes.append(error.code)
            assert proxy.injected["500"] == codes.count(500)
            seen.append(codes)
    assert seen[0] == seen[1]
    assert set(seen[0]) == {200, 500}


def test_clients_get_over_single_faults(bucket, tmp_path):
    """What is written through a proxy is what is read through it: the libraries try again."""
    faults = Faults(["503", "", "reset"])
    large = CONTENT * 6  # written in parts
    (tmp_path / "large").write_bytes(large)
    with faulty_proxy(bucket.server, faults) as proxy, using(proxy):
        place = UPath(bucket.url, use_listings_cache=False)
        place.fs.put_file(str(tmp_path / "large"), (place / "large").path)
        place.fs.get_file((place / "large").path, str(tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == large
        assert proxy.injected == {"503": 1, "reset": 1}
