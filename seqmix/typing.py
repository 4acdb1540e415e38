# SPDX-License-Identifier: Apache-2.0
"""Axis letters and array aliases used by every signature and docstring of seqmix.

======  ==============================================================
letter  meaning
======  ==============================================================
B       batch rows
T       time: tokens of a row (S where keys have a length of their own)
H       heads (Hq, Hk, Hv, Hkv where query, key and value heads differ)
K       key width of a head
V       value width of a head
C       tokens of a chunk
N       state size of a state-space model
P       head width of a state-space model
G       groups that share B and C of a state-space model
D       model width, or channels of an elementwise mixer
W       taps of a short convolution, or keys of a sliding window
======  ==============================================================
"""

from jaxtyping import Array, Float, Int

Queries = Float[Array, "B T Hq K"]
Keys = Float[Array, "B T Hk K"]
Values = Float[Array, "B T Hv V"]
HeadGates = Float[Array, "B T Hv"]
"""One log-decay or write strength per token and value head."""
MatrixState = Float[Array, "B H K V"]
"""State of a matrix-valued recurrence; one row per key channel."""
Channels = Float[Array, "B T D"]
SegmentIds = Int[Array, "B T"]
"""Document of each token; 0 is padding, a change of id starts a new document."""
