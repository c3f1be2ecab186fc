"""Growing text: whatever the tokens and stop strings, what is shown is the whole text up to the first stop string."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import ByteTokenizer
from lockstep.generate.server.text import GrowingText

ALPHABET = "ab¢😀"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    text=st.text(ALPHABET, min_size=1, max_size=30),
    cut=st.integers(0, 3),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
)
def test_shown_text_is_the_text_before_the_first_stop_string(text, cut, stops):
    data = text.encode()
    data = data[: max(1, len(data) - cut)]  # the end may be within a character
    whole = data.decode(errors="replace")
    found = [at for at in map(whole.find, stops) if at >= 0]
    expected = whole[: min(found)] if found else whole
    growing, shown = GrowingText(ByteTokenizer(), stops, ()), ""
    for position, byte in enumerate(data):
        shown += growing.push(byte, position == len(data) - 1)
        assert expected.startswith(shown)
        if growing.stopped:
            break
    assert shown == expected and growing.stopped == bool(found)


def test_a_token_that_ends_the_text_has_no_text_of_its_own():
    growing = GrowingText(ByteTokenizer(), (), {ord("!")})
    assert growing.push(ord("!"), False) + growing.push(ord("a"), False) + growing.push(ord("!"), True) == "!a"
