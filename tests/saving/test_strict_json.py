"""All JSON of a run is JSON, which knows neither NaN nor infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from support.compare import assert_trees_identical
from support.training import mlp, save_state

from torchax_ckpt import LocalTier, TorchaxCheckpointer, policies
from torchax_ckpt.storage.medium import seals

METRICS: dict[str, Any] = {
    "loss": math.nan,
    "best": -math.inf,
    "nested": [1.5, {"a/b": [math.inf, "NaN", None]}, {"nonfinite": [["loss"]]}],
}


def strictly(text: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"a bare {name}: {text}")

    return json.loads(text, parse_constant=refuse)


class WithState:
    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": math.inf,
            "worst": [-math.inf, {math.inf: math.nan}],
            "c": complex(1, -math.inf),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_a_strict_parser_reads_all_json_of_a_run(directory: Path) -> None:
    def attach(ckpt: TorchaxCheckpointer) -> WithState:
        model, own = mlp(), WithState()
        optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its best is infinite
        ckpt.attach(model, optimizer, lr_scheduler=plateau, stateful={"own": own})
        return own

    rules = [policies.EveryNSteps(math.inf), policies.PreserveAll()]
    keep = policies.AnyPreservationPolicy(rules)
    local = LocalTier(
        directory.with_name("local"), save_decision_policy=policies.SpecificStepsPolicy([2])
    )
    with TorchaxCheckpointer(directory, preservation_policy=keep, local=local) as ckpt:
        attach(ckpt)
        ckpt.save(1, metrics=METRICS, force=True)
        ckpt.save(2, metrics={"device": np.float32("nan")}, force=True)
        ckpt.wait_until_finished()
        assert ckpt.verify(2) == 2
        names = set()
        for path in directory.parent.rglob("*"):
            if path.parent.name == "d":  # array data, whose first byte may be that of JSON
                continue
            if path.is_file() and (content := path.read_bytes()).startswith(b"{"):
                names.add(path.name if path.suffix != ".jsonl" else "events")
                lines = content.decode().splitlines()
                for text in lines if path.suffix == ".jsonl" else ["\n".join(lines)]:
                    strictly(text)
    of_orbax = {"_CHECKPOINT_METADATA", "_sharding", "_METADATA"}
    assert names >= {"data.json", "events", "lease", *of_orbax}
    strictly((directory / "1" / "commit_success.txt").read_text().partition("\n")[2])
    with TorchaxCheckpointer(directory) as fresh:
        own = attach(fresh)
        assert_trees_identical(own.loaded, WithState().state_dict())
        for reader in (fresh, ckpt):
            assert_trees_identical(reader.metrics(1), METRICS)
            assert_trees_identical(reader.metrics(2), {"device": math.nan})


def test_steps_with_bare_nan_of_older_releases_are_read(directory: Path) -> None:
    save_state(directory, {"x": 1})
    summary = {"metrics": METRICS, "abandons": []}
    text = json.dumps(summary, separators=(",", ":"))
    assert ":NaN" in text
    sealed = {**summary, "xxh3_64": seals.of_octets(text.encode())}
    (directory / "1" / "summary" / "data.json").write_text(json.dumps(sealed))
    fresh = TorchaxCheckpointer(directory)
    assert fresh.verify() == 1
    assert fresh.load(1) == {"x": 1}
    assert_trees_identical(fresh.metrics(1), METRICS)


@pytest.mark.parametrize(
    "paths", [[["no"]], [[]], ["a"], [["a", 9]], [["a", 0, 0]], [["b"]], 3, [[["a"]]], [["a"]]]
)
def test_a_path_that_leads_to_no_name_is_damage(paths: Any) -> None:
    sealed = seals.seal({"a": [1.0, "Infinity"], "b": "1.5", "nonfinite": paths})
    with pytest.raises(ValueError, match="nonfinite|unpack"):
        seals.unseal(sealed)
