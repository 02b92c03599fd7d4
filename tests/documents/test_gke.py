"""The GKE example: manifests that fit their schemas and each other, and a script that resumes."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support import ROOT, TESTS
from support.processes import Running

from torchax_ckpt import LocalTier, planning

EXAMPLE = ROOT / "examples" / "gke"
SCHEMAS = TESTS / "schemas"


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server does with ``--validate=strict``."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if isinstance(made.get("properties"), dict) and "additionalProperties" not in made:
        made["additionalProperties"] = bool(made.get("x-kubernetes-preserve-unknown-fields"))
    if made.pop("x-kubernetes-int-or-string", False):
        made["type"] = ["integer", "string"]
    return made


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())


def queue() -> dict[str, dict[str, Any]]:
    """The manifests of Kueue, by kind."""
    return {m["kind"]: m for m in yaml.safe_load_all((EXAMPLE / "queue.yaml").read_text())}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = strict(json.loads((SCHEMAS / f"{name}.json").read_text()))
    # The API server's own fields, which a CRD leaves out.
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def test_the_manifests_fit_their_schemas() -> None:
    validator("jobset-v1alpha2").validate(manifest("jobset"))
    configuration = manifest("checkpoint-configuration")
    validator("checkpoint-configuration-v1").validate(configuration)
    names = {"ResourceFlavor": "resource-flavor", "ClusterQueue": "cluster-queue"}
    for each in queue().values():
        validator(f"{names.get(each['kind'], 'local-queue')}-v1beta2").validate(each)


def test_the_queue_admits_the_jobset_and_no_more() -> None:
    flavor, cluster, local = queue().values()
    jobset, (job,) = manifest("jobset"), manifest("jobset")["spec"]["replicatedJobs"]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    assert flavor["spec"]["nodeLabels"] == pod(jobset)["nodeSelector"]
    (group,) = cluster["spec"]["resourceGroups"]
    (offered,) = group["flavors"]
    assert offered["name"] == flavor["metadata"]["name"]
    (container,) = pod(jobset)["containers"]
    # Kueue never admits what requests another resource.
    requested = container["resources"]["limits"]
    assert group["coveredResources"] == [r["name"] for r in offered["resources"]] == [*requested]
    num_chips = (
        job["replicas"] * job["template"]["spec"]["parallelism"] * requested["google.com/tpu"]
    )
    assert offered["resources"][0]["nominalQuota"] == num_chips


def test_the_block_that_sizes_the_ramdisk_runs_and_counts_what_the_tier_keeps() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    *before, answer = ast.parse(block).body
    named: dict[str, Any] = {}
    exec(compile(ast.Module(before, []), "README.md", "exec"), named)
    assert isinstance(answer, ast.Expr)
    found = eval(compile(ast.Expression(answer.value), "README.md", "eval"), named)
    assert found == planning.ramdisk_bytes_per_host(
        12 * 70_000_000_000, hosts_per_slice=32, num_copies=LocalTier("ramdisk").keep + 1
    )


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_schemas_find_what_is_wrong() -> None:
    def spoilt(change: Any) -> Any:
        jobset = manifest("jobset")
        change(jobset)
        return jobset

    flavor, cluster, local = queue().values()
    flavor["spec"]["nodeLabels"]["topology"] = 4
    cluster["spec"]["resourceGroups"][0]["flavours"] = []
    local["spec"]["clusterQueue"] = "Not a name"
    for name, wrong in (
        ("resource-flavor-v1beta2", flavor),
        ("cluster-queue-v1beta2", cluster),
        ("local-queue-v1beta2", local),
        ("jobset-v1alpha2", spoilt(lambda j: j["spec"]["failurePolicy"].update(maxRestarts="no"))),
        ("jobset-v1alpha2", spoilt(lambda j: pod(j)["containers"][0].update(volumeMount=[]))),
        ("jobset-v1alpha2", spoilt(lambda j: pod(j)["volumes"][0]["csi"].pop("driver"))),
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator(name).validate(wrong)


def test_the_slices_are_as_large_as_their_hosts_say() -> None:
    (job,) = manifest("jobset")["spec"]["replicatedJobs"]
    spec, node = job["template"]["spec"], pod(manifest("jobset"))["nodeSelector"]
    per_host = pod(manifest("jobset"))["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["replicas"] >= 2  # one slice has nobody to be rescued by
    assert spec["parallelism"] == spec["completions"]
    topology = node["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == spec["parallelism"] * per_host
    selector = manifest("checkpoint-configuration")["spec"]["nodeSelector"]
    machine = selector["node.kubernetes.io/instance-type"]
    assert machine.endswith(f"-{per_host}t")
    text = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    pools = r"for slice in (.*); do\n *(gcloud container node-pools create .*)\n"
    ((slices, command),) = re.findall(pools, text)
    given = dict(re.findall(r"--([a-z-]+)=(\S+)", command))
    assert len(slices.split()) == job["replicas"]
    assert (given["tpu-topology"], given["machine-type"]) == (topology, machine)
    assert int(given["num-nodes"]) == spec["parallelism"]
    # On the network of their host, pods have their node's rights, which default to reading.
    assert pod(manifest("jobset"))["hostNetwork"]
    assert given["scopes"] == "cloud-platform"


@pytest.mark.slow
def test_the_program_saves_where_the_ramdisk_is_mounted() -> None:
    spec = pod(manifest("jobset"))
    (container,), (volume,) = spec["containers"], spec["volumes"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert volume["csi"]["driver"] == "multitier-checkpoint.csi.storage.gke.io"
    given = dict(argument.lstrip("-").partition("=")[::2] for argument in container["args"])
    assert given["local"].startswith(mount["mountPath"] + "/")
    assert given["directory"].startswith("gs://")
    assert int(given["local-period"]) < int(given["period"])
    assert spec["terminationGracePeriodSeconds"] > 30  # CheckpointOptions.preemption_grace_secs
    options = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ).stdout
    assert {f"--{name}" for name in given} <= set(re.findall(r"--[a-z-]+", options))


# What a cluster puts into the environment: who the others are. The rest is the script as it is.
ON_TWO_HOSTS = f"""
    import functools, runpy, sys, warnings
    import jax
    index, count, port, ramdisks, *arguments = sys.argv[1:]
    sys.argv[1:] = [*arguments, f"--local={{ramdisks}}/{{index}}"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize = functools.partial(
        jax.distributed.initialize, f"127.0.0.1:{{port}}", int(count), int(index))
    warnings.simplefilter("ignore")
    runpy.run_path({str(EXAMPLE / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.long
def test_two_hosts_resume_what_one_has_lost_from_the_others_ramdisk(tmp_path: Path) -> None:
    """Two slices of one host with four devices."""

    def run(name: str, *more: str) -> tuple[list[int], list[list[str]]]:
        arguments = [
            str(tmp_path / f"{name}-ramdisks"),
            f"--directory={tmp_path / name}",
            *("--distributed", "--steps=12", "--local-period=2", "--period=100"),
            *("--width=16", "--layers=1"),
        ]
        with Running(ON_TWO_HOSTS, 2, *arguments, *more, devices=4) as running:
            codes = running.wait()
            outputs = [running.output(index) for index in range(2)]
        assert codes != [1, 1], outputs[0][1][-3000:]
        printed = [out.splitlines() for out, _ in outputs]
        return codes, [[line for line in o if not line.startswith("[Gloo]")] for o in printed]

    codes, straight = run("straight")
    assert codes == [0, 0]
    codes, killed = run("killed", "--crash-at=9")
    # Who is slower may be ended by JAX, as the other is gone.
    assert set(codes) <= {-signal.SIGKILL, -signal.SIGABRT}
    assert [lines[0] for lines in killed] == ["started: no checkpoint"] * 2
    shutil.rmtree(tmp_path / "killed-ramdisks" / "1")
    codes, resumed = run("killed")
    assert codes == [0, 0]
    for lines in resumed:
        assert lines[0] == "resumed: step 8"
        assert lines[-1] == straight[0][-1] == straight[1][-1]
        assert lines[-1].startswith("final state: sha256:")
    assert (tmp_path / "killed-ramdisks" / "1" / "10").is_dir()
