# SPDX-License-Identifier: Apache-2.0
"""`python -m seqmix` is the command `seqmix`."""

import sys

from seqmix.cli import main

if __name__ == "__main__":
    sys.exit(main())
