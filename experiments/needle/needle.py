# SPDX-License-Identifier: Apache-2.0
"""Trains two-layer models to find a needle in random text, one sparse attention each.

    python experiments/needle/needle.py --out=experiments/needle/results/cpu

Every sparse layer reads the same number of keys a query (--budget); a window of that many cannot
reach most needles, a layer that chooses what it reads can. Writes `needle.json`, `needle.md` (share
of right answers by where the needle stands) and `needle.png` into --out.
"""

import argparse
import datetime
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from seqmix.data.synthetic import needle
from seqmix.layers import AttentionConfig, MoBAConfig, NSAConfig
from seqmix.models import FeedForwardConfig, HybridLM, HybridLMConfig

VOCABULARY = 32
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def mixers(budget: int, head_width: int) -> dict[str, tuple[str, object]]:
    """{name: (layer, its config)}; all but 'attention' read at most `budget` keys a query.

    NSA's compressed branch reads one more for every `budget / 8` tokens, each a window of twice as
    many pressed together: it shows where to look.
    """
    heads = {"heads": 4, "head_width": head_width}
    quarter, eighth = budget // 4, budget // 8
    selected = {"block_size": eighth, "selected_blocks": 6, "window": quarter}
    compressed = {"compression_block": quarter, "stride": eighth}
    return {
        "attention": ("attention", AttentionConfig(**heads)),
        "window": ("attention", AttentionConfig(window=budget, **heads)),
        "moba": ("moba", MoBAConfig(block_size=quarter, top_k=4, **heads)),
        "nsa": ("nsa", NSAConfig(kv_heads=2, **selected, **compressed, **heads)),
    }


def model_config(layer: str, mixer: object, width: int) -> HybridLMConfig:
    """Two layers of one mixer."""
    return HybridLMConfig(
        vocabulary=VOCABULARY,
        width=width,
        layers=2,
        pattern=layer,
        mixers={layer: mixer},
        feed_forward=FeedForwardConfig(hidden=2 * width),
        scan=False,
    )


def train(
    config: HybridLMConfig,
    *,
    length: int,
    steps: int,
    batch: int = 32,
    rate: float = 3e-3,
    seed: int = 0,
    enough: float = 0.0,
):
    """The trained model's function from tokens [B, T] to logits of the last position.

    Prints the loss ten times, and stops where it is then below `enough`.
    """
    model = HybridLM(config, rngs=nnx.Rngs(seed))
    graph, parameters = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98))

    def answers(parameters, tokens):
        return nnx.merge(graph, parameters)(tokens)[:, -1].astype(jnp.float32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters, state, tokens, labels):
        def loss(parameters):
            logits = answers(parameters, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    state = optimizer.init(parameters)
    for number in range(steps):
        task = needle(seed * 1_000_003 + number, batch, length, vocabulary_size=VOCABULARY)
        parameters, state, value = step(parameters, state, task.tokens, task.labels[:, -1])
        if number % max(1, steps // 10) == 0 or number == steps - 1:
            print(f"  step {number:5d}  loss {float(value):.4f}", flush=True)
            if value < enough:
                break
    return functools.partial(jax.jit(answers), parameters)


def accuracy(answers, *, length: int, depth: float | None, examples: int = 256) -> float:
    """Share of right answers on examples that training has not seen."""
    task = needle(2**31 - 1, examples, length, depth=depth, vocabulary_size=VOCABULARY)
    return float(np.mean(np.argmax(answers(task.tokens), axis=-1) == task.labels[:, -1]))


def table(rows: list[dict]) -> str:
    """Markdown: one row a mixer, one column a depth."""
    lines = ["| mixer | " + " | ".join(f"depth {d:g}" for d in DEPTHS) + " | anywhere |"]
    lines.append("|---|" + "---:|" * (len(DEPTHS) + 1))
    for row in rows:
        shares = [*row["by_depth"], row["anywhere"]]
        lines.append(f"| {row['mixer']} | " + " | ".join(f"{s:.2f}" for s in shares) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Share of right answers against depth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for row in rows:
        axes.plot(DEPTHS, row["by_depth"], marker="o", label=row["mixer"])
    axes.set_xlabel("where the needle stands (0 = beginning of the text)")
    axes.set_ylabel("right answers")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--mixers", nargs="+", default=None)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    choices = mixers(options.budget, options.width // 4)
    rows = []
    for name in options.mixers or choices:
        print(name, flush=True)
        answers = train(
            model_config(*choices[name], options.width),
            length=options.length,
            steps=options.steps,
            batch=options.batch,
            rate=options.rate,
            seed=options.seed,
        )
        score = functools.partial(accuracy, answers, length=options.length)
        by_depth = [score(depth=depth) for depth in DEPTHS]
        rows.append({"mixer": name, "by_depth": by_depth, "anywhere": score(depth=None)})
    facts = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "options": {k: v for k, v in vars(options).items() if k not in ("out", "mixers")},
        "rows": rows,
    }
    (options.out / "needle.json").write_text(json.dumps(facts, indent=1) + "\n")
    head = (
        f"Two layers of width {options.width}, rows of {options.length}, {options.budget} keys a "
        f"query, {options.steps} steps of {options.batch}; jax {facts['jax']}, {facts['date']}\n\n"
    )
    (options.out / "needle.md").write_text(head + table(rows))
    plot(rows, options.out / "needle.png")
    print(table(rows))


if __name__ == "__main__":
    main()
