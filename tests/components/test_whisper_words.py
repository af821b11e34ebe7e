import numpy as np

from slipstream.components.whisper_words import begins, path, words


def test_the_cheapest_path_follows_the_diagonal_that_is_cheap():
    cost = np.ones((4, 12))
    for token, (start, stop) in enumerate([(0, 2), (2, 7), (7, 8), (8, 12)]):
        cost[token, start:stop] = 0
    assert path(cost).tolist() == [0, 2, 7, 8]


def test_the_path_is_the_cheapest_of_all():
    """Against the definition, cell by cell."""
    cost = np.random.default_rng(0).random((5, 9))
    total = np.full((6, 10), np.inf)
    total[0, 0] = 0
    for i in range(1, 6):
        for j in range(1, 10):
            total[i, j] = cost[i - 1, j - 1] + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    i, j, first = 5, 9, {}
    while i:
        first[i - 1] = j - 1
        steps = {(i - 1, j - 1): 0, (i - 1, j): 1, (i, j - 1): 2}
        i, j = min(steps, key=lambda at: (total[at], steps[at]))
    assert path(cost).tolist() == [first[k] for k in range(5)]


def test_tokens_begin_where_the_heads_turn_to_them():
    attention = np.full((2, 5, 60), 0.01, np.float32)
    # rows of the first token, of three tokens that give the next, and of the end
    for row, (start, stop) in enumerate([(0, 1), (0, 20), (20, 45), (45, 60)]):
        attention[:, row, start:stop] = 1
    assert np.abs(begins(attention, 1) - [0, 20, 45]).max() <= 4


def test_tokens_become_words_without_their_marks():
    texts = {1: " Hello", 2: ",", 3: " it", 4: "'s", 5: " “", 6: "me", 7: "”.", 8: " …"}
    text_of = lambda tokens: "".join(texts[t] for t in tokens)
    found = words(list(texts), np.arange(9) * 50, text_of)
    assert [(w.text, w.first, w.start, w.end) for w in found] == [
        ("Hello", 0, 0.0, 2.0),
        ("it's", 2, 2.0, 4.0),
        ("me", 4, 4.0, 7.0),
    ]
