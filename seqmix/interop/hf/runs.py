# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints as run folders, and run folders as published checkpoints."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from seqmix import config as configs
from seqmix import data, training
from seqmix.interop.hf.checkpoint import TOKENIZER_FILE, write_json
from seqmix.interop.hf.loading import load
from seqmix.interop.hf.origin import Origin
from seqmix.interop.hf.saving import save
from seqmix.models import HybridLM
from seqmix.training import Experiment
from seqmix.training.checkpoint import Checkpointer, has_checkpoint
from seqmix.training.evaluation import CHECKPOINTS, TOKENIZER
from seqmix.training.experiment import CONFIG_FILE
from seqmix.training.loop import run_facts
from seqmix.training.program import define_model
from seqmix.training.state import TrainState

ORIGIN = "huggingface"
BYTES = "bytes"
_STEP = 0
_LONGEST_ROW = 1024
_ROWS = 4
# Bytes for saving beside those of the largest array.
_SAVE_MEMORY = 10_000_000


def import_run(
    folder: Path | str, run_dir: Path | str, *, dtype: Any = None, tokenizer: str | None = None
) -> Experiment:
    """Makes a run folder of a published checkpoint.

    `seqmix generate`, `eval` and `inspect` take it like a trained one, and so does training, which
    starts from its parameters with a fresh optimizer. Its config has the model and the tokenizer of
    the checkpoint, and defaults for everything else.

    Args:
      folder: of the Hugging Face layout.
      run_dir: the run folder; it must hold no run yet.
      dtype: as `load` takes it.
      tokenizer: a `tokenizer.json` or a folder with one, or 'bytes' for a model of bytes; None for
        the one beside the checkpoint.

    Returns:
      The config of the run.

    Raises:
      FileNotFoundError, ValueError: see `load`; no tokenizer, or one that is too large for the
        model; a run folder that is in use.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    if (run_dir / CONFIG_FILE).exists() or has_checkpoint(run_dir / CHECKPOINTS):
        raise ValueError(f"{run_dir} holds a run already; take another folder")
    found = _tokenizer(folder, tokenizer)
    model = load(folder, dtype=dtype)
    size = model.config.vocabulary
    if found.vocabulary_size > size:
        raise ValueError(
            f"the tokenizer {found.name} has {found.vocabulary_size} ids, the model only {size}"
        )
    found.save(run_dir / TOKENIZER)
    experiment = _experiment(model, found, run_dir)
    model.origin.save(run_dir / ORIGIN)
    _save_checkpoint(model, experiment, run_dir)
    # Last: a folder without it is no run, so that one that was cut short is not taken for one.
    (run_dir / CONFIG_FILE).write_text(_text(experiment), encoding="utf-8")
    return experiment


def _text(experiment: Experiment) -> str:
    """The config as gin text.

    Without the settings of the corpus, which are its defaults: what they belong to is gone where an
    evaluation names another corpus.
    """
    parts = configs.resolved(experiment).split("\n\n")
    corpus = configs.gin_name(type(experiment.data.corpora[0]))
    return "\n\n".join(part for part in parts if not part.startswith(f"{corpus}."))


def _tokenizer(folder: Path, wanted: str | None) -> data.Tokenizer:
    if wanted == BYTES:
        return data.ByteTokenizer()
    if wanted is None and not (folder / TOKENIZER_FILE).is_file():
        raise ValueError(
            f"{folder} holds no {TOKENIZER_FILE}; name one with --tokenizer, or {BYTES!r} for a "
            "model of bytes"
        )
    return data.HuggingFaceTokenizer.from_file(wanted or folder)


def _experiment(model: HybridLM, tokenizer: data.Tokenizer, run_dir: Path) -> Experiment:
    if isinstance(tokenizer, data.HuggingFaceTokenizer):
        place = (run_dir / TOKENIZER / TOKENIZER_FILE).absolute()
        named: data.TokenizerConfig = data.TokenizerFile(str(place), tokenizer.end_token)
    else:
        named = data.ByteTokenizerConfig()
    longest = model.origin.config.get("max_position_embeddings") or _LONGEST_ROW
    return Experiment(
        model=model.config,
        data=data.DataConfig(
            tokenizer=named,
            sequence_length=min(longest, _LONGEST_ROW),
        ),
        trainer=training.TrainerConfig(batch_size=_ROWS),
    )


def _save_checkpoint(model: HybridLM, experiment: Experiment, run_dir: Path) -> None:
    """Writes the parameters as the checkpoint of step 0, without an optimizer's state."""
    params, variables = define_model(experiment).split(model)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, params, variables, (), zero, zero)
    largest = max(value.nbytes for value in params.values())
    checkpointer = Checkpointer(run_dir / CHECKPOINTS, save_memory=largest + _SAVE_MEMORY)
    try:
        facts = run_facts(experiment) | {"untrained": True}
        checkpointer.save(_STEP, state, None, facts)
        checkpointer.wait()
    finally:
        checkpointer.close()


def export_run(
    run_dir: Path | str,
    folder: Path | str,
    *,
    family: str | None = None,
    step: int | None = None,
) -> None:
    """Writes a run's checkpoint as a folder that `transformers` loads.

    A run that was imported keeps the config.json, dtypes and tokenizer files that it came with.

    Args:
      run_dir: the run folder.
      folder: of the Hugging Face layout; it must hold no model yet.
      family: see `save`.
      step: which checkpoint, None for the newest.

    Raises:
      FileNotFoundError: no run folder, or no such checkpoint.
      ValueError: see `save`.
    """
    run_dir, folder = Path(run_dir), Path(folder)
    run = training.load_run(run_dir, step=step)
    imported = run_dir / ORIGIN
    origin = Origin.load(imported) if imported.is_dir() else None
    save(
        run.model,
        folder,
        family=family,
        origin=origin,
        context=run.experiment.data.sequence_length,
        special_tokens={"eos_token_id": run.tokenizer.end_of_document},
    )
    if origin is None and isinstance(run.tokenizer, data.HuggingFaceTokenizer):
        _save_tokenizer(run_dir / TOKENIZER, run.tokenizer, folder)


def _save_tokenizer(source: Path, tokenizer: data.HuggingFaceTokenizer, folder: Path) -> None:
    text = (source / TOKENIZER_FILE).read_text(encoding="utf-8")
    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
    write_json(folder / "tokenizer_config.json", settings)
