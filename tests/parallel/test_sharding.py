"""Eight (pretended) devices compute and train as one does, and the parameters really are split."""

import pytest
from helpers import run_on_eight_devices
from models import ON_EIGHT_DEVICES as CONFIG

from jllama.core import UsageError
from jllama.core.parameters import parameter_table, shape_of
from jllama.lab.checks import TOLERANCE, VISIBLE
from jllama.parallel.sharding import MeshConfig

HALVES = dict.fromkeys(("embed", "vocab", "heads", "kv_heads", "mlp"), 2)
SPLIT = {  # how many ways each mesh splits axes, and a device's rows
    "data=8": ({}, 1),
    "fsdp=8": ({"embed": 8, "mlp": 8, "vocab": 8}, 1),
    "data=2 fsdp=2 tensor=2": (HALVES, 2),
    "fsdp=2 tensor=2 sequence=2": (HALVES, 4),
}


@pytest.fixture(scope="module")
def report():
    result, messages = run_on_eight_devices("steps_on_eight_devices.py")
    assert "donated" not in messages
    return result


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SPLIT)
def test_a_mesh_computes_and_trains_as_one_device_does(report, mesh):
    assert report[mesh]["devices"] == [1, 8]
    assert report[mesh]["error"] < TOLERANCE
    assert report[mesh]["wrong_error"] > VISIBLE * TOLERANCE
    assert report[mesh]["initial_error"] < 1e-6
    assert report[mesh]["moved"] > 0.01
    assert report[mesh]["training_error"] < TOLERANCE
    assert report[mesh]["selected_error"] < TOLERANCE
    assert report[mesh]["muon_error"] < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SPLIT)
def test_rows_parameters_and_moments_are_split_by_the_rules(report, mesh):
    ways, rows = SPLIT[mesh]
    assert report[mesh]["rows"] == [rows]
    for path, row in parameter_table(CONFIG).items():
        expected = list(shape_of(row, CONFIG))
        # The scales of norms are whole everywhere; fsdp takes the first axis that it divides.
        if row.inputs:
            free = [name for name in row.axes if name in ways]
            split = free if "heads" in ways else free[:1]
            expected = [
                size // (ways[axis] if axis in split else 1)
                for axis, size in zip(row.axes, expected, strict=True)
            ]
        assert report[mesh]["shards"][path] == expected
        assert report[mesh]["moment_shards"][path] == expected
        assert report[mesh]["momentum_shards"].get(path, expected) == expected


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_refused(report):
    assert report["refused"] == [
        "the mesh data=3 x fsdp=1 x expert=1 x sequence=1 x tensor=1 needs 3 devices, "
        "but there are 8",
        "the mesh data=2 x fsdp=1 x expert=1 x sequence=1 x tensor=3 needs 6 devices, "
        "but there are 8",
        "the mesh data=1 x fsdp=16 x expert=1 x sequence=1 x tensor=1 needs 16 devices, "
        "but there are 8",
        None,  # two key-value heads serve four devices
        "the heads axis of layers/wq has size 4, which does not divide 8 ways: "
        "the nearest mesh.tensor that does is 4",
    ]


@pytest.mark.parametrize(
    "sizes", [{"data": -2}, {"fsdp": 0}, {"tensor": 0}, {"sequence": -3}, {"data": -1, "fsdp": -1}]
)
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(UsageError, match="needs positive sizes"):
        MeshConfig(**sizes)
