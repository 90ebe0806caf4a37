"""The small world's facts: each relation is a table of subject and object, with ways to ask and one way to answer."""

from dataclasses import dataclass, field


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
