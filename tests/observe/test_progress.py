"""Progress without a terminal: lines now and then, and one at the end."""

from lockstep.observe import Progress


def test_the_end_is_printed_once_however_often_it_is_reached(capsys):
    with Progress("tokenize", 3) as progress:
        for _ in range(3):
            progress.advance()
        for _ in range(20):
            progress.advance(0)
    assert capsys.readouterr().out == "tokenize: 100%, 0 s left  \n"
