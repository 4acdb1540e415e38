# SPDX-License-Identifier: Apache-2.0
"""What the kernels and their bounds take as known of each TPU."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One TPU.

    Attributes:
      single: libtpu's name of the smallest topology.
    """

    single: str


CHIPS = {
    "v5e": Chip("v5e:2x2"),
    "v5p": Chip("v5p:2x2x1"),
    "v6e": Chip("v6e:2x2"),
    "tpu7x": Chip("tpu7x:2x2x1"),
}
