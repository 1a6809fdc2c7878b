"""Runs in this folder are quick."""

import helpers
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_runs():
    """``tests/commands`` reads pages with charts."""
    with helpers.quick_runs():
        yield
