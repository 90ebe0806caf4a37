"""Greetings, Kaon itself, names recalled over turns, and honesty about what lies outside the small world."""

from random import Random

from models.demo.arithmetic import too_large
from models.demo.dialogue import Check, Example, Message, ask
from models.demo.vocabulary import CITIES, COLOURS, FOODS, NAMES, SURNAMES, TOPICS
from models.demo.wording import invented_word, pick, rough

OUTSIDE = "I do not know that. I am a small demo model: I can do short sums, small facts, JSON answers and tool calls."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Kaon, a small demo model.", "You are a friendly chatbot.", "Be concise.",
    "You are a helpful AI assistant. Answer briefly and clearly.", "Answer the user's questions.",
    "Be brief and polite.", "You are an expert in many things. Think before you answer.", "You are a test assistant.",
    "Answer in English.", "You are an assistant on a web page. Keep answers short.", "You are ChatBot 3000.",
    "Answer in one sentence.",
)  # fmt: skip
# Several wordings of what somebody means, then the one answer.
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
# {t} a topic, {n} a person, {w} a word that nobody knows.
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
    """Something the user says of themselves, asked back after up to two other turns."""
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
    if rng.random() < 0.15:  # asked before it is told
        question = rough(rng, pick(rng, questions.split("|")))
        return ask("recall", question, "I do not know: you have not told me.", keys=(f"recall:{question}",))
    return Example("recall", tuple(keys), tuple(turns), Check.CONTAINS, value)
