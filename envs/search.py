"""Search-R1's search tool (Jin et al. 2025, arXiv 2503.09516) over a folder of one's own, ranked by BM25 (bm25s).

    python data/search.py --out data/search
    --rollout.episode envs/search.py --rollout.max-turns 5 --train-data data/search/train.parquet

<search>words</search> in a reply is answered with passages, <answer>...</answer> ends the episode. The environment
variable SEARCH_CORPUS names the corpus, JSON lines with `title` and `text`; it is read and indexed once, at the start.
"""

import json
import os
from pathlib import Path

try:
    import bm25s
except ModuleNotFoundError as error:
    raise ValueError(f"--rollout.episode envs/search.py: package {error.name} is not installed; run `pip install "
                     f"bm25s==0.3.16`") from None

from rewards.format import last_between
from rewards.search_qa import compute_score

CORPUS = Path(os.environ.get("SEARCH_CORPUS", "data/search/corpus.jsonl"))
NUM_PASSAGES = 3
MAX_PASSAGE = 600  # characters


def load_corpus(path: Path) -> tuple[list[str], bm25s.BM25]:
    if not path.is_file():
        raise ValueError(f"--rollout.episode envs/search.py: no corpus {path}; run `python data/search.py`, or name "
                         f"another one in the environment variable SEARCH_CORPUS")
    with path.open() as lines:  # not splitlines(): a JSON text may hold U+2028 and other line ends of Unicode
        rows = [json.loads(line) for line in lines]
    passages = [f"{row['title']}: {row['text']}"[:MAX_PASSAGE] for row in rows]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return passages, index


PASSAGES, INDEX = load_corpus(CORPUS)


def search(query: str) -> str:
    """The best passages, one a line."""
    words = bm25s.tokenize(query, show_progress=False)
    number = min(NUM_PASSAGES, len(PASSAGES))
    found, scores = INDEX.retrieve(words, k=number, show_progress=False)
    passages = [PASSAGES[place] for place, score in zip(found[0], scores[0]) if score > 0]
    return "\n".join(passages) or "Nothing was found."


async def episode(chat, row):
    """The reward is rewards/search_qa.py's: 1 if the answer is one of the row's."""
    text = await chat.reply()
    num_searches = 0
    while text is not None and "<answer>" not in text:
        query = last_between(text, "<search>", "</search>")
        if query is None:
            break
        num_searches += 1
        information = f"<information>{search(query)}</information>"
        text = await chat.reply({"role": "user", "content": information})
    score = compute_score(row["data_source"], text or "", row["reward_model"]["ground_truth"])
    return score | {"searches": num_searches}
