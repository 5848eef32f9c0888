"""Training text of the demo model: the questions and answers of questions.txt, and the text of the docs.

The life of the corpus:
1. `load_topics` reads questions.txt into `Topic`s: phrasings that mean the same, and one answer.
2. `load_docs` reads README.md and docs/*.md as paragraphs, without the generated tables: they are long and say little.
3. `Sampler` draws conversations (one or several turns, with and without system prompt, phrasing varied) and passages.

Invariants: same seed, same samples; `render` writes exactly what the chat template in tokenizer_config.json writes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.demo_model import weather

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (BOS, EOS, PAD, *(f"<|{role}|>" for role in ROLES))
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that stay in the text, as Qwen3 has them."""
TOOLS_HEAD = "You may call these functions:\n<tools>"
TOOLS_END = "\n</tools>\nTo call one, write its name and arguments as JSON between <tool_call> and </tool_call>."
NO_REASONING = "<think>\n\n</think>\n\n"
"""Begin of an answer for which reasoning is switched off."""
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] in ['system', 'developer'] %}{{ messages[0]['content'] | trim }}{{ '\n\n' }}{% endif %}"
    "{{ 'You may call these functions:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\nTo call one, write its name and arguments as JSON between <tool_call> and </tool_call>.' }}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] in ['system', 'developer']) %}"
    "{% if message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '<tool_response>\n' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '\n</tool_response>' }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' }}{{ call['function']['name'] | tojson }}{{ ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
GENERATED_DOCS = ("flags.md", "metrics.md")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of Baton.",
    "You are a helpful assistant. Answer briefly.",
    "Answer questions about Baton.",
    "Be concise.",
    "You are an assistant for operators of an inference cluster. Answer in one or two sentences.",
)
OPENINGS = (
    "Please tell me: ",
    "Hey, ",
    "Hi! ",
    "Can you tell me: ",
    "I have a question. ",
    "Quick question: ",
    "So, ",
)
CLOSINGS = (" Please answer briefly.", " Thanks!", " Explain it simply.", " Please.")


@dataclass(frozen=True, slots=True)
class Topic:
    questions: tuple[str, ...]
    """Phrasings that mean the same; the first is canonical."""
    answer: str


@dataclass(frozen=True, slots=True)
class OffTopic:
    """Parts of questions about anything but Baton; `forms` hold one or two places for words."""

    forms: tuple[str, ...]
    words: tuple[str, ...]
    syllables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Questions:
    topics: tuple[Topic, ...]
    off_topic: Topic
    unseen: tuple[str, ...]
    """Off-topic questions that training never shows."""
    unseen_phrasings: tuple[tuple[str, Topic], ...]
    """Other words for known questions, never shown either."""

    @property
    def all_topics(self) -> tuple[Topic, ...]:
        return (*self.topics, self.off_topic)


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str
    given: str = ""
    """Begin of the text that the prompt has already."""
    is_learned: bool = True
    """Training learns what an assistant says here."""


def load_topics(path: Path) -> Questions:
    """Read questions.txt. Raises ValueError for a block without answer or a phrasing that stands twice."""
    topics: list[Topic] = []
    named: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    questions: list[str] = []
    section = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.name}:{number}"
        if line.startswith("#") or not line.strip():
            if questions and section != "unseen":
                raise ValueError(f"{where}: the block above has no 'A:' line")
        elif line.startswith("= "):
            section = line[2:].strip()
        elif line.startswith("Q: "):
            text = line[3:].strip()
            if text.lower() in seen:
                raise ValueError(
                    f"{where}: {text!r} stands in line {seen[text.lower()]} too; one question has one answer"
                )
            seen[text.lower()] = number
            (named.setdefault(section, []) if section else questions).append(text)
        elif line.startswith("A: "):
            if section:
                named["answer"] = [line[3:].strip()]
            else:
                topics.append(Topic(tuple(questions), line[3:].strip()))
                questions = []
        else:
            raise ValueError(
                f"{where}: lines begin with 'Q: ', 'A: ', '= ' or '#', this one with {line[:8]!r}"
            )
    by_question = {topic.questions[0]: topic for topic in topics}
    phrasings = (line.split(" -> ") for line in named["unseen phrasings"])
    return Questions(
        topics=tuple(topics),
        off_topic=Topic(tuple(named["off topic"]), named["answer"][0]),
        unseen=tuple(named["unseen"]),
        unseen_phrasings=tuple((text, by_question[canonical]) for text, canonical in phrasings),
    )


def load_off_topic(path: Path) -> OffTopic:
    """Read off_topic.txt."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    blocks = "\n".join(lines).strip().split("\n\n")
    forms, words, syllables = (tuple(re.split(r" \| |\n", block)) for block in blocks)
    return OffTopic(forms, words, syllables)


def load_docs(root: Path) -> list[list[str]]:
    """Paragraphs of README.md and docs/**/*.md, one list per page. Raises FileNotFoundError outside a checkout."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages if page.name not in GENERATED_DOCS]
    return [
        [paragraph for paragraph in re.split(r"\n{2,}", text) if paragraph.strip()]
        for text in texts
    ]


def tools_text(tools: Sequence[Mapping[str, Any]], system: str = "") -> str:
    """Text of the system turn that offers the tools."""
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    before = f"{system.strip()}\n\n" if system else ""
    return before + TOOLS_HEAD + listed + TOOLS_END


def render(turns: Sequence[Turn], *, ask: bool = False) -> str:
    """A conversation as text with special tokens; `ask` adds the opening of the assistant's turn."""
    body = "".join(f"<|{turn.role}|>{turn.given}{turn.text.strip()}{EOS}" for turn in turns)
    return BOS + body + ("<|assistant|>" if ask else "")


# A search box is asked without these.
STOP_WORDS = re.compile(
    r"a|an|and|are|can|do|does|for|how|i|in|is|it|me|my|of|on|please|tell|the|there|to|what|which"
)
# Words of which one may stand for another in any question of the list, whatever the topic.
SYNONYMS: tuple[tuple[str, ...], ...] = (
    (
        "what is",
        "what's",
        "whats",
        "what exactly is",
        "explain",
        "what do you mean by",
        "tell me what is",
        "describe",
    ),
    ("what does", "what would"),
    (
        "how do i",
        "how can i",
        "how to",
        "how should i",
        "how would i",
        "what is the way to",
        "i want to",
        "i need to",
    ),
    ("how does", "in which way does", "how exactly does"),
    ("which", "what"),
    ("are there", "exist", "do you have"),
    ("start", "launch", "run", "bring up", "boot"),
    ("stop", "shut down", "halt", "end"),
    ("prefill node", "P node", "prefill server", "prefill worker", "prefill engine"),
    ("decode node", "D node", "decode server", "decode worker", "decode engine"),
    ("dies", "crashes", "fails", "goes down", "breaks", "disappears"),
    ("happens when", "happens if", "happens once", "do you do when"),
    ("client", "user", "caller"),
    ("does Baton have", "do you have", "is there", "has Baton"),
    ("does Baton support", "can Baton do", "do you support", "is there support for"),
    ("can I", "may I", "is it possible to", "could I"),
    ("pages", "KV pages", "KV cache pages"),
    ("the ", ""),
    ("why", "for what reason", "how come"),
    ("use", "choose", "take"),
    ("where is", "where do I find", "where can I find"),
)


def reword(question: str, rng: random.Random) -> str:
    """Replace one expression of the question by a synonym; unchanged when none occurs in it."""
    places = [
        (match, group)
        for group in SYNONYMS
        for word in group
        if word and (match := re.search(rf"\b{re.escape(word)}(?!\w)", question, re.IGNORECASE))
    ]
    if not places:
        return question
    match, group = rng.choice(places)
    words = rng.choice(group)
    if match.start() == 0:
        words = words[:1].upper() + words[1:]
    return question[: match.start()] + words + question[match.end() :]


def vary(question: str, rng: random.Random) -> str:
    """The question as another person might type it; often unchanged."""
    for _ in range(rng.choice((0, 0, 1, 2))):
        question = reword(question, rng)
    kind = rng.random()
    if kind < 0.1:  # as typed into a search box, or with a word forgotten
        words = question.lower().rstrip("?.!").split() or [question]
        keywords = [word for word in words if not STOP_WORDS.fullmatch(word)]
        lost = rng.randrange(len(words))
        fewer = keywords if kind < 0.05 else words[:lost] + words[lost + 1 :]
        return " ".join(fewer or words)
    if kind < 0.5:
        return question
    if kind < 0.62:
        return question.lower()
    if kind < 0.72:
        return question.rstrip("?.!") or question
    if kind < 0.78:
        return question.lower().rstrip("?.!") or question
    if kind < 0.86:
        return rng.choice(OPENINGS) + question
    if kind < 0.92:
        return question + rng.choice(CLOSINGS)
    place = rng.randrange(len(question))  # a typing mistake: a letter is lost, or two change places
    if kind < 0.96 or place + 1 >= len(question):
        return question[:place] + question[place + 1 :] or question
    return question[:place] + question[place + 1] + question[place] + question[place + 2 :]


class Sampler:
    """Draws training samples for ever. Every topic comes up equally often: topics are dealt from a shuffled deck."""

    def __init__(
        self, questions: Questions, off_topic: OffTopic, pages: list[list[str]], seed: int
    ) -> None:
        self._questions = questions
        self._parts = off_topic
        self._pages = pages
        self._rng = random.Random(seed)
        self._deck: list[Topic] = []

    def conversation(self) -> list[Turn]:
        """One to five questions with their answers, after a system prompt now and then."""
        rng = self._rng
        turns = [Turn("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.3 else []
        for _ in range(1 if rng.random() < 0.5 else rng.randint(2, 5)):
            question, answer = self._off_topic() if rng.random() < 0.2 else self._deal()
            turns += [Turn("user", question), Turn("assistant", answer)]
        return turns

    def passage(self) -> str:
        """Consecutive paragraphs of one page, about 900 characters; a long paragraph may be entered at any line."""
        page = self._rng.choices(self._pages, weights=[sum(map(len, p)) for p in self._pages])[0]
        text = "\n\n".join(page[self._rng.randrange(len(page)) :])
        if self._rng.random() < 0.3:
            text = text[self._rng.choice([m.end() for m in re.finditer(r"^|\n+", text[:2000])]) :]
        end = text.find("\n\n", 600)
        return text[: min(end if end >= 0 else len(text), 1400)]

    def weather(self) -> list[Turn]:
        """A conversation with the tool: up to the call, or with what the call gave."""
        rng = self._rng
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
        turns = [Turn("system", tools_text(weather.draw_tools(rng), system))]
        if rng.random() < 0.1:  # another question, with tools at hand
            question, answer = self._off_topic() if rng.random() < 0.3 else self._deal()
            turns += [Turn("user", question), Turn("assistant", answer)]
            if rng.random() < 0.5:
                return turns
        city = rng.choice(weather.CITIES) if rng.random() < 0.5 else self._word().title()
        call = weather.call_text(city)
        turns.append(Turn("user", weather.question_about(city, rng)))
        if rng.random() < 0.5:
            if rng.random() < 0.25:
                return [*turns, Turn("assistant", call, given=NO_REASONING)]
            reasoning = f"<think>\n{weather.reasoning_text(city)}\n</think>\n\n"
            return [*turns, Turn("assistant", reasoning + call)]
        sky, degrees = rng.choice(weather.SKIES), rng.randint(-9, 39)
        result = weather.draw_result(city, sky, degrees, rng)
        given = NO_REASONING if rng.random() < 0.2 else ""
        return [
            *turns,
            Turn("assistant", call, is_learned=False),
            Turn("user", f"<tool_response>\n{result}\n</tool_response>"),
            Turn("assistant", weather.answer_text(city, sky, degrees), given=given),
        ]

    def samples(self, passage_share: float, weather_share: float) -> Iterator[list[Turn] | str]:
        while True:
            kind = self._rng.random()
            if kind < passage_share:
                yield self.passage()
            elif kind < passage_share + weather_share:
                yield self.weather()
            else:
                yield self.conversation()

    def _deal(self) -> tuple[str, str]:
        if not self._deck:
            self._deck = list(self._questions.topics)
            self._rng.shuffle(self._deck)
        topic = self._deck.pop()
        return vary(self._rng.choice(topic.questions), self._rng), topic.answer

    def _off_topic(self) -> tuple[str, str]:
        rng, topic = self._rng, self._questions.off_topic
        if rng.random() < 0.35:
            question = vary(rng.choice(topic.questions), rng)
        else:
            form = rng.choice(self._parts.forms)
            question = vary(form.format(*(self._word() for _ in range(form.count("{}")))), rng)
        return question, topic.answer

    def _word(self) -> str:
        if self._rng.random() < 0.75:
            return self._rng.choice(self._parts.words)
        return "".join(self._rng.choices(self._parts.syllables, k=self._rng.randint(2, 4)))
