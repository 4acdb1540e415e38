# SPDX-License-Identifier: Apache-2.0
"""The settings of the checkpoints that `hf_fixtures.py` writes, by family and case.

Values go to the family's configuration in `transformers`; ``dtype`` (of the stored weights, by
default bfloat16) and ``sharded`` are the tool's own.
"""

from hf_fixture_cases import linear, others, recurrent

CASES: dict[str, dict[str, dict]] = recurrent.CASES | linear.CASES | others.CASES
