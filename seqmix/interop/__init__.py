# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries, in and out."""

from seqmix.interop import hf

__all__ = ["hf"]
