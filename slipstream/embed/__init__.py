"""Models that give vectors and scores: recognized by their files, and run by one process behind the usual front end.

Such a model has no log, no cache and no decode steps, so it is not a rank: `worker` reads texts as ids and computes them in
batches through transformers' own code.
"""
