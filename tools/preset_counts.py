# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of published models a second time, with transformers, without allocating.

    python tools/preset_counts.py    # needs torch and transformers >= 5.24, unlike seqmix

Builds the models of `configs/presets/published.json` that have a ``transformers`` config on torch's
meta device, and writes their counts to `configs/presets/counted.json`: all parameters, those of
each layer as [parameters, layers in a row], and those outside of the layers.
"""

import itertools
import json
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "presets"
LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.")


def count(settings: dict) -> dict:
    """The counts of one published config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(settings)
    if kinds := settings.get("layer_types"):
        *period, periods = kinds  # [kind, layers in a row] of one period, and their number
        settings["layer_types"] = [kind for kind, n in period for _ in range(n)] * periods
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [0] * config.num_hidden_layers
    rest = []
    # Tensors that are shared, as those of a tied head, come once.
    for name, parameter in model.named_parameters():
        if match := LAYER.match(name):
            layers[int(match[1])] += parameter.numel()
        else:
            rest.append(parameter.numel())
    runs = [[size, len(list(group))] for size, group in itertools.groupby(layers)]
    return {"total": sum(layers) + sum(rest), "layers": runs, "rest": rest}


def main() -> None:
    published = json.loads((FOLDER / "published.json").read_text())
    lines = [
        f'"{name}": {json.dumps(count(entry["transformers"]))}'
        for name, entry in published.items()
        if "transformers" in entry
    ]
    (FOLDER / "counted.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
