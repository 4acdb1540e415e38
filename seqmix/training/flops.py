# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation: the model's own matrix products against the chip's peak.

A training step is counted as 3 forward passes (one forward, two backward), without what
rematerialisation or
a chunked algorithm computes on top, and only for tokens that carry a loss: padding is no use.
"""

import jax

TRAINING_PASSES = 3.0

# Dense bfloat16 FLOP/s of one chip, from the vendors' data sheets; matched by the start of
# `jax.Device.device_kind`, the more particular name first.
_PEAKS = (
    ("NVIDIA H200", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA A100", 312e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
)


def peak_flops(device: jax.Device) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device; None when unknown, as for every CPU."""
    return next((peak for kind, peak in _PEAKS if device.device_kind.startswith(kind)), None)


def model_flops_utilisation(
    flops_per_token: float, tokens_per_second: float, devices: list[jax.Device]
) -> float | None:
    """The fraction of the devices' peak that training spends on the model's matrix products.

    Args:
      flops_per_token: forward FLOPs, multiply-add = 2.
      tokens_per_second: over all devices, tokens with a loss only.
      devices: every device of the mesh.

    Returns:
      A fraction of 1, None where the peak is unknown.
    """
    peak = peak_flops(devices[0])
    if peak is None:
        return None
    return TRAINING_PASSES * flops_per_token * tokens_per_second / (peak * len(devices))
