"""Analytic profiles of the papers' models. `python -m tests.planner.paper_profiles` writes them again; that takes a minute."""

from pathlib import Path

from benchmarks.papers import models, two_bw
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile

FOLDER = Path(__file__).parent / "paper_profiles"


def read(name):
    """Return `vgg16`, `resnet50` or `gnmt8` at the paper's microbatch, or `bert`, two blocks of 2.2B at 1, 4 and 8 rows."""
    return Profile.from_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def topology(name):
    """Read a topology of `configs/topologies`."""
    return Topology.from_yaml((Path("configs/topologies") / f"{name}.yaml").read_text(encoding="utf-8"))


def main():
    """Profile and write."""
    profiles = {
        "vgg16": models.pipedream_profile("VGG-16"),
        "resnet50": models.pipedream_profile("ResNet-50"),
        "gnmt8": models.pipedream_profile("GNMT-8"),
        "bert": models.two_blocks("BERT, 2.2B", (1, 4, 8), two_bw.POLICIES),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, profile in profiles.items():
        (FOLDER / f"{name}.json").write_text(profile.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
