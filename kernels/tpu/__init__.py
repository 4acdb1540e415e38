# SPDX-License-Identifier: Apache-2.0
"""Pallas Mosaic TPU kernels, one module a family."""
