"""Normalizes written answers: units, currency, thousands, mixed numbers and text as MATH and models write them.

math-verify parses most of these, but not all, and not everywhere; docs/environments.md lists the remaining ones.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
POWER_OF_TEN = re.compile(
    rf"(?:{NUMBER.pattern}\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*(?:\{{\s*[-+]?[0-9]+\s*\}}|-?[0-9]+)"
)
"""A number in scientific notation."""

TEXT = r"\\text\{[^{}]*\}"
POWER = r"(?:\s*\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9]))?"
UNIT = re.compile(
    r"(?<=[0-9A-Za-z)}\]!%])\s*(?:"
    r"\^\s*(?:\{\s*(?:\\circ|o)\s*\}|\\circ|o\b)\s*[CF]?"
    r"|\^\s*\{?\s*\\text\{\s*(?:st|nd|rd|th|o)\s*\}\s*\}?"
    rf"|(?:/|\\cdot)?\s*(?:{TEXT}|\\frac\{{\s*{TEXT}{POWER}\s*\}}\{{\s*{TEXT}{POWER}\s*\}}){POWER}"
    r")\s*\Z"
)
"""Degrees, ordinals, words with a power, quotients of words: after a value they do not change it."""
SHORT_UNITS = r"(?:cm|mm|km|kg|mg|ft|in|mi|lb|oz|hr|ml|mL|sq|m|s|g|h|l|L)\b"
NOT_UNITS = (
    r"(?:and|or|to|pi|sqrt|root|sin|cos|tan|sec|csc|cot|log|ln|exp|mod|base|plus|minus|times|divided|multiplied|over"
    r"|choose|factorial|squared|cubed|not|point|less|fewer|more|below|above|under|past|before|after"
    r"|half|halves|(?:third|quarter|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million|billion)th"
    r"|pair|dozen|hundred|thousand|lakh|crore|million|billion|trillion)s?)\b"
)
"""Words after a number that change its value."""
BARE_UNIT = re.compile(
    rf"({NUMBER.pattern}(?:/[0-9]+)?)(?:[ -](?!{NOT_UNITS})(?:{SHORT_UNITS}|[A-Za-z]{{3,}})|(?=[ck]?m\^|km/))"
    rf"(?:[A-Za-z ./-]|\^\{{?-?[0-9]\}}?)*"
)
"""A number with its unit in plain letters: "5 miles per hour", "18 cm^2"."""
CHANGED = re.compile(rf"{NUMBER.pattern}(?:/[0-9]+)?[ -]{NOT_UNITS}")
SCALED = re.compile(rf"(?<=[0-9])\s*\\text\{{\s*((?!times\b){NOT_UNITS}[^{{}}]*)\}}\s*\Z")
"""Such words as text, except for units of counting: `\\text{ times}`."""
MONEY = {
    "cents": re.compile(r"\bcents?\b|\\(?:text)?cent\b|¢"),
    "dollars": re.compile(r"\\\$|\bdollars?\b|\bUSD\b"),
    "euros": re.compile(r"\\euro\b|€|\b(?:[Ee]uros?|EUR)\b"),
    "pounds": re.compile(r"\\pounds\b|£|\bpounds?\b|\bGBP\b"),
}

REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\degree\b|°", r"^\\circ"),
        ("²", "^2"),
        ("³", "^3"),
        ("√", r"\\sqrt "),
        ("×", r"\\times "),
        ("·", r"\\cdot "),
        ("[−–]", "-"),
        (r",\s*(?:\.{3}|…)", r", \\ldots"),
        # Thousands first: elsewhere their separators are plain spaces.
        (r"(?<=[0-9])\s*(?:\{\s*,\s*\}|,\s*\\!)\s*(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<!\\)\\[()]|\A\s*(?:\\approx\b|=)", ""),
        (r"\\!|\\(?:left|right)(?![A-Za-z])\.?|\\(?:displaystyle|checkmark)\b|✓", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:mathbf|boldsymbol|bold|underline)(?=\s*\{)", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad\b|\s+", " "),
        (r"(?<![0-9.,])([0-9]{1,3}(?: [0-9]{3})+)(?![0-9/])", lambda match: match[1].replace(" ", "")),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|math(?:rm|it|sf)|mbox|emph)\s*\{", r"\\text{"),
        (r"(?:US ?)?\\?\$|[€£¥₹¢]|\\(?:pounds|euro|cent|textcent)\b|\bRs\b\.?", ""),
        (r"\\text\{\s*:\s*\}", ":"),
        (r"\\text\{\s*([ei])\s*\}", r"{\1}"),
        (rf"\\text\{{\s*({NUMBER.pattern})?\s*\}}", r"\1"),
        (r"(?<!\\)%", r"\\%"),
        (r"\\text\{\s*(?:percent(?:age)?|pct)\s*\}|\b(?:percent(?:age)?|pct)\b", r"\\%"),
        (r"\\text\{\s*infinity\s*\}|\binfinity\b", r"\\infty"),
        (r"(?<=[0-9])\\text\{\s*([AaPp]\.?[Mm]\.?)\s*\}", r" \1"),
        (r"(?<=[0-9])\s*([AaPp])\.?[Mm]\b\.?", lambda match: f" {match[1].lower()}m"),
        (r"\\[cdt]?frac\s*(\\[a-z]+)\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\varnothing\b", r"\\emptyset"),
        (r"\\c?dots\b", r"\\ldots"),
        (rf"\A\s*({NUMBER.pattern})\s*\\[pb]?mod\s*(?:\{{[^{{}}]*\}}|[0-9]+)\s*\Z", r"\1"),
        (r"\A\s*(?:\\text\{)?\s*(?i:(?:the )?(?:final )?answer(?: is\b:?|:))\s*\}?", ""),
        (r"(?<![0-9./^_])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),
        (r"\A\s*\(\s*(-?[0-9]+(?:\.[0-9]+)?)\s*\)\s*\Z", r"\1"),
        (rf"\A\s*({NUMBER.pattern})[eE]([-+]?[0-9]+)\s*\Z", r"\1\\times 10^{\2}"),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    )
]
ENDING = re.compile(r"[\\\s.,;:*`_\"]+\Z")
"""Punctuation, markdown and line breaks after an answer."""


def canonical(text: str) -> str:
    """An answer without markup and units, in LaTeX that math-verify parses."""
    for pattern, replacement in REWRITTEN:
        text = pattern.sub(replacement, text)
    text = ENDING.sub("", text.lstrip('* `_"'))
    if group := re.fullmatch(r"(?:\\text)?\{([^{}]*)\}", text):
        return canonical(group[1])
    text = SCALED.sub(r" \1", text)
    while (unit := UNIT.search(text)) and _has_value(text[: unit.start()]):
        text = text[: unit.start()]
    return text


def without_bare_unit(text: str) -> str:
    """The number in a canonical answer such as "5 miles per hour"; other answers are unchanged."""
    bare = BARE_UNIT.fullmatch(text)
    return bare[1] if bare else text


def in_other_money(answer: str, given: str) -> bool:
    """Whether both answers name currencies, but none in common."""
    first, second = ({name for name, form in MONEY.items() if form.search(text)} for text in (answer, given))
    return bool(first and second) and not first & second


def _has_value(text: str) -> bool:
    return bool(re.sub(TEXT, "", text).strip())


def same_text(answer: str, given: str) -> bool:
    """Whether two canonical answers are the same text. Case and spaces matter only in formulas."""
    return bool(answer) and _text(answer) == _text(given)


def _text(answer: str) -> str:
    answer = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)
    letters = re.sub(r"\\cdot\b|[\s*{}]", "", answer)
    if not re.search(r"[\\0-9=<>+^]", letters):
        return letters.casefold()
    return re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(answer.split()))


def choice(answer: str, long: bool = False) -> str | None:
    """The letter of a multiple-choice answer: A, (A), A. With `long`, also if its content follows: `(A) 12`."""
    match = re.match(r"(?:\\text\{)?\s*(?:\(?([A-J])[).:]\s*\}?|([A-J])\s*\Z)(.*)", answer, re.DOTALL)
    content = match[3].strip() if match else ""
    if not match or (content and not long) or re.search(r"(?<![A-Za-z])[A-J][).:]", content):
        return None
    return match[1] or match[2]
