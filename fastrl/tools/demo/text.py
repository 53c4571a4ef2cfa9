"""The demo's texts: a small grammar of film reviews, a rule for their polarity, and a labeller.

The grammar makes sentences such as "frankly , this director delivers a clever thriller but the
ending is never believable .". `polarity` is the rule that says how favourable a sentence is. Noisy
`preference_pairs` follow it, and from them alone the demo's reward model learns. The rule is never
the reward: at the end it shows whether the reward rose because reviews became more favourable.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

OPENERS = (
    "frankly ,",
    "in the end ,",
    "to be fair ,",
    "on a second viewing ,",
    "as it turns out ,",
    "against all odds ,",
    "for two hours ,",
    "by the final reel ,",
)
WORKS = (
    "film", "movie", "story", "script", "plot", "ending", "second act", "opening scene",
    "soundtrack", "dialogue", "camera work", "sequel", "love story", "car chase", "final twist",
    "romance", "narration", "pacing",
)  # fmt: skip
PEOPLE = (
    "director", "cast", "lead actor", "screenwriter", "young star", "whole ensemble", "villain",
    "composer", "editor", "newcomer",
)  # fmt: skip
DETERMINERS = ("the", "this", "that", "its")
COPULAS = ("is", "feels", "seems", "remains", "becomes")
ADVERBS = ("quietly", "deeply", "oddly", "truly", "surprisingly", "mostly", "utterly", "somewhat")
MAKES = ("tells", "delivers", "gives us", "serves up", "attempts", "finds", "offers")
GENRES = (
    "thriller", "comedy", "drama", "tale", "western", "satire", "mystery", "portrait", "fable",
    "adventure", "farce", "performance",
)  # fmt: skip
PLAIN_CLAUSES = (
    "takes place in a small town",
    "runs for two hours",
    "opens with a long train ride",
    "was shot in black and white",
    "follows three sisters and a dog",
    "moves from paris to the desert",
    "borrows its title from an old song",
    "ends where it began",
)
WITNESSES = ("the audience", "every critic", "the whole family", "this reviewer", "the heart")

GLOWING = (
    "brilliant", "moving", "dazzling", "hilarious", "wise", "gorgeous", "unforgettable",
    "masterful",
)  # fmt: skip
FAVOURABLE = ("charming", "clever", "tender", "fresh", "honest", "funny", "believable", "warm")
MIXED = ("strange", "loud", "slow", "ambitious", "familiar", "quirky", "long", "talky")
UNFAVOURABLE = ("clumsy", "stale", "bland", "shallow", "flat", "uneven", "forced", "hollow")
DIRE = ("dreadful", "insulting", "unwatchable", "tedious", "lifeless", "ugly", "inept", "pointless")
PRAISE = ("delights", "charms", "thrills", "rewards", "uplifts")
BLAME = ("bores", "insults", "exhausts", "cheats", "confuses")

NEGATORS = ("never", "hardly", "not")
JOINERS = ("and", "because", "while")
CONTRASTS = ("but", "yet", "though")

WEIGHTS: dict[str, int] = {
    **dict.fromkeys(GLOWING, 2),
    **dict.fromkeys(FAVOURABLE, 1),
    **dict.fromkeys(UNFAVOURABLE, -1),
    **dict.fromkeys(DIRE, -2),
    **dict.fromkeys(PRAISE, 2),
    **dict.fromkeys(BLAME, -2),
}


class _Mood(NamedTuple):
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]


_MOODS = {
    "good": _Mood(GLOWING + FAVOURABLE, PRAISE),
    "mixed": _Mood(MIXED, PRAISE + BLAME),
    "bad": _Mood(DIRE + UNFAVOURABLE, BLAME),
}
_OPPOSITE = {"good": "bad", "bad": "good", "mixed": "mixed"}
_CLAUSE_STARTS = frozenset((*JOINERS, *CONTRASTS, ",", "."))


class Review(NamedTuple):
    """A sentence and its label, 1 = favourable."""

    text: str
    label: int


def sentence(rng: random.Random) -> str:
    """One review, words and punctuation separated by single spaces, ending in " ."."""
    mood = rng.choice(("good", "mixed", "bad"))
    parts = [rng.choice(OPENERS)] if rng.random() < 0.4 else []
    parts.append(_clause(rng, mood))
    draw = rng.random()
    if draw < 0.3:
        parts += [rng.choice(JOINERS), _clause(rng, mood)]
    elif draw < 0.65:
        # After "but" the polarity mostly turns, as in real reviews.
        turned = _OPPOSITE[mood] if rng.random() < 0.8 else mood
        parts += [rng.choice(CONTRASTS), _clause(rng, turned)]
    return " ".join([*parts, "."])


def opening(rng: random.Random) -> str:
    """The first words of a review, before any favourable or unfavourable word."""
    start = [rng.choice(OPENERS)] if rng.random() < 0.6 else []
    if rng.random() < 0.35:
        subject_and_verb = [_person(rng), rng.choice(MAKES)]
    else:
        subject_and_verb = [_work(rng), rng.choice(COPULAS)]
    return " ".join(start + subject_and_verb[: rng.choice((1, 2))])


def polarity(text: str) -> int:
    """How favourable a sentence is: the sum of `WEIGHTS` over its words.

    A negator changes the sign of the words after it in its clause ("never moving"), and words after
    "but", "yet" or "though" count twice.
    """
    total, factor, sign = 0, 1, 1
    for word in text.split():
        if word in _CLAUSE_STARTS:
            sign = 1
            if word in CONTRASTS:
                factor = 2
        elif word in NEGATORS:
            sign = -1
        else:
            total += factor * sign * WEIGHTS.get(word, 0)
    return total


def labeller(text: str, rng: random.Random) -> int:
    """A noisy label: 1 with probability σ(1.5·polarity)."""
    return int(rng.random() < 1.0 / (1.0 + math.exp(-1.5 * polarity(text))))


def reviews(count: int, seed: int) -> list[Review]:
    """``count`` labelled reviews; the same seed gives the same reviews."""
    rng = random.Random(seed)
    texts = [sentence(rng) for _ in range(count)]
    return [Review(text, labeller(text, rng)) for text in texts]


def preference_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` pairs of reviews, the preferred one first.

    The first of two is preferred with probability σ(its polarity - the other's), the model of
    Bradley and Terry, so that some pairs are the wrong way round.
    """
    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        one, other = sentence(rng), sentence(rng)
        if one == other:
            continue
        preferred = rng.random() < 1.0 / (1.0 + math.exp(polarity(other) - polarity(one)))
        pairs.append((one, other) if preferred else (other, one))
    return pairs


def split_openings(train: int, held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Two disjoint lists of distinct openings: prompts for training and for evaluation."""
    rng = random.Random(seed)
    distinct: dict[str, None] = {}
    while len(distinct) < train + held_out:
        distinct.setdefault(opening(rng))
    openings = list(distinct)
    rng.shuffle(openings)
    return openings[:train], openings[train:]


def _person(rng: random.Random) -> str:
    return f"{rng.choice(DETERMINERS)} {rng.choice(PEOPLE)}"


def _work(rng: random.Random) -> str:
    return f"{rng.choice(DETERMINERS)} {rng.choice(WORKS)}"


def _clause(rng: random.Random, mood: str) -> str:
    verbs = _MOODS[mood].verbs
    draw = rng.random()
    if draw < 0.15:
        return f"{_work(rng)} {rng.choice(PLAIN_CLAUSES)}"
    if draw < 0.3:
        subject = rng.choice((_work, _person))(rng)
        return f"{subject} {rng.choice(verbs)} {rng.choice(WITNESSES)}"
    description = _description(rng, mood)
    if draw < 0.6:
        article = "an" if description[0] in "aeiou" else "a"
        return f"{_person(rng)} {rng.choice(MAKES)} {article} {description} {rng.choice(GENRES)}"
    return f"{_work(rng)} {rng.choice(COPULAS)} {description}"


def _description(rng: random.Random, mood: str) -> str:
    """Adjectives of the mood: one, two, or one behind an adverb; or a negated opposite one."""
    first, second = rng.sample(_MOODS[mood].adjectives, 2)
    draw = rng.random()
    if draw < 0.25:
        return f"{rng.choice(ADVERBS)} {first}"
    if draw < 0.35:
        return f"{rng.choice(NEGATORS)} {rng.choice(_MOODS[_OPPOSITE[mood]].adjectives)}"
    if draw < 0.5:
        return f"{first} , {second}"
    return first
