# SPDX-License-Identifier: Apache-2.0
"""Initial state matrices of structured state spaces: HiPPO-LegS and its diagonal relatives.

Sources: HiPPO (arXiv 2008.07669), S4 (arXiv 2111.00396), S4D (arXiv 2206.11893), as
`models/hippo` and `models/s4` of state-spaces/s4 compute them. N is the number of real states; a
diagonal form holds one of each conjugate pair, N/2 poles.
"""

from typing import Literal

import numpy as np

Diagonal = Literal["legs", "lin", "inv", "real"]


def legs(size: int) -> tuple[np.ndarray, np.ndarray]:
    """HiPPO-LegS: x' = A x + B u holds u's coefficients of scaled Legendre polynomials.

    Args:
      size: N >= 1.

    Returns:
      A [N, N] (-sqrt((2n+1)(2k+1)) below the diagonal, -(n+1) on it), B [N] = sqrt(2n+1); float64.
    """
    _positive("legs", size)
    n = np.arange(size)
    root = np.sqrt(2 * n + 1)
    return -np.tril(np.outer(root, root), -1) - np.diag(n + 1.0), root


def legs_dplr(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """HiPPO-LegS as diagonal minus rank one: A = V (diag(poles) - P P^*) V^*, V unitary.

    A + p p^T with p = sqrt(n + 1/2) is -1/2 plus a skew-symmetric matrix, so its eigenvectors are
    orthonormal.

    Args:
      size: N, even.

    Returns:
      poles, P = V^* p, B = V^* sqrt(2n+1): complex128 [N/2], those with positive imaginary part,
      in ascending order of it.

    Raises:
      ValueError: N is odd or below 2.
    """
    _even("legs_dplr", size)
    A, B = legs(size)
    p = np.sqrt(np.arange(size) + 0.5)
    skew = A + np.outer(p, p) + 0.5 * np.eye(size)
    # i times a skew-symmetric matrix is Hermitian: eigenvalues of A are -1/2 - i w.
    w, V = np.linalg.eigh(1j * skew)
    w, V = w[: size // 2][::-1], V[:, : size // 2][:, ::-1]
    return -0.5 - 1j * w, V.conj().T @ p, V.conj().T @ B


def diagonal(kind: Diagonal, size: int) -> np.ndarray:
    """Poles of S4D.

    Args:
      kind: 'legs' (the normal part of HiPPO-LegS), 'lin' (-1/2 + i pi n), 'inv'
        (-1/2 + i N/pi (N/(2n+1) - 1)), 'real' (-(n+1)).
      size: N, even.

    Returns:
      complex128 [N/2].

    Raises:
      ValueError: an unknown kind, or N odd or below 2.
    """
    _even("diagonal", size)
    n = np.arange(size // 2)
    if kind == "legs":
        return legs_dplr(size)[0]
    if kind == "lin":
        return -0.5 + 1j * np.pi * n
    if kind == "inv":
        return -0.5 + 1j * size / np.pi * (size / (2 * n + 1) - 1)
    if kind == "real":
        return -(n + 1.0) + 0j
    raise ValueError(f"diagonal: kind must be 'legs', 'lin', 'inv' or 'real', got {kind!r}")


def _positive(name: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"{name}: size must be >= 1, got {size}")


def _even(name: str, size: int) -> None:
    if size < 2 or size % 2:
        raise ValueError(f"{name}: size N must be even and >= 2, got {size}")
