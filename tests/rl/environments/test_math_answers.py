"""Answers drawn in the forms of MATH, GSM8K, AIME and of models' replies: ours, math-verify's and the right verdict."""

import logging
import random
from fractions import Fraction

import pytest

from lockstep.rl.environments.math_jsonl import Math, final_answer, is_right, last_boxed
from lockstep.rl.environments.protocol import Example
from tests.rl.conversations.scripted import converse

SEED = 53

# Where math-verify says right and we say wrong: the rows of the table in docs/environments.md.
STRICTER = {"expression", "variable", "letters", "tiny"}


def column(text: str) -> list[str]:
    return text.strip("\n").split("\n")


UNITS = column(r"""
\text{ cm}
\text{ cm}^2
\text{ m}^{3}
 \text{ square units}
\ \text{meters}
\text{ apples}
 dollars
 cm
 km/h
 \text{ km} \cdot \text{h}^{-1}
\text{ cm}²
 cm³
""")
DEGREES = ["^\\circ", "^{\\circ}", "°", "\\degree", " degrees", "\\text{ degrees}", "^\\circ\\text{C}"]
ORDINALS = ["\\text{th}", "^{\\text{th}}"]
DOLLARS = ["\\$NUMBER", "$NUMBER", "\\text{\\$}NUMBER", "NUMBER\\text{ dollars}", "NUMBER USD"]
MONEY = [*DOLLARS[:2], "€NUMBER", "£NUMBER", *DOLLARS[2:]]
AROUND = column(r"""
NUMBER
NUMBER.
 NUMBER 
$NUMBER$
\(NUMBER\)
x=NUMBER
x = NUMBER
\displaystyle NUMBER
**NUMBER**
`NUMBER`
NUMBER \checkmark
NUMBER\\
the answer is NUMBER
\approx NUMBER
""")
SEPARATORS = (",", "{,}", "\\,", " ", "\\ ", "~", ",\\!", " {,} ", "")
PERCENT = ("\\%", "%", " \\%", " percent", "\\text{ percent}", "\\text{ pct}")
WORDS = column(r"""
WORD
\text{WORD}
\textbf{WORD}
\mathrm{WORD}
\textit{WORD}
WORD.
\text{WORD.}
""")
LETTERS = [
    *WORDS,
    *column(r"""
(WORD)
\text{(WORD)}
\textbf{(WORD)}
\textbf{(WORD)}\ 12
WORD) 12
"""),
]


def integer(draw, wrong):
    number = draw.choice((0, 2, 5, 12, 73, 90, 204, 540, 999))
    gold = draw.choice(
        (f"{number}", f"{number:03}", f"x={number}", f"{number}{draw.choice(UNITS)}", f"{number}^\\circ")
    )
    given = str(number + wrong * draw.choice((1, 10, -1000)))
    plain = draw.choice(("{}", "{}.0", "\\text{{{}}}", "\\mathbf{{{}}}")).format(given)
    said = draw.choice((plain, given + draw.choice(UNITS + DEGREES + ORDINALS)))
    return gold, draw.choice(AROUND).replace("NUMBER", said)


def thousands(draw, wrong):
    number = draw.choice((1000, 1234, 10_000, 58_500, 123_456, 1_000_000, 1_234_567))
    gold = draw.choice((f"{number}", f"{number:,}", f"{number:,}".replace(",", "{,}"), f"\\${number:,}"))
    said = f"{number + wrong * draw.choice((1, 1000)):,}".replace(",", draw.choice(SEPARATORS))
    form = draw.choice(("NUMBER", "N = NUMBER", *MONEY[: 4 if gold[:1].isdigit() else 2]))
    return gold, form.replace("NUMBER", said) + draw.choice(("", "", ".", ".00", *UNITS))


def money(draw, wrong):
    number = draw.choice((5, 18, 32.35, 1.5, 0.75))
    gold = draw.choice(("{}", "\\${}", "{}\\text{{ dollars}}"))
    said = draw.choice(MONEY if gold == "{}" else DOLLARS).replace("NUMBER", f"{number + wrong:.2f}")
    return gold.format(number), said


def percent(draw, wrong):
    number = draw.choice((5, 28, 50, 12.5))
    return f"{number}" + draw.choice(("\\%", "")), f"{number + wrong}" + draw.choice(PERCENT)


def fraction(draw, wrong):
    value = draw.choice((Fraction(1, 2), Fraction(3, 4), Fraction(17, 8), Fraction(-2, 5), Fraction(9, 4)))
    said = value + wrong * draw.choice((1, Fraction(1, 7)))
    top, bottom, sign = abs(said.numerator), said.denominator, "-" * (said < 0)
    forms = ["SIGN\\frac{TOP}{BOTTOM}", "SIGN\\dfrac{TOP}{BOTTOM}", "\\tfrac{SIGNTOP}{BOTTOM}", "SIGNTOP/BOTTOM"]
    if max(top, bottom) < 10:
        forms.append("SIGN\\fracTOPBOTTOM")
    if bottom in (2, 4, 5, 8):
        forms += [f"{float(said)}", f"{float(said)}0", f"{float(said)}".replace("0.", ".")]
    if top > bottom > 1 and not sign:
        forms += [f"{top // bottom}{space}{top % bottom}/{bottom}" for space in (" ", "\\ ")]
        forms += [f"{top // bottom}{space}\\frac{{{top % bottom}}}{{{bottom}}}" for space in ("", " ")]
    form = draw.choice(forms).replace("SIGN", sign).replace("TOP", str(top)).replace("BOTTOM", str(bottom))
    return draw.choice((f"{value}", f"\\frac{{{value.numerator}}}{{{value.denominator}}}")), form


def scientific(draw, wrong):
    digits, power = draw.choice((1.5, 3, 6.02)), draw.choice((3, 8, 23, -3))
    gold = f"{digits} \\times 10^{{{power}}}"
    if abs(power) == 3:
        gold = draw.choice((gold, f"{digits * 10**power:.6g}"))
    powers = [f"10^{{{power}}}", f"10^{{{power}}}\\text{{ m}}"]
    forms = [f"DIGITS{times}{draw.choice(powers)}" for times in ("\\times ", " \\times ", " \\cdot ", " × ", " x ")]
    return gold, draw.choice((*forms, f"DIGITSe{power}", f"DIGITSE{power:+}")).replace("DIGITS", str(digits + wrong))


def word(draw, wrong):
    gold = draw.choice(("Tuesday", "Evelyn", "no solution", "even", "ellipse"))
    said = draw.choice(("Monday", "x", "5", gold[1:])) if wrong else draw.choice((gold, gold.upper()))
    return draw.choice(WORDS[:2]).replace("WORD", gold), draw.choice(WORDS).replace("WORD", said)


def letter(draw, wrong):
    gold = draw.choice("ABCD")
    said = chr(ord(gold) + wrong)
    return draw.choice(LETTERS[:10]).replace("WORD", gold), draw.choice(LETTERS).replace("WORD", said)


WRITTEN = [line.split("  |  ") for line in column(r"""
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
""")]  # fmt: skip


def written(draw, wrong):
    gold, right, other = draw.choice(WRITTEN)
    return gold, other if wrong else right


def expression(draw, wrong):
    """Of a number, only the number counts: an expression restates the problem."""
    numbers = "1591  37*43", "1024  2^{10}", "120  5!", "10  \\binom{5}{2}", "3.5  3+\\frac12", "1591  1590 = 37*43"
    return draw.choice(numbers).split("  ")


def variable(draw, wrong):
    """math-verify takes a last letter such as t for a unit."""
    said = draw.choice(("3", "2+3", "\\frac{1}{2}"))
    return said + draw.choice("cdghlmst"), said


def letters(draw, wrong):
    """To math-verify a word is a product of its letters."""
    return draw.choice((("saw", "was"), ("no", "on"), ("AB", "BA"), ("ABC", "\\text{CBA}"), ("even", "\\text{neve}")))


def tiny(draw, wrong):
    """Below the sixth decimal math-verify sees zeros."""
    return draw.choice((("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"), ("1.2\\times 10^{-9}", "1.3 \\times 10^{-9}")))


KINDS = [integer, thousands, money, percent, fraction, scientific, word, letter, expression, variable, letters, tiny]


def pairs(seed: int, count: int):
    """(kind, gold, answer, whether it is right), all different."""
    draw, drawn = random.Random(seed), {}
    while len(drawn) < count:
        kind, wrong = draw.choice((written, draw.choice(KINDS))), draw.random() < 0.4
        gold, given = kind(draw, wrong)
        drawn[gold, given] = (kind.__name__, gold, given, not wrong and kind.__name__ not in STRICTER)
    return list(drawn.values())


def math_verifys(gold: str, given: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    wanted, found = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, given))
    return bool(wanted and found and verify(wanted, found, timeout_seconds=None))


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_answers_in_real_forms_are_graded_as_they_are_and_no_stricter_than_math_verify_but_for_a_reason(count):
    unlike, stricter = [], []
    for kind, gold, given, right in pairs(SEED, count):
        ours = is_right(gold, given)
        if ours != right:
            unlike.append((kind, gold, given, right))
        if not ours and kind not in STRICTER and math_verifys(gold, given):
            stricter.append((kind, gold, given))
    assert not unlike and not stricter


def test_words_that_change_a_number_are_no_units():
    words = "million", "hundreds", "dozens", "lakh", "tenths", "quarters", "pairs", "fewer", "more", "less than x"
    for word in (*words, "divided by two", "base six", "not", "squared", "root two", "point two"):
        assert not is_right("5", f"5 {word}") and not is_right("5", f"5\\text{{ {word}}}"), word
    assert is_right("5", "5 lots") and is_right("5", "5\\text{ lots}")


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("2", "x = 2", True),
        ("0.5", "\\frac{1}{2}", True),
        ("1,000", "1000", True),
        ("5 \\text{ cm}", "5", True),
        ("Monday", "\\text{Monday}", True),
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
        ("3.5", "3 1/2", True),
        ("x \\in \\{1, 2\\}", "1, 2", True),
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
