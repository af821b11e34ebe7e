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
