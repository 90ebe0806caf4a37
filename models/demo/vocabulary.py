"""More of the small world: relations between words, numbers, elements and planets; then names and nouns to copy."""

from models.demo.wording import phrases, words
from models.demo.world import Relation

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

# Smallest first: any two are compared.
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
