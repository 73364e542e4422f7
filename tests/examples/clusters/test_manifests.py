"""The manifests of examples/clusters have only fields that the resource definitions have, with values of their types, and fit together.

Written down here are the fields that the manifests use, as JobSet (v1alpha2), Kubeflow Trainer (v1alpha1) and Kubernetes (batch/v1, v1)
define them; not the whole definitions.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "examples" / "clusters"


class OneOf(tuple):
    """The values that a text may have."""


class Map(dict):
    """Texts by a name that may be any."""


class Required(dict):
    """The fields of an object; all of them have to be there."""


ENV = {
    "name": str,
    "value": str,
    "valueFrom": {"fieldRef": Required(fieldPath=str), "secretKeyRef": Required(name=str, key=str)},
}
RESOURCES = {"requests": Map, "limits": Map}
CONTAINER = {
    **{"name": str, "image": str, "command": [str], "args": [str], "env": [ENV], "resources": RESOURCES},
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [Required(name=str, mountPath=str)],
}
POD = {
    "restartPolicy": OneOf(("Never",)),  # pod failure policies ask for it, and JobSet's default is another one
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "runAsGroup": int, "fsGroup": int},
    "containers": [CONTAINER],
    "volumes": [
        {"name": str, "persistentVolumeClaim": Required(claimName=str), "emptyDir": {"medium": OneOf(("Memory",)), "sizeLimit": str}}
    ],
}
EXIT_CODES = Required(containerName=str, operator=OneOf(("In", "NotIn")), values=[int])
JOB = {
    **{"completionMode": OneOf(("Indexed",)), "completions": int, "parallelism": int, "backoffLimit": int},
    "podFailurePolicy": Required(rules=[Required(action=OneOf(("FailJob", "FailIndex", "Ignore", "Count")), onExitCodes=EXIT_CODES)]),
    "template": {"spec": POD},
}
ACTIONS = OneOf(("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"))
REASONS = OneOf(("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"))
JOB_SET = {
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
    "failurePolicy": {
        "maxRestarts": int,
        "restartStrategy": OneOf(("Recreate", "BlockingRecreate")),
        "rules": [Required(name=str, action=ACTIONS, onJobFailureReasons=[REASONS])],
    },
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"metadata": {"labels": Map}, "spec": JOB}}],
}
KINDS: dict[str, Any] = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", JOB_SET),
    "ClusterTrainingRuntime": (
        "trainer.kubeflow.org/v1alpha1",
        Required(mlPolicy={"numNodes": int, "jax": {}}, template=Required(spec=JOB_SET)),
    ),
    "TrainJob": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "runtimeRef": {"name": str, "kind": OneOf(("ClusterTrainingRuntime", "TrainingRuntime")), "apiGroup": str},
            "trainer": {"image": str, "command": [str], "args": [str], "env": [ENV], "numNodes": int, "resourcesPerNode": RESOURCES},
        },
    ),
}


def problems(value: Any, expected: Any, where: str) -> list[str]:
    """Return what in a manifest does not fit, by its place."""
    if expected is Map:
        items = value.items() if isinstance(value, dict) else [("", None)]
        return [
            f"{where}.{key}: not a text or a number" for key, item in items if not isinstance(key, str) or not isinstance(item, str | int)
        ]
    if isinstance(expected, OneOf):
        return [] if value in expected else [f"{where}: {value!r} is not one of {[*expected]}"]
    if isinstance(expected, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: not a list"]
        return [problem for n, item in enumerate(value) for problem in problems(item, expected[0], f"{where}[{n}]")]
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return [f"{where}: not an object"]
        missing = [f"{where}: no {key}" for key in expected if isinstance(expected, Required) and key not in value]
        known = [problem for key in value if key in expected for problem in problems(value[key], expected[key], f"{where}.{key}")]
        return missing + [f"{where}: unknown field {key}" for key in value if key not in expected] + known
    return [] if type(value) is expected else [f"{where}: {value!r} is not {expected.__name__}"]


def manifests(name):
    return [*yaml.safe_load_all((CLUSTERS / name).read_text())]


ALL = [pytest.param(manifest, id=f"{name}-{manifest['kind']}") for name in ("jobset.yaml", "trainjob.yaml") for manifest in manifests(name)]


@pytest.mark.parametrize("manifest", ALL)
def test_a_manifest_has_fields_of_its_kind_only(manifest):
    version, spec = KINDS[manifest["kind"]]
    whole = Required(apiVersion=OneOf((version,)), kind=str, metadata={"name": str, "labels": Map}, spec=spec)
    assert problems(manifest, whole, manifest["kind"]) == []
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])


def test_the_check_finds_what_does_not_fit():
    (job,) = manifests("jobset.yaml")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["backoffLimits"] = 0
    spec["completions"] = "4"
    spec["template"]["spec"]["restartPolicy"] = "Always"
    spec["template"]["spec"]["containers"][0]["env"][1]["value"] = 4
    job["spec"]["failurePolicy"]["rules"][0].pop("name")
    where = "JobSet.replicatedJobs[0].template.spec"
    assert problems(job["spec"], JOB_SET, "JobSet") == [
        "JobSet.failurePolicy.rules[0]: no name",
        f"{where}: unknown field backoffLimits",
        f"{where}.completions: '4' is not int",
        f"{where}.template.spec.restartPolicy: 'Always' is not one of ['Never']",
        f"{where}.template.spec.containers[0].env[1].value: 4 is not str",
    ]


def pods(spec):
    """Return the Job and the container of a set of Jobs."""
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return replicated, job, container


def check_restarts(spec):
    """Exit code 2 of the container ends all, any other failure starts all pods again."""
    _, job, container = pods(spec)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]) == ("FailJob", {"containerName": container["name"], "operator": "In", "values": [2]})
    (end,) = spec["failurePolicy"]["rules"]
    assert (end["action"], end["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["backoffLimit"] == 0
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_pods_of_the_job_set_find_each_other():
    (manifest,) = manifests("jobset.yaml")
    replicated, job, container = pods(manifest["spec"])
    check_restarts(manifest["spec"])
    name = manifest["metadata"]["name"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{replicated['name']}-0-0.{name}:")
    assert job["completions"] == job["parallelism"] == int(environment["JAX_NUM_PROCESSES"])
    assert {"JAX_PROCESS_ID", "JPIPE_SECRET"} <= environment.keys()
    command, run, steps, config, *options = container["command"]
    assert f"{command}.sh" in {path.name for path in CLUSTERS.iterdir()}
    assert all(path.startswith("/shared/") for path in (run, config))
    assert steps.isdecimal()
    assert options == ["--connect-limit", "900"]


def test_the_runtime_has_the_names_that_trainer_looks_for_and_the_train_job_uses_it():
    runtime, job = manifests("trainjob.yaml")
    replicated, _, container = pods(runtime["spec"]["template"]["spec"])
    check_restarts(runtime["spec"]["template"]["spec"])
    assert replicated["name"] == container["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert "jax" in runtime["spec"]["mlPolicy"]
    assert not {variable["name"] for variable in container["env"]} & {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert (
        job["spec"]["trainer"]["args"]
        == manifests("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"][1:]
    )


def test_the_image_of_the_manifests_is_of_this_version():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    for name in ("jobset.yaml", "trainjob.yaml"):
        assert set(re.findall(r"image: \S+/jpipe:(\S+)", (CLUSTERS / name).read_text())) == {version}
