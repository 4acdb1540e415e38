# SPDX-License-Identifier: Apache-2.0
"""The command line: `seqmix train | eval | generate | inspect | import | export`."""

from seqmix.cli.app import main

__all__ = ["main"]
