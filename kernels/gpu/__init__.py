# SPDX-License-Identifier: Apache-2.0
"""Pallas Mosaic GPU kernels for Hopper, one module a family."""
