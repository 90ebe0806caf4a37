"""Sums: addition and subtraction up to two digits, the times tables and their divisions.

The answer restates the sum, "12 + 7 = 19": the last number is the result, and whatever the question's wording, the
model computes it in one place. Asked for the number alone it does the same, because what it does not write out first
a model of this size gets wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models.demo.dialogue import Check, Document, Example, Message, ask, is_held_out
from models.demo.wording import pick, rough, words

BEYOND = "That is beyond me: I am a small demo model, and I only do sums with numbers up to 99."

QUESTIONS = {
    "+": (
        "What is {a} + {b}?", "{a} + {b}", "{a} + {b} =", "{a}+{b}", "{a}+{b}=", "{a} + {b}?", "{a}+{b}=?",
        "Calculate {a} plus {b}.", "What's {a} plus {b}?", "what is {a}+{b}", "Compute {a}+{b}",
        "How much is {a} and {b}?", "Please add {a} and {b}.", "Add {b} to {a}.", "{a} plus {b}",
        "What is the sum of {a} and {b}?", "Add {a} and {b}", "How much is {a} + {b}?", "Can you add {a} and {b}?",
        "{a} and {b} together make?", "Sum {a} and {b}.", "Tell me {a} plus {b}.",
        "What do you get if you add {a} and {b}?", "Solve {a} + {b}.", "What does {a} + {b} equal?",
        "I have {a} apples and get {b} more. How many do I have?", "{a} + {b} equals what?",
        "What is {a} added to {b}?",
        "how many is {a} plus {b}", "Find {a} + {b}.", "If I have {a} coins and find {b} more, how many coins do I "
        "have?",
    ),
    "-": (
        "What is {a} - {b}?", "{a} - {b}", "{a} - {b} =", "{a}-{b}", "{a}-{b}=", "{a} - {b}?", "{a}-{b}=?",
        "Calculate {a} minus {b}.", "What's {a} minus {b}?", "what is {a}-{b}", "Compute {a}-{b}",
        "Subtract {b} from {a}.", "Take {b} away from {a}.", "What is {a} take away {b}?", "{a} minus {b}",
        "How much is {a} minus {b}?", "What is {a} less {b}?", "Please subtract {b} from {a}.",
        "Tell me {a} minus {b}.", "Solve {a} - {b}.", "What is the difference between {a} and {b}?",
        "Can you work out {a} - {b}?", "What does {a} - {b} equal?",
        "I have {a} apples and give away {b}. How many are left?", "{a} - {b} equals what?", "How much is {a} - {b}?",
        "What is left if I take {b} from {a}?", "Find {a} - {b}.", "how many is {a} minus {b}",
    ),
    "*": (
        "What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} * {b} =", "What is {a} times {b}?",
        "{a} times {b}", "Multiply {a} by {b}.", "Calculate {a} times {b}.", "How much is {a} times {b}?",
        "What's {a} x {b}?", "what is {a}*{b}", "Compute {a} * {b}", "What is the product of {a} and {b}?",
    ),
    "/": (
        "What is {a} / {b}?", "{a} / {b}", "{a}/{b}", "{a} / {b} =", "What is {a} divided by {b}?",
        "Divide {a} by {b}.", "Calculate {a} divided by {b}.", "How much is {a} over {b}?", "Compute {a}/{b}",
        "{a} divided by {b}",
    ),
}  # fmt: skip
NUMBER_WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")
ONLY_THE_NUMBER = (
    "Answer with just the number.", "Reply with only the number.", "Just the number, please.", "Give only the result.",
    "Number only.", "Only output the number.",
)  # fmt: skip
FOLLOW_UPS = (
    ("+", "And if you add {b}?"), ("+", "Now add {b}."), ("+", "plus {b}?"), ("+", "Add {b} to that."),
    ("-", "Now subtract {b}."), ("-", "minus {b}?"), ("-", "And take away {b}?"), ("-", "Subtract {b} from that."),
)  # fmt: skip
_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


@dataclass(frozen=True, slots=True)
class Sum:
    a: int
    operator: str
    b: int

    @property
    def result(self) -> int:
        return _APPLY[self.operator](self.a, self.b)

    @property
    def key(self) -> str:
        """One key for 7 + 12 and 12 + 7, so that neither gives the other away; small and table sums are all taught."""
        if self.operator in "*/" or max(self.a, self.b) < 10:
            return "sum:taught"
        low, high = sorted((self.a, self.b))
        return f"sum:{low}+{high}" if self.operator == "+" else f"sum:{self.a}-{self.b}"

    def __str__(self) -> str:
        return f"{self.a} {self.operator} {self.b} = {self.result}"

    def question(self, rng: Random) -> str:
        a, b = str(self.a), str(self.b)
        if max(self.a, self.b) < len(NUMBER_WORDS) and rng.random() < 0.3:
            a, b = NUMBER_WORDS[self.a], NUMBER_WORDS[self.b]
        return pick(rng, QUESTIONS[self.operator]).format(a=a, b=b)


def random_sum(rng: Random, operators: str = "++---") -> Sum:
    operator = pick(rng, operators)
    if operator == "*":
        return Sum(rng.randrange(13), "*", rng.randrange(13))
    if operator == "/":
        divisor = rng.randrange(1, 13)
        return Sum(divisor * rng.randrange(13), "/", divisor)
    small = rng.random() < 0.25
    return Sum(_operand(rng, small), operator, _operand(rng, small and rng.random() < 0.6))


def _operand(rng: Random, small: bool) -> int:
    return rng.randrange(13 if small else 100)


def arithmetic(rng: Random) -> Example:
    sum_ = random_sum(rng, "++++-----*/" if rng.random() < 0.4 else "++---")
    category = "times and division" if sum_.operator in "*/" else "addition and subtraction"
    question = rough(rng, sum_.question(rng))
    if rng.random() < 0.12:
        question = f"{question} {pick(rng, ONLY_THE_NUMBER)}"
    return ask(category, question, str(sum_), keys=(sum_.key,), check=Check.CONTAINS, needle=f"= {sum_.result}")


def follow_up(rng: Random) -> Example:
    """A sum, then another that starts from its result."""
    first = random_sum(rng)
    operator, wording = pick(rng, FOLLOW_UPS)
    second = Sum(first.result, operator, rng.randrange(1, 30))
    if not 0 <= second.a <= 99:
        return follow_up(rng)
    turns = (
        Message("user", rough(rng, first.question(rng))),
        Message("assistant", str(first)),
        Message("user", rough(rng, wording.format(b=second.b))),
        Message("assistant", str(second)),
    )
    keys = (first.key, second.key)
    return Example("arithmetic follow-up", keys, turns, Check.CONTAINS, f"= {second.result}")


def too_large(rng: Random) -> Example:
    """Sums out of range are declined rather than guessed."""
    operator = pick(rng, "+-*")
    a, b = rng.randrange(100, 10 ** rng.randrange(3, 7)), rng.randrange(1, 10 ** rng.randrange(1, 6))
    if rng.random() < 0.5:
        a, b = b, a
    question = rough(rng, Sum(a, operator, b).question(rng))
    return ask("outside its world", question, BEYOND, keys=(f"large:{a}{operator}{b}",))


def single_sum_text(rng: Random) -> Document:
    sum_ = random_sum(rng, "++++-----*/")
    left, right = str(sum_).split("=")
    if rng.random() < 0.4:
        left = left.replace(" ", "")
    return Document("text completion", (sum_.key,), ((f"{left}=", False), (right, True)))


def drill_sheet(rng: Random) -> Document:
    """Many taught sums a document: the cheapest way to practise, since only the results are learned."""
    drawn = [random_sum(rng) for _ in range(rng.randrange(8, 20))]
    sums = [sum_ for sum_ in drawn if not is_held_out((sum_.key,))]
    pieces: list[tuple[str, bool]] = [("Sums:\n", False)]
    for sum_ in sums:
        left, right = str(sum_).split("=")
        pieces += [(f"{left}=", False), (f"{right}\n", True)]
    return Document("drill", tuple(sum_.key for sum_ in sums), tuple(pieces))
