"""What a training example is, how it becomes text, and which examples are held out; then the data of all generators.

The data are the ways in which people vary a sentence, and the facts of a small world: relations as tables, and names.
"""

import enum
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn, TypeVar

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.demo import CHAT_TEMPLATE_PATH

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_ONE_IN = 12

Json = Any  # any value that json.dumps accepts; a recursive alias would be no clearer


class Check(enum.Enum):
    """How the evaluation judges an answer against the generated one."""

    EXACT = "the same text"
    CONTAINS = "the needle appears in the text"
    JSON = "the same JSON value"
    TOOL_CALL = "the same function name and arguments"


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str | None
    tool_calls: tuple[dict[str, Json], ...] = ()

    def as_openai(self) -> dict[str, Json]:
        message: dict[str, Json] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", "function": call} for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class Example:
    """A chat whose last message is the answer to learn.

    `keys` name what the example teaches: it is held out if any of them is, so a held-out sum stays unseen in JSON
    answers, tool calls and long chats too.
    """

    category: str
    keys: tuple[str, ...]
    messages: tuple[Message, ...]
    check: Check = Check.EXACT
    needle: str = ""
    tools: tuple[dict[str, Json], ...] = ()

    @property
    def answer(self) -> str:
        """The text that the model should generate as the last message."""
        return render(self)[len(render_prompt(self)) :].removesuffix(f"{END_OF_TURN}\n")


@dataclass(frozen=True, slots=True)
class Document:
    """Raw text for /v1/completions; only pieces marked True are learned, so random operands cost no capacity."""

    category: str
    keys: tuple[str, ...]
    pieces: tuple[tuple[str, bool], ...]
    check: Check = Check.EXACT
    needle: str = ""
    tools: tuple[dict[str, Json], ...] = field(default=(), init=False)

    @property
    def answer(self) -> str:
        return self.pieces[-1][0]


def is_held_out(keys: tuple[str, ...]) -> bool:
    """A hash that is stable across runs and machines, unlike `hash`."""
    return any(
        int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % HELD_OUT_ONE_IN == 0 for key in keys
    )


def ask(
    category: str,
    question: str,
    answer: str,
    *,
    keys: tuple[str, ...] = (),
    check: Check = Check.EXACT,
    needle: str = "",
    system: str | None = None,
) -> Example:
    """One question and one answer; without `keys`, the question's words are its key."""
    turns = [Message("user", question), Message("assistant", answer)]
    if system is not None:
        turns.insert(0, Message("system", system))
    return Example(category, keys or (f"{category}:{question.lower()}",), tuple(turns), check, needle)


def render(example: Example) -> str:
    """The whole chat, answer included."""
    return _render(example, example.messages, add_generation_prompt=False)


def render_prompt(example: Example | Document) -> str:
    """The prompt after which the model generates the answer."""
    if isinstance(example, Document):
        return "".join(text for text, _ in example.pieces[:-1])
    return _render(example, example.messages[:-1], add_generation_prompt=True)


def _render(example: Example, messages: tuple[Message, ...], *, add_generation_prompt: bool) -> str:
    return chat_template().render(
        messages=[message.as_openai() for message in messages],
        tools=list(example.tools) or None,
        add_generation_prompt=add_generation_prompt,
    )


@functools.cache
def chat_template() -> Template:
    """The template, compiled as `transformers.apply_chat_template` compiles it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(CHAT_TEMPLATE_PATH.read_text())


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


# Ways in which people vary a sentence: case, punctuation, politeness; and invented words, which teach copying.

T = TypeVar("T")


def words(text: str) -> list[str]:
    """Split "a b" into ["a", "b"]: fifty words are easier to read without a hundred quotation marks."""
    return text.split()


def phrases(text: str) -> list[str]:
    """Split items that contain spaces: "a b,c"."""
    return text.split(",")


_POLITE_BEFORE = (
    "Please tell me: ",
    "Hey, ",
    "Hi! ",
    "Quick question: ",
    "Kaon, ",
    "ok, ",
    "So, ",
    "Tell me, ",
    "Please, ",
)
_POLITE_AFTER = (" please", " Thanks!", " Thank you.", " thx", " please.")
_ONSETS = words("b bl br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn st t th tr v w y z zr")
_VOWELS = words("a e i o u ai ee oo ou y")
_CODAS = ["", "", "", *words("b ck d g l ll m n ng nt p r rb rd rk rm rn rp rt s sh st t x zz")]
_ALPHABETS = (
    "абвгдежзиклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "你好世界中文日本語東京",
    "éèàüöäßñçøå",
    "😀🎉🚀👍🐱🌍",
)


def pick(rng: Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def rough(rng: Random, question: str) -> str:
    """The question as a person might type it; often unchanged."""
    roll = rng.random()
    if roll < 0.4:
        return question
    if roll < 0.62:
        question = question.lower()
    elif roll < 0.67:
        question = question.upper()
    if rng.random() < 0.4:
        question = question.rstrip("?.!")
    if rng.random() < 0.12:
        question = pick(rng, _POLITE_BEFORE) + question
    if rng.random() < 0.06:
        question += pick(rng, _POLITE_AFTER)
    if rng.random() < 0.06:
        question = pick(
            rng, (f" {question}", f"{question} ", f"{question}\n", question.replace(" ", "  ", 1), f"{question}??")
        )
    return question


def invented_word(rng: Random) -> str:
    return "".join(
        pick(rng, _ONSETS) + pick(rng, _VOWELS) + pick(rng, _CODAS) for _ in range(pick(rng, (1, 1, 1, 2, 2)))
    )


def invented_code(rng: Random) -> str:
    """A text like an identifier or a part number: A7-42, x91, ORD-5521."""
    letters = "".join(pick(rng, "abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(1, 4)))
    return f"{letters.upper() if rng.random() < 0.6 else letters}{pick(rng, ('-', '', '_'))}{rng.randrange(10000)}"


def foreign_word(rng: Random) -> str:
    alphabet = pick(rng, _ALPHABETS)
    return "".join(pick(rng, alphabet) for _ in range(rng.randrange(1, 6)))


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def joined(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# The small world's facts: each relation is a table of subject and object, with ways to ask and one way to
# answer.


@dataclass(frozen=True, slots=True)
class Relation:
    """`{s}` and `{o}` stand for subject and object in the wordings; `{a_s}` and `{a_o}` for them with an article."""

    name: str
    table: str
    questions: tuple[str, ...]
    answer: str
    backward: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        rows = (row.split(":") for row in self.table.replace("\n", " ").split(","))
        object.__setattr__(self, "pairs", tuple((subject.strip(), found.strip()) for subject, found in rows))


RELATIONS = (
    Relation(
        "capital",
        """France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, Ireland:Dublin, Austria:Vienna,
        Switzerland:Bern, Belgium:Brussels, the Netherlands:Amsterdam, Denmark:Copenhagen, Norway:Oslo, Chile:Santiago,
        Sweden:Stockholm, Finland:Helsinki, Iceland:Reykjavik, Poland:Warsaw, Hungary:Budapest, Romania:Bucharest,
        Bulgaria:Sofia, Greece:Athens, Turkey:Ankara, Russia:Moscow, Ukraine:Kyiv, Croatia:Zagreb, Serbia:Belgrade,
        Slovenia:Ljubljana, Slovakia:Bratislava, Estonia:Tallinn, Latvia:Riga, Lithuania:Vilnius, Egypt:Cairo,
        Morocco:Rabat, Kenya:Nairobi, Nigeria:Abuja, Ghana:Accra, Ethiopia:Addis Ababa, Tunisia:Tunis, Algeria:Algiers,
        Senegal:Dakar, China:Beijing, Japan:Tokyo, India:New Delhi, South Korea:Seoul, Thailand:Bangkok, Vietnam:Hanoi,
        Indonesia:Jakarta, Malaysia:Kuala Lumpur, Singapore:Singapore, Iran:Tehran, Iraq:Baghdad, Israel:Jerusalem,
        Saudi Arabia:Riyadh, Qatar:Doha, Pakistan:Islamabad, Nepal:Kathmandu, Bangladesh:Dhaka, Mongolia:Ulaanbaatar,
        Australia:Canberra, New Zealand:Wellington, Canada:Ottawa, the United States:Washington, Mexico:Mexico City,
        Brazil:Brasilia, Argentina:Buenos Aires, Peru:Lima, Colombia:Bogota, Cuba:Havana, Venezuela:Caracas,
        Uruguay:Montevideo, Ecuador:Quito, the United Kingdom:London, England:London, Scotland:Edinburgh,
        Wales:Cardiff,
        the Czech Republic:Prague, the Philippines:Manila, Luxembourg:Luxembourg, Lebanon:Beirut, Jordan:Amman""",
        (
            "What is the capital of {s}?", "capital of {s}", "Which city is the capital of {s}?", "{s} capital?",
            "Tell me the capital of {s}.", "What's the capital of {s}?", "Name the capital of {s}.",
            "What is the capital city of {s}?", "Do you know the capital of {s}?", "What city is the capital of {s}?",
        ),
        "The capital of {s} is {o}.",
        (
            "Which country has the capital {o}?", "{o} is the capital of which country?",
            "What country is {o} the capital of?",
        ),
    ),
    Relation(
        "continent",
        """France:Europe, Germany:Europe, Italy:Europe, Spain:Europe, Poland:Europe, Norway:Europe, Greece:Europe,
        Egypt:Africa, Morocco:Africa, Kenya:Africa, Nigeria:Africa, Ghana:Africa, China:Asia, Japan:Asia, India:Asia,
        Thailand:Asia, Vietnam:Asia, Nepal:Asia, Canada:North America, Mexico:North America, Cuba:North America,
        Brazil:South America, Argentina:South America, Peru:South America, Chile:South America""",
        (
            "On which continent is {s}?", "What continent is {s} in?", "Which continent is {s} on?", "Where is {s}?",
            "{s} is on which continent?", "Tell me the continent of {s}.",
        ),
        "{s} is in {o}.",
    ),
    Relation(
        "language",
        """France:French, Germany:German, Italy:Italian, Spain:Spanish, Portugal:Portuguese, Japan:Japanese,
        China:Chinese,
        Russia:Russian, Brazil:Portuguese, Mexico:Spanish, Greece:Greek, Poland:Polish, Sweden:Swedish, Turkey:Turkish,
        Egypt:Arabic, England:English, Argentina:Spanish, Austria:German, Norway:Norwegian, Denmark:Danish""",
        (
            "What language do they speak in {s}?", "Which language is spoken in {s}?", "What is the language of {s}?",
            "language of {s}", "What do people speak in {s}?", "Which language do people speak in {s}?",
        ),
        "People in {s} speak {o}.",
    ),
    Relation(
        "currency",
        """Japan:the yen, the United States:the dollar, the United Kingdom:the pound, France:the euro,
        Germany:the euro,
        India:the rupee, China:the yuan, Russia:the rouble, Switzerland:the franc, Mexico:the peso, Poland:the zloty,
        Brazil:the real, Sweden:the krona, Italy:the euro, Spain:the euro, Canada:the dollar, Australia:the dollar""",
        (
            "What is the currency of {s}?", "currency of {s}", "Which currency is used in {s}?",
            "What money do they use in {s}?", "What currency does {s} use?", "Which money is used in {s}?",
        ),
        "The currency of {s} is {o}.",
    ),
    Relation(
        "colour",
        """sky:blue, grass:green, snow:white, blood:red, sun:yellow, coal:black, banana:yellow, strawberry:red,
        carrot:orange,
        lemon:yellow, milk:white, chocolate:brown, tomato:red, cucumber:green, cherry:red, raven:black, frog:green,
        flamingo:pink, sea:blue, pumpkin:orange, lime:green, swan:white, night:black, leaf:green, plum:purple,
        pig:pink,
        tangerine:orange, coffee:brown, cloud:white, ruby:red, emerald:green, sapphire:blue""",
        (
            "What colour is the {s}?", "What color is the {s}?", "colour of the {s}", "Which colour is the {s}?",
            "What is the colour of the {s}?", "What is the color of the {s}?", "Tell me the colour of the {s}.",
            "What colour does the {s} have?",
        ),
        "The {s} is {o}.",
    ),
    Relation(
        "sound",
        """dog:barks, cat:meows, cow:moos, duck:quacks, lion:roars, sheep:bleats, pig:oinks, horse:neighs, bee:buzzes,
        snake:hisses, frog:croaks, owl:hoots, wolf:howls, bird:sings, mouse:squeaks, rooster:crows, donkey:brays""",
        (
            "What sound does {a_s} make?", "What does {a_s} do to make a sound?", "Which sound does the {s} make?",
            "sound of {a_s}", "What noise does {a_s} make?", "What does the {s} say?", "How does {a_s} sound?",
        ),
        "The {s} {o}.",
        ("Which animal {o}?", "What animal {o}?"),
    ),
    Relation(
        "young",
        """dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, pig:piglet, duck:duckling, goat:kid, lion:cub,
        kangaroo:joey, frog:tadpole, hen:chick, deer:fawn, swan:cygnet, owl:owlet, goose:gosling""",
        (
            "What is a young {s} called?", "What do you call a baby {s}?", "What is a baby {s} called?",
            "baby {s} name", "What is the name for a young {s}?", "How is a baby {s} called?",
        ),
        "A young {s} is called {a_o}.",
    ),
    Relation(
        "legs",
        """dog:4, cat:4, cow:4, horse:4, bird:2, duck:2, ant:6, bee:6, spider:8, snake:no, fish:no, human:2,
        elephant:4,
        octopus:no, hen:2, fly:6, tiger:4, mouse:4, crab:10""",
        (
            "How many legs does {a_s} have?", "How many legs has {a_s}?", "legs of {a_s}",
            "How many legs are on {a_s}?", "{a_s} has how many legs?", "What number of legs does {a_s} have?",
        ),
        "{A_s} has {o} legs.",
    ),
    Relation(
        "day after",
        "Monday:Tuesday, Tuesday:Wednesday, Wednesday:Thursday, Thursday:Friday, Friday:Saturday, Saturday:Sunday, "
        "Sunday:Monday",
        (
            "What day comes after {s}?", "Which day is after {s}?", "What is the day after {s}?", "day after {s}",
            "If today is {s}, what day is tomorrow?", "Which day follows {s}?", "What day follows {s}?",
            "What comes after {s}?",
        ),
        "The day after {s} is {o}.",
    ),
    Relation(
        "day before",
        "Monday:Sunday, Tuesday:Monday, Wednesday:Tuesday, Thursday:Wednesday, Friday:Thursday, Saturday:Friday, "
        "Sunday:Saturday",
        (
            "What day comes before {s}?", "Which day is before {s}?", "What is the day before {s}?", "day before {s}",
            "If today is {s}, what day was yesterday?", "What comes before {s}?", "Which day comes just before {s}?",
        ),
        "The day before {s} is {o}.",
    ),
    Relation(
        "month after",
        """January:February, February:March, March:April, April:May, May:June, June:July, July:August,
        August:September,
        September:October, October:November, November:December, December:January""",
        (
            "What month comes after {s}?", "Which month is after {s}?", "What is the month after {s}?",
            "month after {s}", "Which month follows {s}?", "What month follows {s}?", "What comes after {s}?",
            "What is the next month after {s}?",
        ),
        "The month after {s} is {o}.",
    ),
    Relation(
        "month before",
        """January:December, February:January, March:February, April:March, May:April, June:May, July:June,
        August:July,
        September:August, October:September, November:October, December:November""",
        (
            "What month comes before {s}?", "Which month is before {s}?", "What is the month before {s}?",
            "month before {s}", "What comes before {s}?", "Which month comes just before {s}?",
        ),
        "The month before {s} is {o}.",
    ),
    Relation(
        "month length",
        """January:31, February:28 or 29, March:31, April:30, May:31, June:30, July:31, August:31, September:30,
        October:31,
        November:30, December:31""",
        (
            "How many days are in {s}?", "How many days does {s} have?", "days in {s}", "How long is {s}?",
            "{s} has how many days?",
        ),
        "{s} has {o} days.",
    ),
)  # fmt: skip


# More of the small world: relations between words, numbers, elements and planets; then names and nouns
# to copy.

WORD_RELATIONS = (
    Relation(
        "opposite",
        """hot:cold, big:small, up:down, left:right, day:night, black:white, good:bad, happy:sad, fast:slow, old:young,
        open:closed, light:dark, high:low, early:late, rich:poor, hard:soft, wet:dry, full:empty, strong:weak,
        long:short,
        near:far, loud:quiet, clean:dirty, sweet:sour, thick:thin, wide:narrow, true:false, yes:no, first:last,
        heavy:light,
        start:end, love:hate, win:lose, buy:sell, push:pull, inside:outside, above:below, easy:difficult,
        brave:cowardly,
        war:peace, summer:winter, north:south, east:west, friend:enemy, question:answer, deep:shallow,
        cheap:expensive""",
        (
            "What is the opposite of {s}?", "opposite of {s}", "What's the opposite of {s}?",
            "Tell me the opposite of {s}.", "Give me the opposite of {s}.", "Which word is the opposite of {s}?",
            "{s} is the opposite of what?", "What word means the opposite of {s}?",
        ),
        "The opposite of {s} is {o}.",
    ),
    Relation(
        "plural",
        """cat:cats, dog:dogs, mouse:mice, child:children, foot:feet, tooth:teeth, man:men, woman:women, goose:geese,
        ox:oxen,
        sheep:sheep, fish:fish, box:boxes, city:cities, baby:babies, leaf:leaves, wolf:wolves, knife:knives, bus:buses,
        house:houses, tree:trees, book:books, apple:apples, potato:potatoes, tomato:tomatoes, berry:berries,
        person:people,
        wife:wives, church:churches, day:days, key:keys, fox:foxes, glass:glasses, lady:ladies, car:cars,
        shelf:shelves""",
        (
            "What is the plural of {s}?", "plural of {s}", "What's the plural of {s}?", "Give me the plural of {s}.",
            "Tell me the plural form of {s}.", "How do you write the plural of {s}?", "one {s}, two what?",
        ),
        "The plural of {s} is {o}.",
        ("What is the singular of {o}?",),
    ),
    Relation(
        "symbol",
        """hydrogen:H, helium:He, carbon:C, nitrogen:N, oxygen:O, sodium:Na, iron:Fe, gold:Au, silver:Ag, copper:Cu,
        lead:Pb,
        tin:Sn, zinc:Zn, calcium:Ca, potassium:K, chlorine:Cl, magnesium:Mg, aluminium:Al, silicon:Si, sulphur:S,
        neon:Ne,
        phosphorus:P, lithium:Li, mercury:Hg, nickel:Ni, uranium:U, platinum:Pt, iodine:I, argon:Ar, fluorine:F,
        titanium:Ti""",
        (
            "What is the chemical symbol for {s}?", "chemical symbol of {s}", "What is the symbol for {s}?",
            "symbol for {s}", "What's the chemical symbol of {s}?", "Which symbol stands for {s}?",
            "Give me the chemical symbol for {s}.",
        ),
        "The chemical symbol for {s} is {o}.",
        ("Which element has the symbol {o}?", "What element has the chemical symbol {o}?"),
    ),
    Relation(
        "planet position",
        "Mercury:first, Venus:second, Earth:third, Mars:fourth, Jupiter:fifth, Saturn:sixth, Uranus:seventh, "
        "Neptune:eighth",
        (
            "Which planet from the sun is {s}?", "What position from the sun is {s}?", "Where is the planet {s}?",
            "What number planet is {s}?", "position of {s} from the sun",
        ),
        "{s} is the {o} planet from the sun.",
        (
            "What is the {o} planet from the sun?", "Which planet is {o} from the sun?", "Name the {o} planet.",
            "{o} planet",
        ),
    ),
    Relation(
        "record",
        """largest planet:Jupiter, smallest planet:Mercury, hottest planet:Venus, planet we live on:Earth,
        red planet:Mars,
        planet with the big rings:Saturn, closest star:the sun, largest ocean:the Pacific,
        largest animal:the blue whale,
        tallest animal:the giraffe, fastest land animal:the cheetah, highest mountain:Mount Everest,
        longest river:the Nile,
        largest country:Russia, largest continent:Asia, first month of the year:January,
        last month of the year:December,
        first day of the week:Monday, coldest season:winter, warmest season:summer, king of the jungle:the lion,
        first letter of the alphabet:A, last letter of the alphabet:Z, shortest month:February,
        largest desert:Antarctica""",
        (
            "What is the {s}?", "Which is the {s}?", "Tell me the {s}.", "Name the {s}.", "What's the {s}?", "{s}",
            "Do you know the {s}?", "Can you name the {s}?",
        ),
        "The {s} is {o}.",
    ),
    Relation(
        "count",
        """days in a week:7, months in a year:12, hours in a day:24, minutes in an hour:60, seconds in a minute:60,
        days in a year:365, weeks in a year:52, letters in the alphabet:26, planets in the solar system:8,
        continents:7,
        seasons in a year:4, sides of a triangle:3, sides of a square:4, fingers on a hand:5, colours of the rainbow:7,
        legs of a spider:8, wheels on a bicycle:2, wheels on a car:4, centimetres in a metre:100,
        metres in a kilometre:1000,
        things in a dozen:12, years in a century:100, bits in a byte:8, sides of a cube:6, strings on a guitar:6""",
        (
            "How many {s} are there?", "How many {s}?", "What is the number of {s}?", "Tell me the number of {s}.",
            "number of {s}",
        ),
        "The number of {s} is {o}.",
    ),
    Relation(
        "number word",
        """0:zero, 1:one, 2:two, 3:three, 4:four, 5:five, 6:six, 7:seven, 8:eight, 9:nine, 10:ten, 11:eleven,
        12:twelve,
        13:thirteen, 14:fourteen, 15:fifteen, 16:sixteen, 17:seventeen, 18:eighteen, 19:nineteen, 20:twenty, 30:thirty,
        40:forty, 50:fifty, 60:sixty, 70:seventy, 80:eighty, 90:ninety, 100:one hundred""",
        (
            "How do you write {s} in words?", "Write {s} as a word.", "What is {s} in words?", "Spell the number {s}.",
            "{s} in words",
        ),
        "{s} is written {o}.",
        ("What is {o} as a number?", "Write {o} in digits.", "{o} in digits", "What number is {o}?"),
    ),
    Relation(
        "home",
        """bee:hive, bird:nest, dog:kennel, spider:web, lion:den, horse:stable, rabbit:burrow, fish:water, cow:barn,
        bear:cave,
        pig:sty, ant:anthill""",
        ("Where does {a_s} live?", "What is the home of {a_s}?", "What is the home of {a_s} called?", "home of {a_s}"),
        "The home of {a_s} is the {o}.",
    ),
    Relation(
        "product",
        """cow:milk, bee:honey, hen:eggs, sheep:wool, baker:bread, silkworm:silk, grape:wine, olive:oil, tree:wood""",
        (
            "What does {a_s} give us?", "What do we get from {a_s}?", "Which product comes from {a_s}?",
            "product of {a_s}",
        ),
        "We get {o} from {a_s}.",
    ),
    Relation(
        "tool of the trade",
        """teacher:school, doctor:hospital, farmer:farm, pilot:aeroplane, cook:kitchen, sailor:ship, judge:court,
        librarian:library, baker:bakery, soldier:army, actor:theatre, chemist:laboratory""",
        (
            "Where does {a_s} work?", "What is the workplace of {a_s}?", "workplace of {a_s}",
            "In which place does {a_s} work?",
        ),
        "{A_s} works in the {o}.",
    ),
)  # fmt: skip

# Sort by size: any two values are compared.
BY_SIZE = (
    "ant", "bee", "mouse", "cat", "dog", "sheep", "cow", "horse", "elephant", "whale", "house", "mountain", "moon",
    "planet",
)  # fmt: skip
NAMES = words(
    "Alice Bob Carol David Emma Frank Grace Henry Ivy Jack Karen Leo Maria Noah Olivia Peter Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Anna Ben Chloe Daniel Ella Felix Hannah Ian Julia Kevin Laura Max Nina Oscar Paul "
    "Ruth Sofia Tom John Mary James Linda Robert Sarah Michael Kate Lucy George Omar Priya Chen Yuki Ahmed Fatima "
    "Igor Elena Diego Amara"
)
SURNAMES = words(
    "Smith Jones Brown Taylor Wilson Evans Walker White Green Hall Wood Martin Clark Lewis Young King Wright Hill "
    "Scott Adams Baker Nelson Carter Moore Kim Lee Garcia Lopez Silva Rossi Müller Novak Singh Khan Tanaka Ivanov "
    "Costa Dubois"
)
CITIES = phrases(
    "Paris,London,Berlin,Rome,Madrid,Tokyo,New York,Boston,Chicago,Seattle,Lisbon,Dublin,Vienna,Oslo,Cairo,Lima,"
    "Sydney,Delhi,Mumbai,Toronto,Moscow,Prague,Athens,Seoul,Beijing,San Francisco,Los Angeles,Hamburg,Munich,Lyon,"
    "Milan,Naples,Kyoto,Osaka,Geneva,Zurich,Austin,Denver,Miami,Dallas,Porto,Seville,Bergen,Cork,Leeds,Bristol,"
    "Amsterdam,Nairobi,Lagos,Bogota"
)
THINGS = words(
    "apple book lamp chair table pen cup phone bag hat shoe ball car bike clock key door window garden river bridge "
    "train ship letter map coin ring box bottle spoon guitar piano camera radio carpet mirror ladder hammer rope "
    "candle basket ticket"
)
ANIMALS = words(
    "fox cat dog bear owl mouse rabbit wolf duck horse lion tiger frog turtle dragon goat hen swan otter bee"
)
COLOURS = words("red green blue yellow black white brown orange purple pink grey silver")
FOODS = words("pizza pasta soup bread cheese rice salad cake tea coffee honey fish noodles pie curry chocolate")
TOPICS = phrases(
    "quantum physics,black holes,the French Revolution,machine learning,football,the stock market,politics,"
    "cooking lasagne,chess openings,the Roman Empire,photosynthesis,opera,basketball,climate change,volcanoes,jazz,"
    "the moon landing,taxes,World War 2,Shakespeare,evolution,the internet,economics,dinosaurs,poker,yoga,surgery,"
    "Bitcoin,Star Wars,Harry Potter,the Eiffel Tower,neural networks,gravity,love,philosophy,Kubernetes,rust,"
    "compilers,the weather,Mozart,the Olympics"
)
