"""A saved model that several tests write in other programs' forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import Tied, values
from support.training import save


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose step 3 is a tied model in two dtypes, and its values; no test changes it."""
    directory = tmp_path_factory.mktemp("tied") / "run"
    torch.manual_seed(1)
    model = Tied()
    model.layers[1].bfloat16()
    model.to("jax")
    model.head.weight = model.embed.weight  # moving a module unties it
    save(directory, model, torch.optim.SGD(model.parameters(), lr=0.1), step=3)
    return directory, values(model.state_dict())
