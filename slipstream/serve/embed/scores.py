"""Vectors and scores as values. Pure."""

import numpy as np


def shortened(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first `dimensions` values of each row, with length 1 again; None: the rows as they are."""
    return vectors if dimensions in (None, vectors.shape[1]) else _unit(vectors[:, :dimensions])


def cosines(vectors: np.ndarray, firsts: int) -> np.ndarray:
    """[seconds]: of each second row with its first, or with the only first. Rows: the firsts, then the seconds."""
    unit = _unit(vectors)
    return (unit[firsts:] * unit[:firsts]).sum(1)


def scores_of(results: np.ndarray, task: str, firsts: int) -> np.ndarray:
    """[seconds]: what a model of this task says of pairs of texts."""
    return results[:, 0] if task == "score" else cosines(results, firsts)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
