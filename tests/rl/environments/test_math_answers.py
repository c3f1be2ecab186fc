"""Answers in the forms of MATH, GSM8K, AIME and of models' replies: ours, math-verify's and the right verdict."""

import logging

import pytest

from lockstep.rl.environments.math_jsonl import Math, final_answer, is_right, last_boxed
from lockstep.rl.environments.protocol import Example
from tests.rl.conversations.scripted import converse

# The data's answer, the same in another form, and another answer.
WRITTEN = [line.split("  |  ") for line in r"""
12  |  x = 12\text{ cm}  |  13
073  |  73  |  74
540  |  **540**  |  **541**
90  |  90^\circ  |  91^\circ
90^\circ  |  90 degrees  |  80
5  |  5^{\text{th}}  |  6\text{th}
12\text{ cm}^2  |  \(12\)  |  11
204  |  the answer is 204  |  the answer is 205
2  |  \displaystyle 2\text{ square units}  |  3
12  |  12.0  |  12.1
2  |  \mathbf{2}  |  \mathbf{3}
73  |  73 \checkmark  |  74 \checkmark
12 km/h  |  12  |  22
12  |  12\text{ km} \cdot \text{h}^{-1}  |  13
1234  |  1,234  |  1,235
10,000  |  10{,}000  |  11{,}000
1,234,567  |  1\,234\,567  |  1,234,568
58500  |  €58 500  |  58,501
123{,}456  |  123456.00  |  124456
\$1,000  |  1000  |  2000
1000  |  N = 1,\!000\text{ apples}  |  2000
18  |  \$18.00  |  \$19.00
32.35  |  32.35 USD  |  33.35 USD
\$1.5  |  \text{\$}1.50  |  2.50
0.75\text{ dollars}  |  $0.75  |  $1.75
28\%  |  28 percent  |  29 percent
50  |  50\text{ pct}  |  51\%
12.5\%  |  12.5  |  13.5
1/2  |  \dfrac{1}{2}  |  \frac{9}{14}
\frac{17}{8}  |  2 1/8  |  3 1/8
\frac{-2}{5}  |  -\frac25  |  \frac25
9/4  |  2\frac{1}{4}  |  2.5
3/4  |  .750  |  .85
3 \times 10^{8}  |  3e8  |  4e8
1500  |  1.5 × 10^{3}  |  2.5 × 10^{3}
6.02 \times 10^{23}  |  6.02 \cdot 10^{23}\text{ m}  |  7.02E+23
\text{Tuesday}  |  TUESDAY.  |  Monday
no solution  |  \textbf{no solution}  |  5
C  |  \text{(C)}  |  (D)
(B)  |  \textbf{(B)}\ 12  |  C) 12
A  |  A) 12  |  \textit{B}
1,000,000  |  10^6  |  10^5
2\sqrt{3}  |  2\sqrt 3  |  2\sqrt 2
2\sqrt{3}\text{ cm}  |  \sqrt{12}  |  \sqrt{18}
2\sqrt{3}  |  2√3  |  3√2
12\pi  |  12 \pi  |  13 \pi
\frac{\pi}{4}  |  \pi/4  |  4/\pi
e^{2}  |  \mathrm{e}^2  |  \mathrm{e}^3
3+2i  |  2i+3  |  3-2i
\infty  |  +\infty  |  -\infty
\emptyset  |  \varnothing  |  0
2^{10}  |  1024  |  1025
1 \pm \sqrt{19}  |  1+\sqrt{19}, 1-\sqrt{19}  |  1+\sqrt{19}
\pm 2  |  2, -2  |  2
-5  |  −5  |  5
(3, \frac{\pi}{2})  |  (3,\frac\pi2)  |  (3,\frac2\pi)
\text{9:30 a.m.}  |  9\text{:}30\text{ AM}  |  9:31
\frac{3}{5}  |  {3 \over 5}  |  {5 \over 3}
\frac{3}{8}  |  \frac{3}{8} \approx 0.375  |  \frac{8}{3}
3  |  3 \bmod 5  |  5
2.5  |  2,5  |  2,6
[2,3)  |  \left[2, 3\right)  |  [2,3]
[2,3]  |  x\in[2,3]  |  x\in(2,3)
x<3  |  (-\infty,3)  |  (3,\infty)
2\le x<3  |  [2,3)  |  (2,3)
(-\infty,3)\cup(5,\infty)  |  (5,\infty) \cup (-\infty, 3)  |  (-\infty, 3)
\{1,2\}  |  \{2, 1\}  |  \{1, 3\}
1, 2  |  1 \text{ and } 2  |  1 \text{ and } 3
1,2  |  x=1, x=2  |  x=1
1,2  |  x = 1 \text{ or } x = 2  |  x = 1 \text{ or } x = 3
x \in \{1, 2\}  |  1, 2  |  1, 3
60^\circ, 120^\circ  |  120, 60  |  60
(1,2)  |  (x, y) = (1, 2)  |  (x, y) = (2, 1)
(1,2),(3,4)  |  (3,4), (1,2)  |  (1,2)
2  |  x=2  |  1, 2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}  |  \begin{bmatrix}1&2\\3&4\end{bmatrix}  |  -2
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  |  \left(\begin{array}{c} 1 \\ 2 \end{array}\right)  |  (2,1)
x^2+2x+1  |  (x+1)^2  |  (x+2)^2
\frac{x+2}{7}  |  \frac{x}{7}+\frac{2}{7}  |  \frac{x}{7}+2
y=2x+3  |  y = 3 + 2x  |  y = 3 - 2x
y=2x+3  |  2x+3  |  2x
5x  |  x \cdot 5  |  5
t+1  |  1 + t  |  1
12xyz  |  12 xyz  |  12 xy
x^2+y^2=4  |  x^2 + y^2 - 4 = 0  |  x^2 + y^2 = 2
\sin^2 x  |  1-\cos^2 x  |  \cos^2 x
\log_2 3  |  \frac{\ln 3}{\ln 2}  |  \frac{\ln 2}{\ln 3}
101_2  |  101_{2}  |  110_2
2:3  |  \frac{2}{3}  |  \frac{3}{2}
10\text{:}30  |  10:30  |  10:31
11 \pmod{13}  |  11  |  13
100!  |  100!  |  99!
1591  |  37 \times 43 = 1591  |  37 \times 43 = 1590
5  |  \left(5\right)  |  .5
7  |  \textcolor{red}{7}  |  \textcolor{red}{8}
1,2,\ldots,10  |  1,2,\dots,10  |  1,2,\dots,11
""".strip().split("\n")]  # fmt: skip
STRICTER = [line.split("  |  ") for line in r"""
1591  |  37*43
1024  |  2^{10}
120  |  5!
10  |  \binom{5}{2}
3.5  |  3+\frac12
1591  |  1590 = 37*43
3t  |  3
\frac{1}{2}h  |  \frac{1}{2}
saw  |  was
AB  |  BA
\frac{1}{2^{99}}  |  \frac{1}{2^{98}}
5  |  5\text{ dozen}
""".strip().split("\n")]  # fmt: skip
"""Where math-verify says right and we say wrong, for the reasons in docs/environments.md."""


def math_verifys(gold, given):
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    wanted, found = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, given))
    return bool(wanted and found and verify(wanted, found, timeout_seconds=None))


def test_answers_in_real_forms_are_graded_as_they_are():
    for gold, right, other in WRITTEN:
        assert is_right(gold, right) and not is_right(gold, other), (gold, right, other)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_math_verify_is_no_less_strict_but_for_a_reason(every):
    for gold, _, other in WRITTEN[::every]:
        assert not math_verifys(gold, other), (gold, other)
    for gold, given in STRICTER[::every]:
        assert not is_right(gold, given) and math_verifys(gold, given), (gold, given)


def test_words_that_change_a_number_are_no_units():
    words = "million", "hundreds", "dozens", "lakh", "tenths", "quarters", "pairs", "fewer", "more", "less than x"
    for word in (*words, "divided by two", "base six", "not", "squared", "root two", "point two"):
        assert not is_right("5", f"5 {word}") and not is_right("5", f"5\\text{{ {word}}}"), word
    assert is_right("5", "5 lots") and is_right("5", "5\\text{ lots}")


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("2", "1, 2, 3", False),
        ("saw", "was", False),  # the same letters: to math-verify, the same product
        ("8", "2^{3}\\text{ m}", False),
        ("5", "\ud800", False),
        ("5", "x" * 250, False),
        ("2", "2\\text{ or }3\\text{ cm}", False),  # math-verify drops all from the first words on
        ("2", "x=1, x=2", False),
        ("1.234", "1,234", False),
        ("1591", "37 \\times 43", False),  # the problem, restated
        ("1591", "1590 = 37*43", False),
        ("A", "A) 1 B) 2 C) 3", False),
        ("D", "\\text{(A) and (D)}", False),
        ("5 miles per hour", "x = 5 km/h", True),  # units are not compared
        ("33\\frac13\\%", "\\frac{100}{3}\\%", True),
        ("12.5\\%", "0.125", True),
        ("0.25", "25\\%", True),
        ("1/4", "25%", True),
        *((wanted, f"{wanted}%", False) for wanted in ("0.25", "1/4", "\\frac14", "\\frac{1}{10}", ".1")),
        ("10,200", "(10,200)", False),
        ("1, 2", "1, 2, ...", False),
        ("5 cents", "5 dollars", False),
        ("\\$5", "5\\text{ cents}", False),
        ("5 dollars", "\\$5", True),
        ("5\\text{ million}", "5 million", True),
        ("5", "\\text{Rs. } 5", True),
    ],
)
def test_answers_are_compared_by_what_they_mean(answer, given, right):
    assert is_right(answer, given) == right


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so it is $\\boxed 2$.", "2"),
        ("Our answer is $\\boxed 12$, as above", "12"),
        ("is \\boxed 7.\nThat is all.", "7"),
        ("\\boxed\n{3}", "3"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{2", None),
        ("\\boxedx", None),
        ("so \\fbox{2}.", "2"),
        ("\\boxed{2} is \\fbox{sure}", "2"),  # as MATH's own code: a frame counts only without a box
        ("\\boxed{\\boxed{2}}", "2"),
        ("$x=\\boxed{1}$ or $x=\\boxed{2}$", "1, 2"),
        ("\\boxed{1}, \\boxed{2}, and \\boxed{3}", "1, 2, 3"),
        ("\\boxed{1} and \\frac{1}{2}, \\boxed{2}", "2"),
        ("\\boxed{3} no: \\boxed{2}", "2"),
        ("\\boxed{2} and \\boxed{", None),
        ("", None),
    ],
)
def test_boxes_are_read_in_the_forms_of_solutions_and_those_of_one_answer_together(text, content):
    assert last_boxed(text) == content
    assert final_answer(text) == (content or text.strip())
    assert Math().reward(Example("q", content or "2"), text) == {"correct": float(content is not None)}


def test_the_answer_of_a_solution_is_found_and_reasoning_has_none():
    assert final_answer("2+2 = 4\n#### 1,004") == "1,004"
    assert final_answer("$7$") == "7"
    for reply in ("<think>\\boxed{2}</think> I do not know.", "<think>Try \\boxed{2}? Let me"):
        assert converse(Math(), Example("1+1?", "2"), reply)[0] == {"correct": 0.0}


def test_a_reply_of_nothing_but_boxes_is_read_in_linear_time():
    assert len(last_boxed("\\boxed{1}," * 100_000)) == 1
    assert last_boxed("\\boxed{" * 100_000) is None
