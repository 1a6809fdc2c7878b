"""What tests of the server share."""

import pytest
from models import served

from jllama.serve.config import EngineConfig
from jllama.serve.engine import EngineThread


@pytest.fixture(scope="module")
def engine():
    engine = EngineThread({"small": served()}, EngineConfig(slots=3, queue=16))
    engine.start()
    yield engine
    assert engine.close() == 0
