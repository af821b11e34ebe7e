"""Embeddings, scores and reranking: their bodies, and their way to an encoder's process."""
