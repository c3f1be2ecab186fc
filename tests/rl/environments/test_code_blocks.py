"""Which block of a reply is the code: fences as CommonMark defines them."""

import pytest

from lockstep.rl.environments.code import code_in


def test_the_last_block_of_python_is_what_counts():
    assert code_in("x\n```python\na\n```\ny\n```py\nb\n```\n```text\nc\n```") == "b"
    assert code_in("<think>\n```python\na\n```\n</think>\n```\nb\n```") == "b"
    assert code_in("<think>Try:\n```python\nx=1\n```\nhmm") == ""
    assert code_in("Try:\n```python\na\n```\nhm</think>\n```python\nx = '</think>'\n```") == "x = '</think>'"
    assert code_in("```python\nM='</think>'\nx=1\n```") == "M='</think>'\nx=1"
    assert code_in("def f(): pass") == "def f(): pass"
    assert code_in("``` Python3 x\na\n```python\n\n``` \t\n```python\nunfinished") == "a\n```python"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("  ```python\n  a\n   b\n  ```", "a\n b"),
        ("   ```python\n a\n     b\n   ```", "a\n  b"),
        ("```python\r\na\r\nb\r\n```\r\n", "a\nb"),
        ("~~~py\na\n```\n~~~", "a\n```"),
        ("~~~python `x`\na\n~~~~", "a"),
        ("````python\n```\na\n```\n````", "```\na\n```"),
        ('```python title="x"\na\n```', "a"),
        ("```{.python}\na\n```\n```json\nb\n```", "a"),
        ("```python\na\n``` b\nc\n```", "a\n``` b\nc"),
        ("```a`b\n```\nc\n```", "c"),  # a back-tick in the first line: no fence
        ("1. So:\n\n   ```python\n   a\n     b\n   ```\n", "a\n  b"),
        ("* So:\n    ```python\n    a\n    ```", "a"),
        ("> ```py\n> a\n> ```\nb", "a"),
        ("<answer>\n```python\na\n```\n</answer>", "a"),
        ("```python\na\x0cb\u2028c\x85\n```", "a\x0cb\u2028c\x85"),
        ("```python\nunfinished", "unfinished"),
        ("```text\na\n```\n```python\nunfinished", "unfinished"),
        ("    ```python\n    a\n    ```", "    ```python\n    a\n    ```"),  # indented code, no fence
        ("So ```python\na", "So ```python\na"),
    ],
)
def test_a_block_is_fenced_as_commonmark_says(reply, code):
    assert code_in(reply) == code


def test_a_reply_of_nothing_but_fences_is_read_in_linear_time():
    """A pattern that looks for the end of each block anew would not come back from these."""
    assert code_in("```python\n" * 100_000) == ("```python\n" * 99_999).strip("\n")
    assert code_in("```" + "a" * 200_000 + " " * 200_000) == ""
    assert code_in("```python\n" * 100_000 + "```") == ("```python\n" * 99_999).strip("\n")
