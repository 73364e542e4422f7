"""Small generated data of the form of MNLI (pairs of sentences with one of three labels) and of RACE (a text, a question, four answers).

python -m tests.lm.run.judged_texts FOLDER
"""

import json
import random
import sys
from pathlib import Path

COLORS = ("red", "blue", "green", "black", "white", "brown")
ANIMALS = ("fox", "dog", "cat", "horse", "goat", "crow")
TOOLS = ("hammer", "saw", "rope", "ladder", "spade", "knife")  # never an answer
LABELS = ("entailment", "neutral", "contradiction")


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return premises with hypotheses that follow from them, contradict them, or neither."""
    rng, rows = random.Random(seed), []
    for i in range(count):
        color, animal, label = rng.choice(COLORS), rng.choice(ANIMALS), rng.choice(LABELS)
        unsaid = f"a {rng.choice(TOOLS)} is near"
        said = {"entailment": f"yes surely it is {color}", "contradiction": f"no never not {color}", "neutral": unsaid}
        rows.append({"premise": f"{animal} {i} is {color}", "hypothesis": said[label], "label": label})
    return rows


def questions(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Return texts with a question about a color, and four answers, of which one is a color.

    A question that asks for one of two kinds would need more training: runs stay for long at the loss of choosing between the two.
    """
    rng, rows = random.Random(seed), []
    for i in range(count):
        answers = [rng.choice(COLORS), rng.choice(ANIMALS), *rng.sample(TOOLS, 2)]
        right = answers[0]
        rng.shuffle(answers)
        rows.append({"article": f"text {i}", "question": "which color", "options": answers, "answer": "ABCD"[answers.index(right)]})
    return rows


def write(folder: Path) -> None:
    """Write pairs.jsonl and questions.jsonl."""
    for name, rows in (("pairs", pairs(1500)), ("questions", questions(1500))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
