# SPDX-License-Identifier: Apache-2.0
"""What many cases have in common."""

COMMON = {"vocab_size": 96, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1}
COMMON["eos_token_id"] = 2


def rope(theta: float, **scaling) -> dict:
    """The rotary positions of a config."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}
