"""Analytic profiles of the papers' models. `python -m tests.planner.paper_profiles` writes them again; that takes a minute."""

from pathlib import Path

import optax

from benchmarks.planner import paper_2bw
from benchmarks.planner.models import gnmt, gpt, mixed_precision_adam, resnet50, vgg16
from planner.machine.topology import Topology
from planner.profile.analyze import analyze
from planner.profile.profile import Profile

FOLDER = Path(__file__).parent / "paper_profiles"


def read(name):
    """One of `vgg16`, `resnet50`, `gnmt8` at the paper's microbatch, or `gpt`, 2.2B wide with two blocks at 1 and 8 rows."""
    return Profile.from_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def topology(name):
    """A topology of `configs/topologies`."""
    return Topology.from_yaml((Path("configs/topologies") / f"{name}.yaml").read_text(encoding="utf-8"))


def main():
    """Profile and write."""
    pcie, nvlink, momentum = topology("cluster-a").device, topology("v100-16gb-8").device, optax.sgd(0.1, momentum=0.9)
    profiles = {
        "vgg16": analyze(*vgg16(), momentum, (64,), pcie, policies=()),
        "resnet50": analyze(*resnet50(), momentum, (128,), pcie, policies=()),
        "gnmt8": analyze(*gnmt(8), optax.adam(1e-3), (64,), pcie, policies=()),
        "gpt": analyze(*gpt(2, 1920, 20), mixed_precision_adam(), (1, 8), nvlink, policies=paper_2bw.POLICIES),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, profile in profiles.items():
        (FOLDER / f"{name}.json").write_text(profile.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
