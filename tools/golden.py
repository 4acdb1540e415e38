# SPDX-License-Identifier: Apache-2.0
"""Writes the resolved config of every recipe to tests/golden; the diff shows what a change does."""

from pathlib import Path

from seqmix import config
from seqmix.training.experiment import Experiment

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
GOLDEN = ROOT / "tests" / "golden"


def main() -> None:
    recipes = {path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.gin")}
    for recipe in sorted(recipes):
        path = GOLDEN / recipe
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.resolved(config.load([CONFIGS / recipe]).build(Experiment)))
        print(path.relative_to(ROOT))
    for path in GOLDEN.rglob("*.gin"):
        if path.relative_to(GOLDEN) not in recipes:
            path.unlink()
            print(f"removed {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
