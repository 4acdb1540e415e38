# SPDX-License-Identifier: Apache-2.0
"""Reading a published config.json: every key by its type, and none overlooked."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

# Keys that change nothing about the numbers of a forward pass, in any family.
_INERT = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_internal",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "max_position_embeddings",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_logits_to_keep",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
        "use_mamba_kernels",
        "unk_token_id",
    ]
)
_MISSING: Any = object()


class Keys:
    """The values of a config.json, counted as they are read.

    A key that is absent or null takes the default, as it does where the config was written.
    """

    def __init__(self, values: Mapping[str, Any], family: str, inert: tuple[str, ...] = ()):
        """Takes the parsed text of a config.json; ``inert`` keys of the family are not read."""
        self.values = dict(values)
        self.family = family
        self._known = set(inert) | _INERT

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a key as it stands.

        Raises:
          ValueError: there is none, and no default.
        """
        self._known.add(key)
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"config.json of the family {self.family} lacks {key!r}")
            return default
        return value

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """A whole number; errors as `raw`, and for another type or one below ``least``."""
        value = self.raw(key, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.unsupported(key, f"a whole number >= {least} is expected")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A real number; errors as `raw`, and for another type."""
        value = self.raw(key, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.unsupported(key, "a number is expected")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        """True or False; errors as `raw`, and for another type."""
        value = self.raw(key, default)
        if value is not default and not isinstance(value, bool):
            raise self.unsupported(key, "true or false is expected")
        return value

    def items(self, key: str, default: Any = _MISSING) -> Any:
        """A list, as a tuple; errors as `raw`, and for another type."""
        value = self.raw(key, default)
        if value is default:
            return value
        if not isinstance(value, list | tuple):
            raise self.unsupported(key, "a list is expected")
        return tuple(value)

    def only(self, key: str, *supported: Any) -> Any:
        """A value of those that this framework computes; the first is the default.

        Raises:
          ValueError: another value; names key and value.
        """
        value = self.raw(key, supported[0])
        if not any(value == one and type(value) is type(one) for one in supported):
            raise self.unsupported(key, f"supported: {', '.join(map(json.dumps, supported))}")
        return value

    def unsupported(self, key: str, why: str) -> ValueError:
        """The error for a value that the framework cannot compute."""
        shown = json.dumps(self.values.get(key), default=str)
        return ValueError(f"config.json, family {self.family}: {key} = {shown}: {why}")

    def finish(self) -> None:
        """Warns of keys that nobody has read: they are new to this framework.

        Raises:
          ValueError: the tensors are quantised.
        """
        if self.has("quantization_config"):
            raise self.unsupported("quantization_config", "quantised weights are not supported")
        self._known.add("quantization_config")
        if unread := sorted(set(self.values) - self._known):
            warnings.warn(
                f"config.json, family {self.family}: keys that are not known and not used: "
                f"{', '.join(unread)}",
                stacklevel=2,
            )


def real(value: Any) -> float:
    """A number as JSON holds it, infinities as `transformers` writes them included.

    Raises:
      ValueError: it is none.
    """
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = float(value["__float__"])
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"a number is expected, got {value!r}")
    return float(value)
