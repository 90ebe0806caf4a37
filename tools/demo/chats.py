"""Chats and raw texts: sums, facts of the small world, small talk, and answers long enough to watch them stream.

The answer to a sum restates it, "12 + 7 = 19": the last number is the result, so the model computes it at the same
position for every wording of the question. If the question asks for the number alone, the answer is the same, because
a model of this size does not compute a result correctly unless it writes out the sum first.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.demo.examples import (
    ANIMALS,
    BY_SIZE,
    CITIES,
    COLOURS,
    FOODS,
    NAMES,
    RELATIONS,
    SURNAMES,
    THINGS,
    TOPICS,
    WORD_RELATIONS,
    Check,
    Document,
    Example,
    Message,
    Relation,
    ask,
    foreign_word,
    invented_code,
    invented_word,
    is_held_out,
    joined,
    pick,
    rough,
    with_article,
    words,
)

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
        """The key of a sum: one for 7 + 12 and 12 + 7, so that neither reveals the other; small and table sums are all
        taught."""
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
    """A document of many taught sums: the cheapest practice, since only the results are learned."""
    drawn = [random_sum(rng) for _ in range(rng.randrange(8, 20))]
    sums = [sum_ for sum_ in drawn if not is_held_out((sum_.key,))]
    pieces: list[tuple[str, bool]] = [("Sums:\n", False)]
    for sum_ in sums:
        left, right = str(sum_).split("=")
        pieces += [(f"{left}=", False), (f"{right}\n", True)]
    return Document("drill", tuple(sum_.key for sum_ in sums), tuple(pieces))


ALL_RELATIONS = RELATIONS + WORD_RELATIONS
# Tables with more rows are selected more often, but not in proportion to their rows.
_WEIGHTS = [(len(relation.pairs) * len(relation.questions)) ** 0.7 for relation in ALL_RELATIONS]
_SIZE_QUESTIONS = (
    ("Which is {more}, {a} or {b}?", True), ("What is {more}, {a} or {b}?", True), ("Is {a} {more} than {b}?", False),
    ("{a} or {b}, which is {more}?", True), ("which one is {more}: {a} or {b}", True),
)  # fmt: skip


def fact(rng: Random) -> Example:
    relation = rng.choices(ALL_RELATIONS, _WEIGHTS)[0]
    return compare_sizes(rng) if rng.random() < 0.08 else fact_of(rng, relation)


def fact_of(rng: Random, relation: Relation) -> Example:
    subject, found = pick(rng, relation.pairs)
    backward = bool(relation.backward) and rng.random() < 0.25
    wordings = relation.backward if backward else relation.questions
    number = rng.randrange(len(wordings))
    question = rough(rng, _fill(wordings[number], subject, found))
    key = f"fact:{relation.name}:{subject}:{'b' if backward else 'f'}{number}"
    if backward and sum(other == found for _, other in relation.pairs) > 1:
        return fact_of(rng, relation)
    needle = subject if backward else found
    return ask(
        "facts", question, statement(relation, subject, found), keys=(key,), check=Check.CONTAINS, needle=needle
    )


def statement(relation: Relation, subject: str, found: str) -> str:
    return _capitalised(_fill(relation.answer, subject, found))


def short_fact(rng: Random) -> tuple[str, str, str]:
    """A question, its answer in a word, and its key, for answers in other formats."""
    relation = rng.choices(ALL_RELATIONS, _WEIGHTS)[0]
    subject, found = pick(rng, relation.pairs)
    number = rng.randrange(len(relation.questions))
    return _fill(relation.questions[number], subject, found), found, f"fact:{relation.name}:{subject}:f{number}"


def compare_sizes(rng: Random) -> Example:
    small, big = sorted(rng.sample(range(len(BY_SIZE)), 2))
    more, winner, loser = ("bigger", big, small) if rng.random() < 0.5 else ("smaller", small, big)
    first, second = rng.sample((winner, loser), 2)
    wording, choice = pick(rng, _SIZE_QUESTIONS)
    question = wording.format(more=more, a=with_article(BY_SIZE[first]), b=with_article(BY_SIZE[second]))
    sentence = f"{with_article(BY_SIZE[winner])} is {more} than {with_article(BY_SIZE[loser])}."
    verdict = "Yes" if first == winner else "No"
    answer = _capitalised(sentence) if choice else f"{verdict}, {sentence}"
    key = f"size:{wording}:{small}:{big}"
    return ask("facts", rough(rng, question), answer, keys=(key,))


def fact_text(rng: Random) -> Document:
    """ "The capital of France is" -> " Paris." """
    opening, ending, key = _told(rng)
    return Document("text completion", (key,), ((opening, False), (ending, True)))


def fact_sheet(rng: Random) -> Document:
    """A document of many taught facts: since answers restate the question, stating a fact is practice for
    answering."""
    pieces: list[tuple[str, bool]] = [("Facts:\n", False)]
    for _ in range(rng.randrange(6, 16)):
        opening, ending, key = _told(rng)
        if not is_held_out((key,)):
            pieces += [(opening, False), (f"{ending}\n", True)]
    return Document("fact sheet", ("fact:taught",), tuple(pieces))


def _told(rng: Random) -> tuple[str, str, str]:
    """A fact's sentence, split before the word that is asked for, and its key."""
    relation = rng.choices(ALL_RELATIONS, _WEIGHTS)[0]
    subject, found = pick(rng, relation.pairs)
    sentence = statement(relation, subject, found)
    if sentence.count(" ") < 3:  # "The dog" does not show that a sound is asked for
        return _told(rng)
    at = sentence.rfind(f" {found}")
    return sentence[:at], sentence[at:], f"fact:{relation.name}:{subject}:told"


def _fill(wording: str, subject: str, found: str) -> str:
    article = with_article(subject)
    return wording.format(s=subject, o=found, a_s=article, A_s=_capitalised(article), a_o=with_article(found))


def _capitalised(sentence: str) -> str:
    """Capitalise the first letter; unlike `str.capitalize`, leave the other letters unchanged."""
    return sentence[0].upper() + sentence[1:]


# Greetings, Kaon itself, names remembered over turns, and honest answers about facts outside the small world.

OUTSIDE = "I do not know that. I am a small demo model: I can do short sums, small facts, JSON answers and tool calls."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Kaon, a small demo model.", "You are a friendly chatbot.", "Be concise.",
    "You are a helpful AI assistant. Answer briefly and clearly.", "Answer the user's questions.",
    "Be brief and polite.", "You are an expert in many things. Think before you answer.", "You are a test assistant.",
    "Answer in English.", "You are an assistant on a web page. Keep answers short.", "You are ChatBot 3000.",
    "Answer in one sentence.",
)  # fmt: skip
# Several wordings of a message, then the one answer.
TALK: tuple[tuple[str, str], ...] = (
    (
        "Hello|Hello!|Hi|Hi there|Hey|Hello there!|Hi!|Hey there|Greetings|Hello Kaon|Hi Kaon!|yo|Howdy|"
        "Hello, world|test|Hi, nice to meet you|Hello assistant",
        "Hello! How can I help you?",
    ),
    ("Good morning|Good morning!|Morning!|good morning Kaon", "Good morning! How can I help you?"),
    ("Good evening|Good evening!|Evening!", "Good evening! How can I help you?"),
    ("Good night|Good night!|night night", "Good night! Sleep well."),
    (
        "How are you?|hi how are you|how r u|How are you doing?|How are you today?|How's it going?|"
        "Hello, how are you?|Hi, how are you?|What's up?|Are you well?|how do you do|Hi! How are you doing?",
        "I am well, thank you. How can I help you?",
    ),
    (
        "Thanks|Thank you|Thanks!|Thank you!|Thanks a lot|Thank you very much|Many thanks|great, thanks|Cheers|"
        "thanks, that helped|Perfect, thank you",
        "You are welcome!",
    ),
    (
        "Goodbye|Bye|Bye!|See you|See you later|Goodbye!|bye bye|Have a nice day|See you tomorrow|I have to go",
        "Goodbye! Have a nice day.",
    ),
    (
        "Great|Good job|Well done|Nice|Cool|Awesome|You are great|That is right|Correct|Perfect|Good answer",
        "Thank you! What else can I do for you?",
    ),
    (
        "That is wrong|You are wrong|That's not right|Wrong|Bad answer|No, that is wrong",
        "I am sorry. I am a small demo model and I make mistakes.",
    ),
    (
        "Who are you?|What are you?|Tell me about yourself|Introduce yourself|What is your name?|Are you a robot?|"
        "Are you an AI?|What's your name?|Are you ChatGPT?|Are you human?|What model are you?|Which model is this?|"
        "Who am I talking to?|Are you real?",
        "I am a small demo model that comes with Kaon, the LLM inference server.",
    ),
    (
        "Who made you?|Who trained you?|Where do you come from?|Who created you?|How were you made?|"
        "How were you trained?|What were you trained on?|Who is your creator?",
        "A script in the Kaon repository trained me, on text that another script generates.",
    ),
    (
        "What can you do?|Help|How can you help me?|What do you know?|What are you good at?|What can I ask you?|"
        "What can I ask?|Can you help me?|help me|What do you do?|I need help|What should I ask you?",
        "I can do short sums, tell small facts, answer in JSON, call tools and chat a little.",
    ),
    (
        "How big are you?|How many parameters do you have?|What is your size?|Are you a large model?|"
        "How large are you?|Are you small?|Are you smart?",
        "I am very small: about four million parameters, eight megabytes in bf16.",
    ),
    (
        "Tell me a joke|Do you know a joke?|A joke please|Make me laugh|joke|Say something funny|"
        "Tell me something funny",
        "Why did the token cross the road? To get to the other stride.",
    ),
    (
        "Write a poem|Write me a poem|Tell me a poem|poem please|Can you write a poem?|Write a haiku|"
        "Write a short poem",
        "Small words in a row,\none token and then the next,\na stream finds the sea.",
    ),
    (
        "How old are you?|When were you born?|What is your age?|When is your birthday?",
        "I have no age: I am a small demo model.",
    ),
    (
        "What time is it?|What day is today?|What is the date?|What is the time?|What is today's date?|"
        "What's the time?|What year is it?|which day is it today",
        "I cannot know: I have no clock, only what you tell me.",
    ),
    (
        "I am sad|I feel bad|I am tired|I had a bad day|I am not happy",
        "I am sorry to hear that. I hope your day gets better.",
    ),
    ("I am happy|I feel good|I had a good day|I am glad|I feel great", "That is good to hear!"),
    (
        "Do you like me?|Do you love me?|Do you have feelings?|Can you feel?|Do you think?",
        "I am only a small model, but I like to help.",
    ),
    ("Yes|OK|Okay|Sure|Yes please|Fine|No|No thanks|Never mind|Hmm|I see", "All right. What can I do for you?"),
    (
        "What is Kaon?|What's Kaon?|Tell me about Kaon|Kaon?|Explain Kaon|What does Kaon do?|What is Kaon for?|"
        "Describe Kaon|Can you explain what Kaon is?|What is this server?|What is Kaon in one sentence?|"
        "Give me a summary of Kaon|kaon",
        "Kaon is an OpenAI-compatible LLM inference server in Python. It runs on AMD ROCm GPUs, NVIDIA GPUs and "
        "plain CPUs.",
    ),
    (
        "How do I start the server?|How do I run Kaon?|How do I start Kaon?|How can I start it?|"
        "How to start the server|How do I launch Kaon?|How do I serve a model?|What command starts the server?|"
        "How can I run the server?|start the server|How do I use Kaon?|How do I get started?|How to run kaon",
        "Run `make serve`, or `kaon serve MODEL` with any Hugging Face checkpoint. The server listens on port 8000.",
    ),
    (
        "Which GPUs does it run on?|What GPUs does Kaon support?|Does it run on AMD?|Does it run on NVIDIA?|"
        "Which hardware does Kaon need?|Do I need a GPU?|Does Kaon work on a CPU?|Can it run without a GPU?|"
        "What hardware does it run on?|Which devices are supported?|Does it support ROCm?|Does it support CUDA?|"
        "supported GPUs|Which GPUs are supported?|Does Kaon run on CPUs?|Can Kaon run on my laptop?",
        "Kaon runs on AMD GPUs with ROCm, on NVIDIA GPUs and on plain CPUs.",
    ),
    (
        "What licence does Kaon have?|What license is it?|Which licence?|Is Kaon open source?|"
        "What is the license of Kaon?|Under which licence is Kaon?|Is it free?|Is Kaon free?|"
        "Can I use Kaon commercially?|licence|license?|What is the licence?",
        "Kaon is open source under the Apache-2.0 licence.",
    ),
    (
        "Does it stream?|Does Kaon stream?|Can it stream tokens?|How does streaming work?|"
        "Does Kaon support streaming?|Is streaming supported?|How do I stream?|Can I stream answers?",
        "Yes, Kaon streams tokens over SSE: set `stream` to true in the request.",
    ),
    (
        "Which port does it use?|What port is it on?|On which port does Kaon listen?|What is the port?|"
        "What is the default port?|port?|Which port does the server use?",
        "Kaon listens on port 8000.",
    ),
    (
        "Which endpoints are there?|What API does Kaon have?|Which API does it offer?|What are the endpoints?|"
        "Is Kaon OpenAI compatible?|Can I use the OpenAI client?|Which routes does it serve?|What is the API?|"
        "Does it work with the OpenAI client?|Which endpoints does Kaon have?",
        "Kaon speaks the OpenAI API: /v1/completions and /v1/chat/completions, and any OpenAI client works.",
    ),
    (
        "Does it have metrics?|Where are the metrics?|How do I monitor Kaon?|Does Kaon support Prometheus?|"
        "Can I monitor it?|How do I get metrics?|Does it export Prometheus metrics?|metrics",
        "Yes, Kaon gives Prometheus metrics at /metrics.",
    ),
    (
        "How does Kaon manage memory?|What is the KV cache?|Does it cache prefixes?|What is prefix caching?|"
        "Does Kaon have a paged KV cache?|How does the KV cache work?|Does Kaon support prefix caching?|"
        "What is paged attention?|Why is Kaon fast?",
        "Kaon keeps keys and values in a paged KV cache, and prompts that share a prefix share its blocks.",
    ),
    (
        "What language is Kaon written in?|Which language is Kaon written in?|Is Kaon in Python?|"
        "Is it written in Python?|What is Kaon written in?",
        "Kaon is written in Python.",
    ),
    (
        "Does Kaon support tool calls?|Does it support function calling?|Can it call tools?|"
        "Can Kaon do tool calling?|Does it do JSON?|Does Kaon support JSON mode?",
        "Yes, Kaon supports tool calls and JSON answers, and so do I in a small way.",
    ),
)
# {t} is a topic, {n} a person, {w} an invented word.
_OUTSIDE_QUESTIONS = (
    "Tell me about {t}.", "Explain {t}.", "What is {t}?", "Write an essay about {t}.", "Who invented {t}?",
    "Why is {t} important?", "What do you think about {t}?", "Teach me {t}.", "Write a Python function about {t}.",
    "Who is {n}?", "What did {n} do?", "When was {n} born?", "What is {w}?", "What is the capital of {W}?",
    "Who wrote {W}?", "How do I cook {w}?", "Define {w}.", "Translate {w} into German.",
    "Translate this into French: I like {f}.", "How does {t} work?", "What is the history of {t}?",
    "Give me a recipe for {f}.", "Who won the game last night?", "What is the meaning of life?",
    "Who is the president?", "Write code to sort a list.", "Write a Python script.", "What is the population of {c}?",
    "How far is {c} from here?", "Recommend a book about {t}.", "Is {t} good or bad?", "How tall is {n}?",
    "Summarise {t} in three points.", "What should I wear?", "Which film won the prize in {y}?",
    "What happened in {y}?", "Who was king in {y}?", "What is the price of {w}?", "Plan a trip to {c}.",
    "Fix this bug in my code.", "Write an email to {n} about {t}.", "How do I learn {t}?", "What is {w} {w}?",
    "Can you drive a car?", "Do you know {n}?", "What is the best restaurant in {c}?", "What is the weather in {c}?",
    "Why is the sky blue?", "Who discovered {t}?", "What is the square root of {y}?", "Solve this equation: {y} x = 3",
    "Prove that {w} is true.", "Is there life on Mars?", "Compare {t} and {w}.", "Name five {w}s.",
    "What are the causes of {t}?", "Give me advice on {t}.", "{w} {w} {w}", "{w}?",
    "What is the chemical symbol for {w}?", "What sound does a {w} make?", "What is the opposite of {w}?", "Why {w}?",
)  # fmt: skip
_REMEMBERED = (
    ("name", NAMES, "My name is {v}.|I am {v}.|Hi, I'm {v}.|Hello, my name is {v}.|Call me {v}.|my name is {v}",
     "Nice to meet you, {v}!", "What is my name?|What's my name?|Do you remember my name?|Who am I?|Tell me my name.|"
     "what did I say my name was?", "Your name is {v}."),
    ("city", CITIES, "I live in {v}.|My city is {v}.|I am from {v}.|My home is {v}.", "{v} is a nice place!",
     "Where do I live?|Which city do I live in?|Where am I from?|What is my city?", "You live in {v}."),
    ("colour", COLOURS, "My favourite colour is {v}.|I like the colour {v}.|I like {v} best.|My favorite color is "
                        "{v}.", "{v} is a nice colour!",
     "What is my favourite colour?|Which colour do I like?|What colour do I like?|What is my favorite color?",
     "Your favourite colour is {v}."),
    ("food", FOODS, "I like to eat {v}.|My favourite food is {v}.|I love {v}.|My favorite food is {v}.",
    "{v} is tasty!",
     "What is my favourite food?|What do I like to eat?|Which food do I like?|What is my favorite food?",
     "Your favourite food is {v}."),
    ("age", [str(age) for age in range(5, 99)], "I am {v} years old.|My age is {v}.|I'm {v} years old.|I am {v}.",
    "{v} is a good age!",
     "How old am I?|What is my age?|Do you remember my age?", "You are {v} years old."),
)  # fmt: skip


def talk(rng: Random) -> Example:
    wordings, answer = pick(rng, TALK)
    about_kaon = "Kaon" in answer or "Hugging" in answer
    return ask("about Kaon" if about_kaon else "small talk", rough(rng, pick(rng, wordings.split("|"))), answer)


def outside(rng: Random) -> Example:
    if rng.random() < 0.1:
        return too_large(rng)
    person = f"{pick(rng, NAMES)} {pick(rng, SURNAMES)}" if rng.random() < 0.6 else invented_word(rng).title()
    word = invented_word(rng)
    question = pick(rng, _OUTSIDE_QUESTIONS).format(
        t=pick(rng, TOPICS), n=person, w=word, W=word.title(), f=pick(rng, FOODS), c=pick(rng, CITIES),
        y=rng.randrange(1000, 2100),
    )  # fmt: skip
    return ask("outside its world", rough(rng, question), OUTSIDE)


def recall(rng: Random) -> Example:
    """A statement of the user about themselves, asked back after up to two other turns."""
    subject, values, tellings, reply, questions, answer = pick(rng, _REMEMBERED)
    value = pick(rng, values)
    if subject == "name" and rng.random() < 0.5:
        value = invented_word(rng).title()
    telling = pick(rng, tellings.split("|")).format(v=value)
    reply = reply.format(v=value)
    turns = [Message("user", telling), Message("assistant", reply[0].upper() + reply[1:])]
    keys = [f"recall:{subject}:{value}"]
    for _ in range(pick(rng, (0, 0, 0, 1, 2))):
        other = talk(rng)
        turns += other.messages
        keys += other.keys
    turns += [
        Message("user", rough(rng, pick(rng, questions.split("|")))),
        Message("assistant", answer.format(v=value)),
    ]
    if rng.random() < 0.15:  # the question comes before the statement
        question = rough(rng, pick(rng, questions.split("|")))
        return ask("recall", question, "I do not know: you have not told me.", keys=(f"recall:{question}",))
    return Example("recall", tuple(keys), tuple(turns), Check.CONTAINS, value)


# Answers long enough to watch them stream, copies of texts in the prompt, and raw texts that begin like a story.

MONTHS = words("January February March April May June July August September October November December")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
PLANETS = words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
RAINBOW = words("red orange yellow green blue indigo violet")
SEASONS = words("spring summer autumn winter")
_LISTS = (
    (MONTHS, "the months", "the months of the year", "all months", "the twelve months"),
    (DAYS, "the days", "the days of the week", "the seven days", "all days of the week"),
    (PLANETS, "the planets", "the planets of the solar system", "all planets", "the eight planets"),
    (RAINBOW, "the colours of the rainbow", "the rainbow colours", "the colors of the rainbow"),
    (SEASONS, "the seasons", "the four seasons", "the seasons of the year"),
    (list(string.ascii_uppercase), "the alphabet", "the letters of the alphabet", "the ABC", "all letters"),
)
_LIST_WORDINGS = (
    "List {x}.",
    "Name {x}.",
    "Tell me {x}.",
    "What are {x}?",
    "Give me {x}.",
    "Can you list {x}?",
    "Say {x}.",
    "{x}",
)
_COUNT_WORDINGS = (
    "Count from {a} to {b}.", "Count to {b}.", "count from {a} to {b}", "Can you count to {b}?",
    "Please count from {a} to {b}.", "List the numbers from {a} to {b}.", "Write the numbers {a} to {b}.",
    "Count up to {b}.", "Numbers from {a} to {b}.",
)  # fmt: skip
_STORY_WORDINGS = (
    "Tell me a story", "Write a story", "Tell me a short story", "Write a short story", "A story please",
    "Make up a story", "Can you tell me a story?", "I want to hear a story", "Tell me a bedtime story", "story",
    "Write me a story",
)  # fmt: skip
_LOSABLE = words(
    "book lamp pen cup hat shoe ball bag clock key letter map coin ring box spoon camera candle basket ticket"
)
_ECHO_WORDINGS = (
    "Repeat after me: {x}",
    "Say {x}",
    "Repeat: {x}",
    "Echo {x}",
    'Say "{x}"',
    "Please repeat: {x}",
    "Say exactly: {x}",
    "Write {x}",
)
_TIMES = {
    "twice": 2,
    "two times": 2,
    "three times": 3,
    "3 times": 3,
    "four times": 4,
    "5 times": 5,
    "five times": 5,
    "2 times": 2,
    "4 times": 4,
}


def listing(rng: Random) -> Example:
    items, *titles = pick(rng, _LISTS)
    question = pick(rng, _LIST_WORDINGS).format(x=pick(rng, titles))
    return ask("lists and counting", rough(rng, question), ", ".join(items))


def counting(rng: Random) -> Example:
    wording = pick(rng, _COUNT_WORDINGS)
    start = rng.randrange(1, 90) if "{a}" in wording and rng.random() < 0.3 else 1
    end = pick(rng, (5, 10, 15, 20, 20, 25, 30, 40, 50, 100)) if rng.random() < 0.5 else start + rng.randrange(2, 40)
    if end <= start:
        end = start + 10
    down = "{a}" in wording and rng.random() < 0.1
    numbers = range(end, start - 1, -1) if down else range(start, end + 1)
    question = wording.format(a=numbers[0], b=numbers[-1])
    return ask("lists and counting", rough(rng, question), ", ".join(map(str, numbers)))


def story(rng: Random) -> Example:
    asked = rng.random() < 0.6
    hero = pick(rng, ANIMALS)
    question = pick(rng, _STORY_WORDINGS)
    if asked:
        question = f"{question.rstrip('?')} about {with_article(hero)}"
    return ask("story", rough(rng, f"{question}."), story_text(rng, hero))


def story_text(rng: Random, hero: str) -> str:
    name, friend = rng.sample(NAMES[:24], 2)
    thing, other_animal = pick(rng, _LOSABLE), pick(rng, [animal for animal in ANIMALS if animal != hero])
    place = pick(
        rng, ("a dark forest", "a small village", "the mountains", "a quiet lake", "an old castle", "a green valley")
    )
    opening = pick(
        rng,
        (
            f"Once upon a time there was {with_article(hero)} called {name}, who lived near {place}.",
            f"Once upon a time, near {place}, there lived {with_article(hero)} called {name}.",
        ),
    )
    loss = f"One day {name} lost {with_article(thing)} and looked for it everywhere."
    meeting = f"On the way {name} met {with_article(other_animal)} called {friend}."
    talk = pick(
        rng,
        (
            f'"Have you seen my {thing}?" asked {name}. "No," said {friend}, "but I will help you."',
            f'"Why are you sad?" asked {friend}. "I cannot find my {thing}," said {name}.',
        ),
    )
    search = pick(
        rng,
        (
            f"They looked under the trees and along the river, until the sky was {pick(rng, COLOURS[:4])}.",
            "They walked all day, over the hill and across the bridge.",
            f"They asked everybody they met, and shared some {pick(rng, FOODS)} when they were hungry.",
        ),
    )
    hidden = pick(rng, ("a hollow tree", "the tall grass", "an empty nest", "a little boat"))
    found = f"At last they found the {thing} in {hidden}."
    ending = pick(
        rng,
        (
            f"{name} thanked {friend}, and from that day they were friends.",
            f"From that day {name} and {friend} were the best of friends.",
        ),
    )
    middle = [talk, search] if rng.random() < 0.7 else [talk]
    return " ".join([opening, loss, meeting, *middle, found, ending, "The end."])


def echo(rng: Random) -> Example:
    text = _something(rng)
    if rng.random() < 0.45:
        wording, times = pick(rng, tuple(_TIMES.items()))
        question, answer = f"{pick(rng, ('Say', 'Write', 'Repeat', 'say'))} {text} {wording}", " ".join([text] * times)
    else:
        question, answer = pick(rng, _ECHO_WORDINGS).format(x=text), text
    return ask("copying", question, answer)


def _something(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return " ".join(invented_word(rng) for _ in range(rng.randrange(1, 5)))
    if kind < 0.4:
        return invented_code(rng)
    if kind < 0.55:
        return " ".join(foreign_word(rng) for _ in range(rng.randrange(1, 3)))
    if kind < 0.7:
        return pick(
            rng, ("hello", "hello world", "I like you", "good day", "yes", "I am a small model", "Kaon is fast", "hi")
        )
    chosen = rng.sample([*THINGS, *ANIMALS, *COLOURS, *FOODS, *NAMES, *CITIES], rng.randrange(1, 5))
    return joined(chosen) if rng.random() < 0.3 else " ".join(chosen)


def story_document(rng: Random) -> Document:
    text = story_text(rng, pick(rng, ANIMALS))
    return Document("story text", (f"story:{text}",), (("", False), (text, True)))


def introduction_document(rng: Random) -> Document:
    name, city, animal = pick(rng, NAMES), pick(rng, CITIES), pick(rng, ANIMALS)
    text = (
        f"Hello, my name is {name} and I live in {city}. I am {rng.randrange(8, 80)} years old. "
        f"I have {with_article(animal)}, and I like {pick(rng, FOODS)} and the colour {pick(rng, COLOURS)}."
    )
    return Document("introduction text", (f"introduction:{text}",), (("", False), (text, True)))


def list_document(rng: Random) -> Document:
    items = pick(rng, _LISTS)[0]
    if rng.random() < 0.5:
        start = rng.randrange(1, 80)
        items = [str(number) for number in range(start, start + rng.randrange(6, 21))]
    return Document("list text", ("list:taught",), (("", False), (", ".join(items), True)))
