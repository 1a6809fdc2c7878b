"""Topologies that do not exist, or cannot be compiled for here, are refused in one sentence."""

import pytest

from jllama.errors import UsageError
from jllama.plan import devices


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ("h101:8", "there is no accelerator h101; did you mean h100?"),
        ("v5p:4x4", "v5p:4x4 is no topology: give the sides of the slice, such as v5p:4x4x4"),
        ("v5e:", "v5e: is no topology: give the sides of the slice, such as v5e:4x4"),
        ("h100:12", "h100:12 is no topology: give the number of GPUs, to 8 or a multiple of 8, such as h100:8"),
        ("h100:0", "h100:0 is no topology"),
    ],
)
def test_a_topology_that_does_not_exist(topology, said):
    with pytest.raises(UsageError, match=f"^{said.replace('?', '[?]')}"):
        devices.topology_devices(topology)


@pytest.mark.parametrize(("topology", "extra"), [("v5e:4x4", "plan-tpu"), ("h100:8", "cuda")])
def test_without_its_compiler_the_extra_is_named(topology, extra, monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"pip install 'jllama\[{extra}\]'"):
        devices.topology_devices(topology)
