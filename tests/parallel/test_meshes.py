"""Every mesh of eight (pretended) devices gives one device's curve of loss, and samples the same
ids.
"""

import pytest
from helpers import run_on_eight_devices

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def report():
    result, _ = run_on_eight_devices("curves_on_eight_devices.py")
    return result


@pytest.mark.slow
def test_drawn_configurations_learn_on_every_mesh_as_on_one_device(report):
    curves = report["curves"]
    assert len({tuple(curve["mesh"]) for curve in curves}) == 20
    assert [curve for curve in curves if not curve["error"] < TOLERANCE] == []
    assert all(curve["last"] < curve["first"] - 0.2 for curve in curves)


@pytest.mark.slow
def test_mistakes_in_the_exchanges_show(report):
    assert [what for what, error in report["mistakes"].items() if not error > 100 * TOLERANCE] == []


@pytest.mark.slow
def test_a_mesh_samples_the_ids_of_one_device(report):
    one, *meshes = report["sampled"]
    assert len({tuple(row) for row in one["ids"]}) == 8
    assert [mesh["ids"] for mesh in meshes] == [one["ids"]] * 3
    assert [each["joined_later"] for each in report["sampled"]] == [one["ids"][:3]] * 4
    assert [each["together"] for each in report["sampled"]] == [one["ids"]] * 4


@pytest.mark.slow
def test_caches_are_split_over_rows_and_heads_and_never_gathered(report):
    """Four key-value heads, of which eight ways of ``tensor`` hold all."""
    _, *meshes = report["sampled"]
    assert [mesh["split"] for mesh in meshes] == [[[1, 1, 1, 1]], [[2, 4, 1, 1]], [[4, 2, 1, 1]]]
    assert all(mesh["gathered"] < 0.1 for mesh in meshes)
    assert [mesh["compiled_again"] for mesh in meshes] == [0, 0, 0]
