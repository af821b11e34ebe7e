"""Stop strings: against a plain definition, and whatever the cuts between tokens."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.serve.text.stop import StopStrings

words = st.text("ab", min_size=1, max_size=4)
texts = st.lists(st.text("abc", max_size=4), max_size=12)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop that ends first, of those the longest; the text before it (or with it)."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            word = max(found, key=len)
            return (text[:end] if include else text[: end - len(word)]), word
    return text, None


def run(parts: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher, out = StopStrings(tuple(stops), include), ""
    for part in parts:
        text, found = matcher.push(part)
        out += text
        if found:
            return out, found
    return out + matcher.flush(), None


@given(texts, st.lists(words, min_size=1, max_size=4), st.booleans())
def test_stop_strings_equal_the_definition_however_the_text_is_cut(parts, stops, include):
    whole = "".join(parts)
    assert run(parts, stops, include) == reference(whole, stops, include) == run(list(whole), stops, include)


@given(texts, st.lists(words, min_size=1, max_size=4))
def test_text_is_held_back_exactly_while_it_could_become_a_stop_string(parts, stops):
    matcher, out, whole = StopStrings(tuple(stops)), "", ""
    for part in parts:
        text, found = matcher.push(part)
        if found:
            return
        out, whole = out + text, whole + part
        held = whole[len(out) :]
        could = [k for k in range(len(whole) + 1) if any(len(s) > k and s.startswith(whole[len(whole) - k :]) for s in stops)]
        assert held == whole[len(whole) - max(could, default=0) :]


def test_a_stop_string_before_min_tokens_is_ordinary_text():
    matcher = StopStrings(("STOP",))
    assert matcher.push("a STOP b", armed=False) == ("a STOP b", None)
    assert matcher.push(" c STO", armed=False) == (" c ", None)
    assert matcher.push("P", armed=True) == ("", "STOP")


HIDDEN = ("<|a|>", "<|b|>")
pieces = st.lists(st.sampled_from(["x", "y", "xy", "<|a|>", "<|b|>", "<|a"]), max_size=10)


@given(pieces, st.lists(st.sampled_from(["<|a|>", "<|b|>xy", "x<|a|>", "xy", "yx", "y<|a|>x<|b|>"]), min_size=1, max_size=3))
def test_a_stop_string_may_name_hidden_text_and_others_do_not_see_it(parts, stops):
    """Against a plain definition: two texts grow side by side, with the names and without, and each stop has its own."""
    matcher, out, found = StopStrings(tuple(stops), names=HIDDEN), "", None
    for part in parts:
        text, found = matcher.push(part, hidden=part in HIDDEN)
        out += text
        if found:
            break
    out += "" if found else matcher.flush()
    sight = [(c, part not in HIDDEN) for part in parts for c in part]
    expected = "".join(c for c, shown in sight if shown), None
    for end in range(1, len(sight) + 1):
        whole, shown = "".join(c for c, _ in sight[:end]), "".join(c for c, s in sight[:end] if s)
        hits = [s for s in stops if (whole if "<|a|>" in s or "<|b|>" in s else shown if sight[end - 1][1] else "").endswith(s)]
        if hits:
            word = max(hits, key=len)
            left = sight[: end - len(word)] if any(n in word for n in HIDDEN) else None
            expected = "".join(c for c, s in left if s) if left is not None else shown[: len(shown) - len(word)], word
            break
    assert (out, found) == expected


def test_hidden_text_goes_out_only_as_the_stop_string_that_names_it():
    matcher = StopStrings(("<|a|>!",), include=True, names=("<|a|>",))
    assert matcher.push("x") == ("x", None) and matcher.push("<|a|>", hidden=True) == ("", None)
    assert matcher.push("y") == ("y", None) and matcher.push("<|a|>", hidden=True) == ("", None)
    assert matcher.push("!?") == ("<|a|>!", "<|a|>!")
