"""Questions as people ask them, made of sentences and words of this file: prompts for `dflash-triton train --data`.

    python -m demo.questions 8000 > questions.jsonl

A drafter that learns from the questions that a small target writes itself meets other ones when people ask. None of
these is among `checks/questions.jsonl`, which measures it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

COUNTRIES = """Spain Portugal Italy Greece Turkey Poland Norway Sweden Finland Denmark Ireland Scotland Austria Hungary Romania
Bulgaria Croatia Serbia Ukraine Iceland Canada Mexico Cuba Jamaica Brazil Argentina Chile Peru Bolivia Colombia Ecuador
Uruguay Morocco Algeria Tunisia Ghana Nigeria Kenya Ethiopia Tanzania Uganda Zambia Botswana Namibia Madagascar India Nepal
Pakistan Bangladesh Thailand Vietnam Laos Cambodia Malaysia Indonesia Japan Mongolia China Australia Fiji""".split()
CITIES = """Rome Madrid Berlin Vienna Prague Budapest Warsaw Dublin Edinburgh Athens Istanbul Cairo Nairobi Lagos Mumbai Delhi
Bangkok Hanoi Singapore Jakarta Tokyo Seoul Sydney Melbourne Auckland Toronto Vancouver Chicago Boston Denver Seattle Miami
Havana Bogota Santiago Montreal Geneva Hamburg Naples Venice""".split()
ANIMALS = """dog cat horse cow goat sheep pig rabbit mouse elephant giraffe lion tiger bear wolf fox deer squirrel beaver otter
whale dolphin shark octopus salmon frog turtle snake lizard crocodile eagle owl parrot penguin ostrich duck chicken spider ant
butterfly ladybug snail bat kangaroo koala camel""".split()
FOODS = """bread rice pasta pizza soup salad cheese butter yogurt eggs pancakes porridge potatoes carrots tomatoes onions spinach
beans lentils apples oranges bananas strawberries grapes lemons chocolate honey coffee tea lemonade cookies cake pie sandwiches
tacos curry dumplings noodles popcorn olives""".split()
THINGS = """bicycle umbrella telephone camera computer printer clock candle mirror ladder hammer wheel bridge boat train airplane
rocket telescope microscope thermometer compass magnet battery bulb refrigerator oven kettle toaster vacuum piano guitar violin
drum book pencil notebook backpack jacket shoes blanket pillow lamp window door garden tent kite ball""".split()
JOBS = """teacher doctor nurse farmer baker chef pilot sailor firefighter carpenter plumber electrician engineer architect lawyer
judge journalist writer painter musician actor dancer librarian gardener mechanic programmer scientist astronaut dentist
veterinarian photographer tailor barber cashier waiter""".split()
SCIENCE = """gravity|friction|magnetism|electricity|evaporation|condensation|photosynthesis|respiration|digestion|evolution|erosion
|the water cycle|the carbon cycle|the greenhouse effect|global warming|a solar eclipse|a lunar eclipse|the seasons|the tides
|an earthquake|a volcano|a tornado|a hurricane|lightning|thunder|a rainbow|an atom|a molecule|a cell|DNA|a gene|a virus
|a bacterium|an enzyme|a protein|a vitamin|the immune system|the nervous system|the heart|the lungs|the liver|the brain|a muscle
|a bone|energy|heat|light|sound|pressure|density|a chemical reaction|an acid|a metal|oxygen|hydrogen|carbon|iron|the Moon|the Sun
|Mars|Jupiter|Saturn|a comet|a star|a galaxy|a black hole|the Big Bang|a fossil|a glacier|a desert|a rainforest|a coral reef
|a food chain|pollination|migration|hibernation|camouflage|recycling|solar power|wind power|nuclear power|a lens|a prism|radio waves
|the speed of light|Newton's laws of motion|a pendulum|a lever|a pulley|an algorithm|a database|the internet|encryption
|machine learning|a search engine|probability|a prime number|a fraction|a percentage|an angle|a triangle|a circle""".replace(
    "\n", ""
).split("|")
HISTORY = """the Roman Empire|ancient Greece|ancient China|the Middle Ages|the Renaissance|the printing press|the Silk Road|the Vikings
|the Black Death|the French Revolution|the American Revolution|the Industrial Revolution|the steam engine|the First World War
|the Second World War|the Cold War|the Berlin Wall|the moon landing|the Great Depression|the Magna Carta|the Aztecs|the Incas|the Maya
|the Ottoman Empire|the Mongol Empire|the voyages of Columbus|the Panama Canal|the Suez Canal|the telegraph|the first airplane
|the Olympic Games|the United Nations|women's right to vote|the civil rights movement|the end of slavery|the invention of writing
|the Great Wall of China|the Colosseum|the Eiffel Tower|the Statue of Liberty|the Taj Mahal|Stonehenge""".replace(
    "\n", ""
).split("|")
PERSONS = """Albert Einstein|Isaac Newton|Marie Curie|Charles Darwin|Galileo Galilei|Leonardo da Vinci|Michelangelo|Mozart|Beethoven
|Bach|Vincent van Gogh|Pablo Picasso|Jane Austen|Charles Dickens|Mark Twain|Leo Tolstoy|Homer|Plato|Aristotle|Socrates
|Julius Caesar|Cleopatra|Napoleon|Queen Victoria|Abraham Lincoln|George Washington|Mahatma Gandhi|Nelson Mandela
|Martin Luther King|Rosa Parks|Thomas Edison|Nikola Tesla|Alexander Graham Bell|Ada Lovelace|Alan Turing|Neil Armstrong
|Amelia Earhart|Florence Nightingale|Louis Pasteur|Johannes Kepler""".replace("\n", "").split("|")
WORDS = """happy sad big small fast slow old new light heavy rich poor early late near far deep shallow strong weak brave quiet loud
clean dirty hard soft bright dark warm cool sweet bitter empty full open wide narrow long short kind cruel honest clever lazy
busy calm angry gentle simple difficult beautiful ugly safe dangerous cheap expensive ancient modern""".split()
NOUNS = """city box leaf knife wolf mouse tooth foot goose woman man hero potato story baby bus dish watch church fox life shelf
country family key toy bridge river""".split()
TASKS = """clean a window|wash a wool sweater|boil an egg|bake a loaf of bread|cook rice|make pancakes|plant a tree|grow tomatoes
|water house plants|paint a room|fix a flat tire|change a light bulb|sew on a button|iron a shirt|tie a tie|fold a letter|wrap a gift
|write a letter|write a resume|prepare for an interview|study for an exam|learn a new language|remember names|take good notes
|give a speech|make new friends|apologize to a friend|save money|plan a trip|pack a suitcase|read a map|choose a bicycle
|ride a horse|swim faster|run a marathon|start exercising|sleep better|wake up early|stop a nosebleed|treat a small burn
|keep food fresh|cut an onion|sharpen a knife|set a table|clean an oven|unclog a drain|start a fire in a fireplace|build a sandcastle
|take a good photo|draw a face|play chess|play the guitar|train a puppy|feed a cat|care for a goldfish|organize a closet
|use less water|reduce waste|write a poem|tell a joke|stay calm|be more patient|work in a team|ask for help""".replace(
    "\n", ""
).split("|")
SUBJECTS = """the sea|a storm|autumn|spring|a snowy night|an old house|a lost key|a brave girl|a curious boy|two friends|a grandmother
|a robot|a dragon|a talking cat|a lighthouse|a train journey|a small village|the city at night|a birthday|a first day at school
|a garden|a mountain|a river|the moon|the stars|a dream|a letter|a secret door|an island|a market|hope|friendship|courage|kindness
|patience|home|music|time|rain|the desert""".replace("\n", "").split("|")
HABITS = """reading books|exercising every day|eating vegetables|drinking water|walking to work|learning music|traveling|cooking at home
|keeping a diary|getting enough sleep|working from home|living in a city|living in the country|having a pet|playing sports
|watching television|using a phone before bed|school uniforms|homework|public transport|electric cars|online shopping|volunteering
|meditation|gardening|team work|being on time|saving money|recycling|learning to swim""".replace("\n", "").split("|")
CODE = """reverses a string|adds two numbers|finds the largest number in a list|counts the vowels in a word|checks whether a number is
 even|checks whether a number is prime|computes the factorial of a number|sorts a list of numbers|removes duplicates from a list
|counts the words in a text|converts Celsius to Fahrenheit|prints the numbers from 1 to 10|sums the digits of a number
|checks whether a word is a palindrome|merges two lists|computes the average of a list|finds the shortest word in a sentence
|reads a file line by line|returns the first n Fibonacci numbers|multiplies two matrices""".replace("\n", "").split("|")
NAMES = "Tom Maria Sam Lucy Peter Nina Jack Emma Leo Sara Ben Clara Max Julia Oscar Ella".split()
LANGUAGES = "French Spanish German Italian".split()
KINDS = {
    "animals": ANIMALS,
    "foods": FOODS,
    "jobs": JOBS,
    "countries": COUNTRIES,
    "cities": CITIES,
    "things": THINGS,
}
# Words in braces are drawn from a list by that name; {n} and {m} are numbers.
SENTENCES = """What is {science}?|What is {science} and why does it matter?|Explain {science} in simple terms.|How does {science} work?
|Can you explain {science} to a ten-year-old?|Give an example of {science} in everyday life.|What causes {science}?
|Tell me three facts about {science}.|Who discovered {science}?|What is the difference between {science} and {science}?
|What is the capital of {country}?|Where is {country}?|Which languages are spoken in {country}?|What is {country} famous for?
|Name three cities in {country}.|Which countries border {country}?|What is the climate like in {country}?|Tell me about {country}.
|What should I see in {city}?|In which country is {city}?|Plan a weekend in {city}.|What is {city} known for?
|What do people eat in {country}?|Is {country} larger than {country}?|What is the population of {country}?
|What is the longest river in {country}?|What is the highest mountain in {country}?|What currency is used in {country}?
|What was {history}?|When did {history} happen?|Why was {history} important?|Tell me about {history}.|Describe {history} in two sentences.
|What led to {history}?|Who was {person}?|What did {person} do?|When was {person} born?|Why is {person} famous?
|Write a short biography of {person}.|What can we learn from {person}?|In which country did {person} live?
|What does a {animal} eat?|Where does a {animal} live?|How long does a {animal} live?|How many legs does a {animal} have?
|Describe a {animal}.|Is a {animal} a mammal?|What sound does a {animal} make?|How does a {animal} protect itself?
|What is a baby {animal} called?|Which is faster, a {animal} or a {animal}?|Can a {animal} swim?|Do people keep a {animal} as a pet?
|How are {food} made?|Are {food} healthy?|What goes well with {food}?|Give me a recipe with {food} and {food}.
|Where do {food} come from?|How do I store {food}?|How many calories do {food} have?|Suggest a breakfast with {food}.
|What does a {job} do?|How do I become a {job}?|What tools does a {job} need?|Where does a {job} work?|Why do we need a {job}?
|What is the hardest part of being a {job}?|Describe a day in the life of a {job}.|What is a {thing} used for?|Who invented the {thing}?
|How does a {thing} work?|What is a {thing} made of?|How do I choose a {thing}?|How do I repair a broken {thing}?|Describe a {thing}.
|What is the opposite of {word}?|Give me a synonym for {word}.|Use the word {word} in a sentence.|What does {word} mean?
|Give me a word that rhymes with {word}.|Is {word} an adjective or a verb?|What is the noun form of {word}?|Spell the word {word}.
|How do you say {word} in {language}?|What is the plural of {noun}?|Write a sentence with the words {word} and {noun}.
|What is the difference between {word} and {word}?|How do I {task}?|What do I need to {task}?|Give me five tips on how to {task}.
|What is the best way to {task}?|How long does it take to {task}?|Explain step by step how to {task}.|Why is it hard to {task}?
|Write a short poem about {subject}.|Write a story about {subject}.|Write two sentences about {subject}.|Describe {subject}.
|Tell me a joke about a {animal}.|Write the first line of a novel about {subject}.|Write a haiku about {subject}.
|Write a letter to a friend about {subject}.|Give me a title for a story about {subject}.|Write a dialogue between a {job} and a {animal}.
|What are the benefits of {habit}?|What are the pros and cons of {habit}?|Why do people like {habit}?|Is {habit} a good idea?
|Write a paragraph about {habit}.|Give me three reasons for {habit}.|How can I get better at {habit}?
|What is {n} plus {m}?|What is {n} minus {m}?|What is {n} times {m}?|What is half of {n}0?|What is {n} percent of 200?|Is {n} a prime number?
|Which is larger, {n} or {m}?|What comes after {n}?|Count from {n} to {n}5.|How many hours are {n} days?|How many centimeters are {n} meters?
|How many months are {n} years?|{name} has {n} apples and gives {m} to {name}. How many are left?|{name} walks {n} kilometers in an hour.
 How far does {name} walk in {m} hours?|A {thing} costs {n} dollars. How much do {m} of them cost?|Round {n}.{m} to the nearest whole number.
|Name five {kind}.|List three {kind} that begin with the letter {letter}.|Which of these is not like the others: {animal}, {animal}, {food}?
|Put these in alphabetical order: {thing}, {animal}, {food}.|Write a Python function that {code}.|Explain what a program that {code} does.
|Fix this sentence: she go to {city} yesterday.|Rewrite politely: give me the {thing}.|Translate to {language}: I like {food}.
|Is this true: a {animal} is larger than a {animal}?|Summarize in one sentence: {name} wanted to {task}, but the {thing} was broken.
|Where can I buy a {thing}?|What should I give a {job} as a present?|What shall I wear in {city} in winter?
|I feel {word} today. What can I do?|I have {food} and {food} at home. What can I cook?|My {animal} does not eat. What should I do?
|Hello, I am {name}. Who are you?|Hi! Can you help me {task}?|Thank you for your help with the {thing}.|Good morning! How are you?
|What color is a {animal}?|What color are {food}?|What do you call a young {animal}?|What do you call someone who works as a {job}?
|What do you use to {task}?|Which season is best to {task}?|Can you {task} without a {thing}?|What happens if I do not {task}?
|Who is the author of a book about {subject}?|Which planet is larger, Mars or Jupiter, and what has that to do with {science}?
|Write an email to my {job} about a broken {thing}.|Write a slogan for {food}.|Invent a name for a {animal}.|Make a list of things for a trip
 to {country}.|Compare {city} and {city}.|Compare a {animal} and a {animal}.|Compare {food} and {food}.|What is your favorite {noun}?
|Give me a fun fact about {country}.|Give me a fun fact about a {animal}.|Give me a quiz question about {history}.""".replace(
    "\n", ""
).split("|")
LISTS = {
    "{science}": SCIENCE,
    "{country}": COUNTRIES,
    "{city}": CITIES,
    "{history}": HISTORY,
    "{person}": PERSONS,
    "{animal}": ANIMALS,
    "{food}": FOODS,
    "{job}": JOBS,
    "{thing}": THINGS,
    "{word}": WORDS,
    "{noun}": NOUNS,
    "{task}": TASKS,
    "{subject}": SUBJECTS,
    "{habit}": HABITS,
    "{code}": CODE,
    "{name}": NAMES,
    "{language}": LANGUAGES,
    "{kind}": list(KINDS),
    "{letter}": list("ABCDFGLMPS"),
    "{n}": [str(number) for number in range(2, 60)],
    "{m}": [str(number) for number in range(2, 13)],
}


def questions(count: int, seed: int, excluded: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield `count` different questions, none of them excluded: the same ones for the same seed."""
    rng, seen = random.Random(seed), {question.lower() for question in excluded}
    while count:
        question = rng.choice(SENTENCES)
        for name, words in LISTS.items():
            while name in question:
                question = question.replace(name, rng.choice(words), 1)
        if question.lower() not in seen:
            seen.add(question.lower())
            count -= 1
            yield question


def measured_questions() -> frozenset[str]:
    """The questions of `checks/questions.jsonl`."""
    lines = (Path(__file__).parent.parent / "checks" / "questions.jsonl").read_text().splitlines()
    return frozenset(turn for line in lines for turn in json.loads(line)["turns"])


def main() -> None:
    """Print as many questions as the first argument says, a JSON object a line."""
    for question in questions(int(sys.argv[1]), 0, measured_questions()):
        print(json.dumps({"messages": [{"role": "user", "content": question}]}))


if __name__ == "__main__":
    main()
