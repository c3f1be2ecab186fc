"""Growing text: whatever the tokens and stop strings, what is shown is the whole text up to the first stop string."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import ByteTokenizer, StreamDecoder
from lockstep.generate.server.text import GrowingText, StopString

ALPHABET = "ab¢😀"
# Of few letters and many: matches that are given up within a match, and characters of several bytes.
BEGUN_AGAIN = st.tuples(
    st.text("ab", min_size=8, max_size=40), st.lists(st.text("ab", min_size=3, max_size=6), min_size=1, max_size=2)
)
ANY = st.tuples(
    st.text(ALPHABET, min_size=1, max_size=30), st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)
)


@settings(max_examples=80)
@given(
    text_and_stops=BEGUN_AGAIN | ANY,
    cut=st.integers(0, 3),
)
def test_shown_text_is_the_text_before_the_first_stop_string(text_and_stops, cut):
    text, stops = text_and_stops
    data = text.encode()
    data = data[: max(1, len(data) - cut)]  # the end may be within a character
    whole = data.decode(errors="replace")
    # The one that ends first; of several that end with the same character the longest.
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stops))]
    found = [whole[: min(ends)].find(stop) for stop in stops if stop in whole[: min(ends)]] if ends else []
    expected = whole[: min(found)] if found else whole
    growing, shown = GrowingText(StreamDecoder(ByteTokenizer()), [StopString(stop) for stop in stops], ()), ""
    for position, byte in enumerate(data):
        shown += growing.push(byte, position == len(data) - 1)
        assert expected.startswith(shown)
        if growing.stopped:
            break
    assert shown == expected and growing.stopped == bool(found)


class Counting(str):
    looked = 0

    def __getitem__(self, index):
        Counting.looked += 1
        return super().__getitem__(index)


def test_the_work_for_a_stop_string_does_not_grow_with_its_length():
    growing = GrowingText(StreamDecoder(ByteTokenizer()), [StopString(Counting("a" * 255 + "z"))], ())
    Counting.looked = 0
    assert "".join(growing.push(ord("a"), False) for _ in range(1000)) == "a" * 745
    assert Counting.looked <= 4 * 1000


def test_a_token_that_ends_the_text_has_no_text_of_its_own():
    growing = GrowingText(StreamDecoder(ByteTokenizer()), (), {ord("!")})
    assert growing.push(ord("!"), False) + growing.push(ord("a"), False) + growing.push(ord("!"), True) == "!a"
