"""What the small model can do: draws pictures of coloured shapes and makes prompts with their one right answer.

NumPy and Pillow only. Training, the measurement of the floors and the golden answers all draw from here, and so can a
test or a notebook that wants a fresh prompt:

    rng = np.random.default_rng(1)
    example = sample(rng, "describe", grid="wide")
    example.prompt, example.image, example.answer

Every answer follows from the prompt and the picture by a fixed rule, so that greedy decoding is right or wrong, never a
matter of taste. The colour-shape pairs of `HELD_OUT` are drawn in no training picture; measuring asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw

# ruff: noqa: SIM905 - long word lists read better as one string than as quoted items

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "green": (40, 165, 65),
    "blue": (40, 75, 215),
    "yellow": (242, 218, 45),
    "orange": (248, 138, 30),
    "purple": (135, 55, 185),
    "pink": (250, 150, 200),
    "cyan": (60, 205, 225),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
# One colour for each shape: each is still seen on four other shapes, each shape in seven other colours.
HELD_OUT = frozenset(
    {("green", "circle"), ("purple", "square"), ("blue", "triangle"), ("red", "star"), ("orange", "cross")}
)
PAIRS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
SEEN = tuple(pair for pair in PAIRS if pair not in HELD_OUT)
BACKGROUNDS = ("white", "cream", "grey", "black", "gradient", "checked")
GRIDS: dict[str, tuple[int, int]] = {"square": (128, 128), "wide": (192, 128)}  # width, height in pixels

PICTURE_TASKS = ("describe", "objects", "colour", "is_there")
TEXT_TASKS = ("count", "repeat", "continue")
TASKS = PICTURE_TASKS + TEXT_TASKS
LARGEST_COUNT = 30

WORDINGS: dict[str, tuple[str, ...]] = {
    "describe": (
        "Describe this image.",
        "Describe the image.",
        "Describe the picture.",
        "Describe this picture.",
        "Describe what you see.",
        "What do you see?",
        "What is in the picture?",
        "What is in this image?",
        "What does the picture show?",
    ),
    "objects": (
        "How many objects are there?",
        "How many objects are in the picture?",
        "How many shapes do you see?",
        "How many shapes are in this image?",
        "How many things are in the picture?",
    ),
    "colour": (
        "What colour is the {shape}?",
        "What color is the {shape}?",
        "Which colour is the {shape}?",
        "Which colour does the {shape} have?",
        "Tell me the colour of the {shape}.",
    ),
    "is_there": (
        "Is there {pair}?",
        "Is there {pair} in the picture?",
        "Is there {pair} in this image?",
        "Do you see {pair}?",
        "Does the picture show {pair}?",
    ),
    "count": (
        "Count from 1 to {n}.",
        "Please count from 1 to {n}.",
        "Count up from 1 to {n}.",
        "Can you count from 1 to {n}?",
        "Write the numbers from 1 to {n}.",
        "List the numbers from 1 to {n}.",
    ),
    "repeat": (
        "Repeat: {words}",
        "Repeat these words: {words}",
        "Say this again: {words}",
        "Copy these words: {words}",
        "Echo: {words}",
    ),
    "continue": (
        "Continue the pattern: {words}",
        "Continue this pattern: {words}",
        "What comes next? {words}",
        "Go on with the pattern: {words}",
    ),
}
# Further ways to ask, as people type them; the tokenizer was made from the texts of WORDINGS alone.
CASUAL_WORDINGS: dict[str, tuple[str, ...]] = {
    "describe": (
        "Describe this.",
        "What is this?",
        "What can you see?",
        "What is in the image?",
        "What's in the picture?",
        "Tell me what you see.",
        "What is shown here?",
    ),
    "objects": (
        "How many objects?",
        "How many shapes?",
        "How many objects do you see?",
        "How many shapes are there?",
        "How many things are there?",
        "How many objects are in the image?",
        "Count the objects.",
    ),
    "colour": (
        "What is the colour of the {shape}?",
        "What is the color of the {shape}?",
        "Colour of the {shape}?",
        "Which color is the {shape}?",
        "What color does the {shape} have?",
    ),
    "is_there": (
        "Is there {pair} here?",
        "Is there {pair} in the image?",
        "Can you see {pair}?",
        "Do you see {pair} in the picture?",
        "Does the image show {pair}?",
    ),
    "count": (
        "Count to {n}.",
        "Count up to {n}.",
        "Can you count to {n}?",
        "Numbers from 1 to {n}.",
        "Count 1 to {n}.",
    ),
    "repeat": (
        "Repeat after me: {words}",
        "Repeat {words}",
        "Repeat the words: {words}",
        "Say: {words}",
        "Copy: {words}",
    ),
    "continue": (
        "Continue: {words}",
        "Go on: {words}",
        "What is next? {words}",
        "Complete the pattern: {words}",
    ),
}
NUMBER_WORDS = ("zero", "one", "two", "three")
WORDS = (
    "apple bird boat book bread bridge cat chair cloud corn dog door drum fish flower fox garden glass goat hand hat "
    "horse house ice island key lake lamp leaf lion map milk moon mouse nest night ocean paper pear pen plum queen "
    "rain ring river road rose sand ship shoe snow stone sun table tea train tree wind window wolf"
).split()
_ADJECTIVES = "old young quiet small tall warm cold bright early late heavy light slow quick plain round".split()
_NOUNS = (
    "farmer teacher sailor baker doctor child neighbour traveller train boat garden market station village letter "
    "window kitchen story winter morning summer evening mountain forest library harbour"
).split()
_VERBS = "waits stands sleeps works sings walks rests stays reads dreams travels arrives".split()
_PLACES = "near behind beside over under before after without inside along".split()


@dataclass(frozen=True)
class Thing:
    """One object of a picture: centre (x, y) and radius in pixels, turned by `angle` radians."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float

    @property
    def pair(self) -> tuple[str, str]:
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """What a picture shows: one to three things, left to right (`row`) or top to bottom (`column`)."""

    grid: str
    things: tuple[Thing, ...]
    layout: str
    background: str

    def caption(self) -> str:
        """The answer of the task `describe`."""
        joint = " left of " if self.layout == "row" else " above "
        return joint.join(_with_article(*thing.pair) for thing in self.things)


@dataclass(frozen=True)
class Example:
    """A prompt with its one right answer; `scene` tells what the picture was drawn from."""

    task: str
    prompt: str
    answer: str
    image: Image.Image | None = None
    grid: str | None = None
    scene: Scene | None = field(default=None, repr=False)
    filler_words: int = 0


def sample(
    rng: np.random.Generator,
    task: str,
    grid: str | None = None,
    *,
    held_out: bool = False,
    filler_words: int = 0,
    number: int | None = None,
    things: int | None = None,
    casual: bool = False,
) -> Example:
    """Draw a fresh example of a task.

    `grid` is "square" or "wide" (None: square twice as often); text tasks ignore it. With `held_out` the picture holds
    a pair that training never drew, and the question is about it. `filler_words` puts about so many words of unrelated
    sentences before the question. `number` fixes N of `count`, the words of `repeat` and the period of `continue`;
    `things` the number of objects. `casual` asks as people type: other wordings too, a small first letter, no full
    stop. An unknown task is a ValueError.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; one of {', '.join(TASKS)}")
    lead = filler(rng, filler_words)
    if task in TEXT_TASKS:
        asked, answer = _text_question(rng, task, number, casual)
        return Example(task, lead + asked, answer, filler_words=filler_words)
    grid = grid or ("square" if rng.random() < 2 / 3 else "wide")
    scene = sample_scene(rng, grid, held_out=held_out, things=things, one_of_a_shape=task == "colour")
    asked, answer = question(rng, task, scene, casual)
    image = draw(rng, scene)
    return Example(task, lead + asked, answer, image, grid, scene, filler_words)


def filler(rng: np.random.Generator, words: int) -> str:
    """Unrelated sentences of about `words` words and full stops; empty for 0."""
    sentences = []
    while words > 0:
        parts = ["The", _pick(rng, _ADJECTIVES), _pick(rng, _NOUNS), _pick(rng, _VERBS)]
        if words > 5:
            parts += [_pick(rng, _PLACES), "the", _pick(rng, _NOUNS)]
        sentences.append(" ".join(parts) + ".")
        words -= len(parts) + 1
    return "".join(sentence + " " for sentence in sentences)


def sample_scene(
    rng: np.random.Generator,
    grid: str = "square",
    *,
    held_out: bool = False,
    things: int | None = None,
    one_of_a_shape: bool = False,
) -> Scene:
    """Choose what to draw: never two things of one pair, never two that touch.

    With `held_out` the first-chosen thing, put at a random place of the order, has a held-out pair.
    """
    count = things or int(rng.integers(1, 4))
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        choices = sorted(HELD_OUT) if held_out and not pairs else SEEN
        pair = choices[int(rng.integers(len(choices)))]
        if pair in pairs or (one_of_a_shape and pair[1] in [shape for _, shape in pairs]):
            continue
        pairs.append(pair)
    pairs = [pairs[i] for i in rng.permutation(count)]
    layout = "row" if rng.random() < 0.5 else "column"
    width, height = GRIDS[grid]
    along, across = (width, height) if layout == "row" else (height, width)
    radii = rng.uniform(13, 24 if count < 3 else 17, count)
    gaps = rng.dirichlet(np.ones(count + 1)) * (along - 2 * radii.sum() - 6 * (count + 1))
    at = np.cumsum(2 * radii + gaps[:count] + 6) - radii
    # Things of one row stay near one line, so that "left of" and "above" are never both true by sight.
    middle = rng.uniform(30, across - 30)
    offsets = np.clip(middle + rng.uniform(-11, 11, count), radii + 3, across - radii - 3)
    placed = []
    for (colour, shape), radius, position, offset in zip(pairs, radii, at, offsets, strict=True):
        x, y = (position, offset) if layout == "row" else (offset, position)
        placed.append(Thing(colour, shape, float(x), float(y), float(radius), float(rng.uniform(-0.22, 0.22))))
    return Scene(grid, tuple(placed), layout, _pick(rng, BACKGROUNDS))


def draw(rng: np.random.Generator, scene: Scene, shades: Sequence[tuple[int, int, int]] | None = None) -> Image.Image:
    """Paint a scene: an RGB picture of the grid's size, smooth edges, a little noise.

    `shades` replaces the colours of the things, one for each.
    """
    scale = 2
    width, height = GRIDS[scene.grid]
    image = _background(rng, scene.background, width, height).resize((width * scale, height * scale), Image.NEAREST)
    pen = ImageDraw.Draw(image)
    for thing, colour in zip(scene.things, shades or [COLOURS[t.colour] for t in scene.things], strict=True):
        shade = tuple(int(v) for v in np.clip(np.array(colour) + rng.integers(-10, 11, 3), 0, 255))
        x, y, radius = thing.x * scale, thing.y * scale, thing.radius * scale
        if thing.shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shade)
        else:
            pen.polygon(_outline(thing.shape, x, y, radius, thing.angle), fill=shade)
    image = image.reduce(scale)
    noise = rng.integers(-4, 5, (height, width, 1), dtype=np.int16)
    pixels = np.clip(np.asarray(image, dtype=np.int16) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def _outline(shape: str, x: float, y: float, radius: float, angle: float) -> list[tuple[float, float]]:
    if shape == "square":
        spokes = [(1.2, pi / 4 + k * pi / 2) for k in range(4)]
    elif shape == "triangle":
        spokes = [(1.15, -pi / 2 + k * 2 * pi / 3) for k in range(3)]
    elif shape == "star":
        spokes = [(1.15 if k % 2 == 0 else 0.48, -pi / 2 + k * pi / 5) for k in range(10)]
    elif shape == "cross":
        arm, inner = 0.32, 1.05
        corners = [(-arm, -inner), (arm, -inner), (arm, -arm), (inner, -arm), (inner, arm), (arm, arm)]
        corners += [(arm, inner), (-arm, inner), (-arm, arm), (-inner, arm), (-inner, -arm), (-arm, -arm)]
        spokes = [(float(np.hypot(a, b)), float(np.arctan2(b, a))) for a, b in corners]
    else:
        raise ValueError(f"unknown shape {shape!r}")
    return [(x + radius * r * cos(t + angle), y + radius * r * sin(t + angle)) for r, t in spokes]


def _background(rng: np.random.Generator, name: str, width: int, height: int) -> Image.Image:
    plain = {"white": (246, 246, 246), "cream": (240, 232, 212), "grey": (128, 128, 128), "black": (18, 18, 18)}
    if name in plain:
        tone = np.clip(np.array(plain[name]) + rng.integers(-8, 9), 0, 255)
        pixels = np.broadcast_to(tone, (height, width, 3))
    elif name == "gradient":
        top, bottom = rng.permutation([90.0, 225.0])
        pixels = np.broadcast_to(np.linspace(top, bottom, height)[:, None, None], (height, width, 3))
    else:
        cell = int(rng.integers(8, 17))
        board = (np.arange(height)[:, None] // cell + np.arange(width) // cell) % 2
        pixels = np.broadcast_to(np.where(board, 205, 232)[..., None], (height, width, 3))
    return Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))


def question(rng: np.random.Generator, task: str, scene: Scene, casual: bool = False) -> tuple[str, str]:
    """A question about a scene, and its answer."""
    wording = _wording(rng, task, casual)
    if task == "describe":
        return wording, scene.caption()
    if task == "objects":
        return wording, NUMBER_WORDS[len(scene.things)]
    novel = [thing for thing in scene.things if thing.pair in HELD_OUT]
    thing = novel[0] if novel else scene.things[int(rng.integers(len(scene.things)))]
    if task == "colour":
        return wording.format(shape=thing.shape), thing.colour
    present = {other.pair for other in scene.things}
    if rng.random() < 0.5:
        return wording.format(pair=_with_article(*thing.pair)), "yes"
    # Half of the absent pairs share the colour or the shape with something in the picture: those are the hard ones.
    # Held-out pairs are never asked for in vain, or training would teach that they are not there.
    absent = [pair for pair in SEEN if pair not in present]
    near = [pair for pair in absent if pair[0] == thing.colour or pair[1] == thing.shape]
    choices = near if rng.random() < 0.6 else absent
    return wording.format(pair=_with_article(*choices[int(rng.integers(len(choices)))])), "no"


def _text_question(rng: np.random.Generator, task: str, number: int | None, casual: bool) -> tuple[str, str]:
    wording = _wording(rng, task, casual)
    if task == "count":
        last = number or int(rng.integers(2, LARGEST_COUNT + 1))
        return wording.format(n=last), " ".join(str(i) for i in range(1, last + 1))
    if task == "repeat":
        count = number or int(rng.integers(2, 13) if rng.random() < 0.75 else rng.integers(13, 61))
        words: list[str] = []
        while len(words) < count:
            # Pairs of colour and shape, held-out ones too: their words are known, only such a picture is not.
            words += PAIRS[int(rng.integers(len(PAIRS)))] if rng.random() < 0.25 else [_pick(rng, WORDS)]
        answer = " ".join(words[:count])
        return wording.format(words=answer), answer
    given, answer = _pattern(rng, number)
    return wording.format(words=given), answer


def _pattern(rng: np.random.Generator, number: int | None) -> tuple[str, str]:
    """A beginning and its continuation: words that take turns, letters of the alphabet, or numbers with a step."""
    kind = "turns" if number else ("turns", "turns", "letters", "numbers")[int(rng.integers(4))]
    if kind == "turns":
        period = number or int(rng.integers(2, 5))
        stock = list(COLOURS) if rng.random() < 0.5 else WORDS
        unit = [stock[i] for i in rng.choice(len(stock), period, replace=False)]
        start = period * 2 + int(rng.integers(0, period))
        sequence = [unit[i % period] for i in range(start + 2 * period)]
        return " ".join(sequence[:start]), " ".join(sequence[start:])
    if kind == "letters":
        start = int(rng.integers(0, 18))
        sequence = [chr(ord("a") + start + i) for i in range(8)]
    else:
        step = int(rng.integers(1, 3))
        start = int(rng.integers(1, 13))
        sequence = [str(start + step * i) for i in range(8)]
    return " ".join(sequence[:4]), " ".join(sequence[4:])


def _wording(rng: np.random.Generator, task: str, casual: bool) -> str:
    if not casual:
        return _pick(rng, WORDINGS[task])
    wording = _pick(rng, WORDINGS[task] + CASUAL_WORDINGS[task])
    if rng.random() < 0.4:
        wording = wording[0].lower() + wording[1:]
    return wording.rstrip(".?") if rng.random() < 0.5 else wording


def _pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]


def _with_article(colour: str, shape: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"
