# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels of seqmix, installed as the import package ``seqmix_kernels``.

Only ``seqmix.mixers`` calls them; they know nothing of Flax.
"""
