"""A small corpus and questions about it for envs/search.py: python data/search.py --out data/search

Made-up people and towns, so no model knows the answers. Half of the questions need two passages: where somebody was
born, and what that town is known for. Writes train.parquet, test.parquet and corpus.jsonl; the same seed gives the same
bytes. data_source is searchR1_towns, which rewards/search_qa.py scores.
"""

import json
import random
import re
from pathlib import Path

from verl_rows import make_row, parser, run, write

FIRST = ["Ada", "Boris", "Clara", "Dimitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Luca",
         "Mina", "Nils", "Olga", "Petra", "Quentin", "Rita", "Stefan", "Tara"]
LAST = ["Abel", "Brandt", "Costa", "Dahl", "Eriksen", "Ferro", "Glass", "Holm", "Ivanov", "Jansen", "Keller", "Lund",
        "Moreau", "Novak", "Orlov", "Price", "Quist", "Rossi", "Stern", "Toth"]
START = ["Al", "Bar", "Cor", "Dun", "El", "Fal", "Gor", "Hal", "Is", "Kal"]
END = ["burg", "dale", "field", "ford", "haven", "mouth", "stead", "ton", "vik", "wick"]
WORK = ["baker", "carpenter", "doctor", "engineer", "farmer", "gardener", "judge", "musician", "painter", "sailor"]
FAME = ["its cheese", "its clock tower", "its glass works", "its harbour", "its horse market", "its lace",
        "its library", "its salt mine", "its stone bridge", "its wooden church"]
INSTRUCTION = ("Write <search>words</search> to search; passages come back between <information> and </information>. "
               "Write the final answer, a few words, between <answer> and </answer>.")


def make_facts(num_people: int, rng: random.Random) -> tuple[list[dict], list[tuple[str, str]]]:
    """The corpus, and pairs of a question and its answer."""
    towns = {start + end: rng.choice(FAME) for start in START for end in END}
    corpus = [{"title": town, "text": f"{town} is a town known for {fame}."} for town, fame in towns.items()]
    questions = []
    for name in rng.sample([f"{first} {last}" for first in FIRST for last in LAST], num_people):
        town, work = rng.choice(list(towns)), rng.choice(WORK)
        corpus.append({"title": name, "text": f"{name} was born in {town} and works as a {work}."})
        questions.append((f"Where was {name} born?", town))
        questions.append((f"What is the town where {name} was born known for?", towns[town]))
    rng.shuffle(corpus)
    rng.shuffle(questions)
    return corpus, questions


def rows(questions: list[tuple[str, str]], split: str) -> list[dict]:
    return [make_row("searchR1_towns", f"{question}\n{INSTRUCTION}", {"target": [answer]}, "search", split, index)
            for index, (question, answer) in enumerate(questions)]


TOWN, PERSON, WORKS = (f"(?:{'|'.join(words)})" for words in (
    (start + end for start in START for end in END), (f"{first} {last}" for first in FIRST for last in LAST), WORK))
FACT = re.compile(rf"({TOWN}) is a town known for (?:{'|'.join(FAME)})\.|"
                  rf"({PERSON}) was born in {TOWN} and works as a {WORKS}\.")


def check_replaceable(path: Path) -> None:
    """Raises ValueError for a file that is no corpus of `make_facts`."""
    if not path.exists() and not path.is_symlink():
        return
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found = [FACT.fullmatch(row["text"]) for row in rows]
        is_own = all(fact and row == {"title": fact[1] or fact[2], "text": fact[0]} for fact, row in zip(found, rows))
    except (OSError, ValueError, KeyError, TypeError):
        is_own = False
    if not is_own or path.is_symlink():
        raise ValueError(f"{path} would be replaced, and is no corpus of this script: move it away, or name another "
                         f"folder, --out")


def main() -> None:
    args = parser(__doc__, "search")
    args.add_argument("--num-people", type=int, default=300, help="in the corpus, with two questions each (300)")
    args.add_argument("--num-test", type=int, default=64, help="questions in test.parquet (64)")
    args.add_argument("--seed", type=int, default=0, help="random seed of the rows (0)")
    args = args.parse_args()
    if not 1 <= args.num_people <= len(FIRST) * len(LAST) or not 1 <= args.num_test < 2 * args.num_people:
        raise ValueError(f"--num-people {args.num_people} must be 1 to {len(FIRST) * len(LAST)}, --num-test "
                         f"{args.num_test} at least 1 and less than twice as many")
    check_replaceable(args.out / "corpus.jsonl")
    corpus, questions = make_facts(args.num_people, random.Random(args.seed))
    write(rows(questions[args.num_test :], "train"), args.out / "train.parquet")
    write(rows(questions[: args.num_test], "test"), args.out / "test.parquet")
    (args.out / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))


if __name__ == "__main__":
    run(main)
