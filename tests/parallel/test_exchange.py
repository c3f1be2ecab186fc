"""State that exchanges between ranks share."""

from lockstep.parallel.exchange import divided_rows, rows_are_whole, whole_rows


def test_contexts_of_several_threads_may_end_in_any_order():
    first, second = whole_rows(), whole_rows()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert rows_are_whole(), "the second one has not ended"
    with divided_rows():
        assert not rows_are_whole()
    assert rows_are_whole()
    second.__exit__(None, None, None)
    assert not rows_are_whole()
